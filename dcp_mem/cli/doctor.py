"""`dcp-mem doctor`."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from dcp_mem.cli.options import Asked, subcommand
from dcp_mem.cli.screen import shown
from dcp_mem.config import memory_root, root_url
from dcp_mem.operating.doctor import FAIL, OK, WARN, Check, examine

_HELP = """Check this machine and, with ROOT, its storage for what training will need; say what to do where something is amiss.

On storage it puts a kilobyte under a name of its own (.dcp_mem-doctor-…), reads it, tries to replace it, and deletes it. Exits
with 1 where a check fails; warnings don't count.

Examples:
  dcp-mem doctor
  dcp-mem doctor s3://ckpts/run-42
  dcp-mem doctor abfs://ckpts/run-42 --storage-option account_name=mine
"""
_COLORS = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@subcommand("doctor", _HELP, needs_root=False)
def command(asked: Asked) -> int:
    checks = []
    for check in examine(memory_root(asked.memory), root_url(asked.root), asked.storage_options):
        checks.append(check)
        _show(asked, check)
    is_failed = any(check.verdict == FAIL for check in checks)
    asked.screen.answer(is_failed=is_failed, checks=[asdict(check) for check in checks])
    return 1 if is_failed else 0


def _show(asked: Asked, check: Check) -> None:
    """At once: storage that doesn't answer takes its time."""
    line = Text.assemble((f"{check.verdict:<5}", _COLORS[check.verdict]), f"{check.name:<20}", shown(check.found))
    asked.screen.line(line)
    if check.advice:
        asked.screen.line(
            Text(f"     {'':<20}{shown(check.advice)}", "dim" if check.verdict == OK else _COLORS[check.verdict])
        )
