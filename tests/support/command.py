"""`dcp-mem`, as its users have it: the command of that name which the package installs.

result = command("export", url, "step-1", "out")
assert result.exit_code == 0, result.output
"""

from importlib.metadata import entry_points

from click.testing import CliRunner, Result


def command(*arguments: str, stdin: str | None = None) -> Result:
    """Run the command in this process."""
    (installed,) = entry_points(group="console_scripts", name="dcp-mem")
    return CliRunner().invoke(installed.load(), arguments, input=stdin)
