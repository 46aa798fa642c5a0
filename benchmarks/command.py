"""What the commands share: they run cases, say where, print what was found and write it down."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from benchmarks.report import failures, summary
from benchmarks.scratch import file_system, huge_pages
from benchmarks.settings import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.report import Section
    from benchmarks.settings import Settings


def run(cases: Mapping[str, Callable[[Settings], Section]], settings: Settings, head: str, output: Path | None) -> int:
    """Run the cases; 1 when one of them could not be measured, whatever the verdicts."""
    print(head)
    sections: list[Section] = []
    for case in cases.values():
        section = case(settings)
        print(section.markdown, flush=True)
        sections.append(section)
        if output:  # after each, so that a late failure loses nothing
            _write(output, head, sections)
    print(summary(sections))
    return int(failures(sections))


def leave_on_sigterm() -> None:
    """Raise SystemExit where a signal would end this process, so that tmpfs is emptied."""
    signal.signal(signal.SIGTERM, _leave)


def head(module: str, settings: Settings, repeats: str, how_to_read: str, title: str = "Benchmark results") -> str:
    """What was run, when and where, and what a reader has to know. title: of the part that it begins."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    now = dt.datetime.now(dt.timezone.utc)
    facts = {
        "command": f"`python -m {module} {shlex.join(sys.argv[1:])}`".replace(" `", "`"),
        "when": f"{now:%Y-%m-%d %H:%M} UTC, at commit {_commit()}",
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {size / GIB:.0f} GiB, "
        f"Linux {platform.release()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "memory": f"{settings.tmpfs} ({file_system(settings.tmpfs)}; huge pages: {huge_pages()})",
        "disk": f"{settings.disk} ({file_system(settings.disk)})",
        "repeats": repeats,
        "load": f"{os.getloadavg()[0]:.1f} before the start",
    }
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join([f"# {title}", "", *lines, "", how_to_read])


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _write(path: Path, head: str, sections: Sequence[Section]) -> None:
    """Put the part into the file, in place of one of the same title; other parts stay."""
    text = "\n".join([head, *(section.markdown for section in sections), summary(sections)])
    before, after = _around(path.read_text() if path.exists() else "", head.partition("\n")[0])
    path.write_text(before + text + after)


def _around(text: str, title: str) -> tuple[str, str]:
    """What stands before the part of that title, and after it. A part begins with a line that begins with "# "."""
    parts = re.split(r"^(?=# )", text, flags=re.MULTILINE)
    starts = [number for number, part in enumerate(parts) if part.partition("\n")[0] == title]
    at = starts[0] if starts else len(parts)
    before, after = "".join(parts[:at]), "".join(parts[at + 1 :])
    return before if not before or before.endswith("\n\n") else f"{before.rstrip()}\n\n", after and f"\n{after}"


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
