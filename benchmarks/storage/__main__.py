"""The command: run the cases, print what they found, write it down."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import head, leave_on_sigterm, run
from benchmarks.settings import Settings
from benchmarks.storage.cases import reads, replicated, servers, trainer, uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.report import Section

CASES: Mapping[str, Callable[[Settings], Section]] = {
    "uploads": uploads.run,
    "reads": reads.run,
    "servers": servers.run,
    "replicated": replicated.run,
    "trainer": trainer.run,
}
HOW_TO_READ = """\
Every route runs in a fresh process, several times; figures are medians, with the middle half in
brackets. CPU-s/GB is what the client's process spends, user and system time, per 10^9 bytes; ratios
are of medians. The floor is presigned requests over plain sockets; the raw SDK is botocore or
azure-storage-blob without anything around it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 when one of them could not be measured, whatever the verdicts."""
    leave_on_sigterm()
    options = _parser().parse_args(arguments)
    settings = Settings(
        quick=options.quick,
        repeats=options.repeats or (3 if options.quick else 5),
        tmpfs=options.tmpfs,
        disk=Path(tempfile.gettempdir()),
    )
    chosen = {name: CASES[name] for name in options.only or CASES}
    text = head("benchmarks.storage", settings, str(settings.repeats), HOW_TO_READ, "Storage")
    return run(chosen, settings, text, options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller objects, fewer repeats")
    parser.add_argument("--repeats", type=int, help="timed runs of each route (5, quick: 3)")
    parser.add_argument("--only", action="append", choices=tuple(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--output", type=Path, help="markdown file to put the tables into; other parts of it stay")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs to work in")
    return parser


if __name__ == "__main__":
    sys.exit(main())
