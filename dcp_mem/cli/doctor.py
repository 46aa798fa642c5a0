"""`dcp-mem doctor`: check the machine and the storage before training does."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from dcp_mem.cli.options import CommonOptions, subcommand
from dcp_mem.cli.screen import shown
from dcp_mem.config import memory_root_path, root_url
from dcp_mem.operations.doctor import Check, Severity, examine

_HELP = """Check this machine and, with ROOT, its storage for what training needs; say what to do
about problems.

On storage it writes one kilobyte under a name of its own (.dcp_mem-doctor-…), reads it, tries to
replace it, and deletes it. Exit code 1 if a check fails; a warning is no failure.

Examples:
  dcp-mem doctor
  dcp-mem doctor s3://ckpts/run-42
  dcp-mem doctor abfs://ckpts/run-42 --storage-option account_name=mine
"""
_COLORS = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}


@subcommand("doctor", _HELP, needs_root=False)
def command(common: CommonOptions) -> int:
    """Print each check; return 1 if one fails.

    Args:
        common: The options that all commands have.
    """
    checks = []
    for check in examine(
        memory_root_path(common.memory_root), root_url(common.root), common.storage_options
    ):
        checks.append(check)
        _show(common, check)
    is_failed = any(check.verdict == Severity.FAIL for check in checks)
    common.screen.answer(is_failed=is_failed, checks=[asdict(check) for check in checks])
    return 1 if is_failed else 0


def _show(common: CommonOptions, check: Check) -> None:
    """Print a check as soon as it is made: storage that doesn't answer takes its time."""
    line = Text.assemble(
        (f"{check.verdict.value:<5}", _COLORS[check.verdict]),
        f"{check.name:<20}",
        shown(check.found),
    )
    common.screen.line(line)
    if check.advice:
        common.screen.line(
            Text(
                f"     {'':<20}{shown(check.advice)}",
                "dim" if check.verdict == Severity.OK else _COLORS[check.verdict],
            )
        )
