"""The command: run the cases, print what they found, write it down."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from benchmarks.cases import first, memory, planning, restore, save, slowdown, steady
from benchmarks.report import failures, summary
from benchmarks.scratch import file_system, huge_pages
from benchmarks.settings import GIB, Settings

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
    signal.signal(signal.SIGTERM, _leave)  # so that tmpfs is emptied
    options = _parser().parse_args(arguments)
    settings = Settings(
        quick=options.quick,
        repeats=options.repeats or (7 if options.quick else 15),
        tmpfs=options.tmpfs,
        disk=options.disk,
    )
    print(head := _head(settings))
    sections: list[Section] = []
    for name in options.only or CASES:
        section = CASES[name](settings)
        print(section.markdown, flush=True)
        sections.append(section)
        if options.output:  # after each, so that a late failure loses nothing
            _write(options.output, head, sections)
    print(summary(sections))
    return int(failures(sections))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--repeats", type=int, help="timed runs per process (15, quick: 7)")
    parser.add_argument("--only", action="append", choices=tuple(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--output", type=Path, help="where to write the tables as markdown")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs to work in")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a disk to flush to")
    return parser


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _write(path: Path, head: str, sections: Sequence[Section]) -> None:
    parts = [head, *(section.markdown for section in sections), summary(sections)]
    path.write_text("\n".join(parts))


def _head(settings: Settings) -> str:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    now = dt.datetime.now(dt.timezone.utc)
    facts = {
        "command": f"`python -m benchmarks.core {shlex.join(sys.argv[1:])}`".replace(" `", "`"),
        "when": f"{now:%Y-%m-%d %H:%M} UTC, at commit {_commit()}",
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {size / GIB:.0f} GiB, "
        f"Linux {platform.release()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "memory": f"{settings.tmpfs} ({file_system(settings.tmpfs)}; huge pages: {huge_pages()})",
        "disk": f"{settings.disk} ({file_system(settings.disk)})",
        "repeats": f"{settings.repeats}; fresh processes for first saves: {settings.restarts}; "
        f"torch's writers: {settings.peer_repeats}",
        "load": f"{os.getloadavg()[0]:.1f} before the start",
    }
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join(["# Benchmark results", "", *lines, "", HOW_TO_READ])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
