"""`dcp-mem`, as its users have it: the command of that name which the package installs.

result = command("export", url, "step-1", "out")
assert result.exit_code == 0, result.output
"""

from importlib.metadata import entry_points

from click.testing import CliRunner, Result

from tests.support.checkpoints.jobs import Job


def command(*arguments: str, stdin: str | None = None) -> Result:
    """Run the command in this process."""
    (installed,) = entry_points(group="console_scripts", name="dcp-mem")
    return CliRunner().invoke(installed.load(), arguments, input=stdin)


def reject(job: Job, name: str, why: str = "nan") -> None:
    """Reject a checkpoint by the command line, in memory and on storage."""
    result = command("reject", job.url or "-", name, "--why", why, *job.arguments)
    assert result.exit_code == 0, result.output
