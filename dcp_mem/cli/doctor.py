"""`dcp-mem doctor`: check the machine and the storage before training does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
from rich.text import Text

from dcp_mem.cli.options import CommonOptions, subcommand
from dcp_mem.common.values import shown
from dcp_mem.config import memory_root_path, root_url, transport_point
from dcp_mem.operations.doctor import Check, Severity, examine
from dcp_mem.operations.network import judge_network, judge_transport, measure_network

_HELP = """Check this machine and, with ROOT, its storage for what training needs; say what to do
about problems.

On storage it writes one kilobyte under a name of its own (.dcp_mem-doctor-…), reads it, tries to
replace it, and deletes it. Exit code 1 if a check fails; a warning is no failure.

With --peers it measures the network between nodes instead: start one process on each node, by
torchrun or srun; the first one prints the outcome. With --transport nixl beside it, each node also
reads 1 GiB from another one by NIXL; it fails where that doesn't work.

Examples:
  dcp-mem doctor
  dcp-mem doctor s3://ckpts/run-42
  dcp-mem doctor abfs://ckpts/run-42 --storage-option account_name=mine
  torchrun --no-python --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \\
      dcp-mem doctor --peers
"""
_COLORS = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}


@subcommand("doctor", _HELP, needs_root=False)
@click.option(
    "--peers", "is_of_peers", is_flag=True, help="Measure the network between nodes instead."
)
@click.option(
    "--transport",
    metavar="[auto|nixl|tcp|…]",
    help="With --peers: also try and measure what copies go by.",
)
def command(common: CommonOptions, is_of_peers: bool, transport: str | None) -> int:
    if transport and not is_of_peers:
        raise click.UsageError("--transport goes with --peers")
    if transport:
        transport_point(transport)
    checks = []
    root, url = memory_root_path(common.memory_root), root_url(common.root)
    of_machine = examine(root, url, common.storage_options)
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
