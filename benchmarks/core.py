"""The command: run the cases, print what they found, write it down."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cases import first, memory, planning, restore, save, slowdown, steady
from benchmarks.command import head, leave_on_sigterm, run
from benchmarks.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.report import Section

CASES: Mapping[str, Callable[[Settings], Section]] = {
    "save": save.run,
    "first": first.run,
    "planning": planning.run,
    "steady": steady.run,
    "restore": restore.run,
    "slowdown": slowdown.run,
    "memory": memory.run,
}
HOW_TO_READ = """\
Times are the median of the repeats, with the middle half in brackets; with several ranks, each
repeat counts as long as its slowest rank. A ratio is the median of the ratios of neighbouring runs:
floor and ours are measured in turn, in one process, with the same threads. Torch's writers and
readers work on the same tmpfs, in the same run. The least that any writer could reach is the floor
and, on top, `dcp.save` through a writer that does nothing: what it shows to be out of reach, is.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 when one of them could not be measured, whatever the verdicts."""
    leave_on_sigterm()
    options = _parser().parse_args(arguments)
    settings = Settings(
        quick=options.quick,
        repeats=options.repeats or (7 if options.quick else 15),
        tmpfs=options.tmpfs,
        disk=options.disk,
    )
    chosen = {name: CASES[name] for name in options.only or CASES}
    return run(chosen, settings, _head(settings), options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--repeats", type=int, help="timed runs per process (15, quick: 7)")
    parser.add_argument("--only", action="append", choices=tuple(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--output", type=Path, help="markdown file to put the tables into; other parts of it stay")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs to work in")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a disk to flush to")
    return parser


def _head(settings: Settings) -> str:
    repeats = (
        f"{settings.repeats}; fresh processes for first saves: {settings.restarts}; "
        f"torch's writers: {settings.peer_repeats}"
    )
    return head("benchmarks.core", settings, repeats, HOW_TO_READ)


if __name__ == "__main__":
    sys.exit(main())
