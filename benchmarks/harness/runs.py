"""A run: what was measured, when, where and at which commit; kept as JSON, shown as markdown."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from benchmarks.harness import tables
from benchmarks.harness.scratch import file_system, huge_pages
from benchmarks.harness.settings import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness.settings import Settings
    from benchmarks.harness.tables import Section

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results"
GENERATED = ("benchmarks/results", "benchmarks/pictures", "benchmarks/RESULTS.md")
"""What recording and drawing write: changes there don't make the tree dirty."""
UNCOMMITTED = "with uncommitted changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of the command found.

    Attributes:
        name: Of its files, "<date>-<topic>".
        facts: Command, time, commit, machine and so on, as texts.
        how_to_read: What a reader of the tables has to know.
        remarks: Paragraphs about the figures, written by hand.
    """

    name: str
    title: str
    facts: Mapping[str, str]
    how_to_read: str = ""
    sections: Sequence[Section] = ()
    remarks: Sequence[str] = field(default=())

    @property
    def is_clean(self) -> bool:
        """Whether the commit is all that the figures depend on."""
        return UNCOMMITTED not in self.facts["commit"]

    @property
    def head(self) -> str:
        facts = [f"- {name}: {value}" for name, value in self.facts.items()]
        lines = [f"# {self.title}", "", *facts, ""]
        return "\n".join([*lines, self.how_to_read, ""] if self.how_to_read else lines)

    @property
    def markdown(self) -> str:
        parts = [self.head, *(section.markdown for section in self.sections)]
        if self.sections:
            parts.append(tables.summary(self.sections))
        if self.remarks:
            parts.append("\n\n".join(["## Remarks", *self.remarks]) + "\n")
        return "\n".join(parts)

    def write(self, directory: Path = RESULTS) -> None:
        """Write both files of this run."""
        directory.mkdir(exist_ok=True)
        found: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "facts": dict(self.facts),
            "how_to_read": self.how_to_read,
            "sections": [tables.to_json(section) for section in self.sections],
            "remarks": list(self.remarks),
        }
        text = json.dumps(found, indent=1, ensure_ascii=False)
        (directory / f"{self.name}.json").write_text(text + "\n")
        self.write_markdown(directory)

    def write_markdown(self, directory: Path = RESULTS) -> None:
        (directory / f"{self.name}.md").write_text(self.markdown)


def read(path: Path) -> Run:
    """Return the run that a JSON file holds."""
    found = json.loads(path.read_text())
    sections = [tables.from_json(section) for section in found.pop("sections")]
    return Run(**found, sections=sections)


def recorded(directory: Path = RESULTS) -> list[Run]:
    """Return all recorded runs, oldest first."""
    runs = [read(path) for path in directory.glob("*.json")]
    return sorted(runs, key=lambda run: (run.facts["when"], run.name))


def facts(command: str, settings: Settings, repeats: str) -> dict[str, str]:
    """Return the facts of a run that begins now."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    changes = uncommitted()
    return {
        "command": f"`{command}`",
        "when": f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commit": f"{_commit()}, {UNCOMMITTED}" if changes else _commit(),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {size / GIB:.0f} GiB, "
        f"Linux {platform.release()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "memory": f"{settings.tmpfs} ({file_system(settings.tmpfs)}; huge pages: {huge_pages()}; "
        f"of simulated nodes: {settings.huge})",
        "disk": f"{settings.disk} ({file_system(settings.disk)})",
        "repeats": repeats,
        "load": f"{os.getloadavg()[0]:.1f} before the start",
    }


def uncommitted() -> list[str]:
    """Return the files with uncommitted changes, without generated files."""
    excluded = [f":(top,exclude){path}" for path in GENERATED]
    return _git("status", "--porcelain", "--", ":(top)", *excluded).splitlines()


def leave_on_sigterm() -> None:
    """Raise SystemExit where a signal would end this process, so that tmpfs is emptied."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    return _git("describe", "--always", "--abbrev=7").strip() or "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(BENCHMARKS), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout
