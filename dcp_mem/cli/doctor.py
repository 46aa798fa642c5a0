"""`dcp-mem doctor`: check the machine and the storage before training does."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.common.values import shown
from dcp_mem.config import memory_root_path
from dcp_mem.operations.doctor import Check, Severity, examine
from dcp_mem.operations.network import judge_network, judge_transport, measure_network

_COLORS = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}


def run(common: CommonOptions, is_of_peers: bool, transport: str | None) -> int:
    checks = []
    root = memory_root_path(common.memory_root)
    of_machine = examine(root, common.root, common.storage_options)
    for check in _checks_of_peers(transport) if is_of_peers else of_machine:
        checks.append(check)
        _show(common, check)
    if is_of_peers and not checks:
        return 0
    is_failed = any(check.verdict == Severity.FAIL for check in checks)
    common.screen.answer(is_failed=is_failed, checks=checks)
    return 1 if is_failed else 0


def _checks_of_peers(transport: str | None) -> Iterator[Check]:
    """Measure together with the other processes; yield the checks in the first one alone."""
    nodes, moved = measure_network(transport)
    if os.environ.get("RANK", "0") == "0":
        yield from judge_network(nodes)
        if transport is not None:
            yield from judge_transport(moved, transport)


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
