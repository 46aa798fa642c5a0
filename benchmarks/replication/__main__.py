"""The command: run the cases, print what they found, write it down."""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import head, leave_on_sigterm, run
from benchmarks.replication.cases import blocking, deciding, memory, recovery, throughput
from benchmarks.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.report import Section

CASES: Mapping[str, Callable[[Settings, str], Section]] = {
    "blocking": blocking.run,
    "throughput": throughput.run,
    "recovery": recovery.run,
    "memory": memory.run,
    "deciding": deciding.run,
}
HOW_TO_READ = """\
Nodes are network namespaces on this machine, with a tmpfs of their own each (huge={huge}); they share its
cores, one thread of torch's each. Times are the median of the repeats, with the middle half in brackets;
each repeat counts as long as its slowest rank. A ratio is the median of the ratios of neighbouring runs: floor
and ours are measured in turn, in the same processes. The floor of what goes over the network is plain gloo
between the same nodes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 when one of them could not be measured, whatever the verdicts."""
    leave_on_sigterm()
    options = _parser().parse_args(arguments)
    settings = Settings(
        quick=options.quick,
        repeats=options.repeats or (5 if options.quick else 11),
        tmpfs=Path("/dev/shm"),
        disk=Path(tempfile.gettempdir()),
    )
    chosen = {name: partial(_run, CASES[name], options.huge) for name in options.only or CASES}
    repeats = f"{settings.repeats}; fresh processes for loads: {settings.load_restarts}"
    text = head("benchmarks.replication", settings, repeats, HOW_TO_READ.format(huge=options.huge), "Peer memory")
    return run(chosen, settings, text, options.output)


def _run(case: Callable[[Settings, str], Section], huge: str, settings: Settings) -> Section:
    return case(settings, huge)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replication", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller states, fewer repeats")
    parser.add_argument("--repeats", type=int, help="timed runs per process (11, quick: 5)")
    parser.add_argument("--only", action="append", choices=tuple(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument(
        "--huge", choices=("never", "within_size", "always"), default="never", help="pages of the nodes' tmpfs"
    )
    parser.add_argument("--output", type=Path, help="markdown file to put the tables into; other parts of it stay")
    return parser


if __name__ == "__main__":
    sys.exit(main())
