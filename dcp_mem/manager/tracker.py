"""The interface of trackers, and the events that they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal, Protocol, runtime_checkable

from dcp_mem.common.value_class import value_class

KINDS = ("save", "flush", "copies", "restore")
_GOOD = ("complete", "durable", "replicated", "restored")


@value_class(kw_only=True)
class Event:
    """Something that has become of a checkpoint.

    Attributes:
        kind: "save", "flush", "copies" or "restore".
        outcome: A save is "complete", "skipped" or "failed"; a flush "durable", "skipped" or
            "failed"
            (then it is tried again); copies are "replicated" or "failed"; a restore is "restored".
        time: When that happened, or was found out; seconds since the epoch.
        job: Name of the job.
        checkpoint: The checkpoint id.
        step: The training step; None if unknown.
        seconds: How long it took; of a save, how long training was blocked.
        nbytes: Size of the whole checkpoint; of copies, of all of them together; of a restore, the
            bytes that all ranks took.
        figures: Further figures, by name.
        detail: Why it failed; of a restore, what was passed over.
    """

    kind: Literal["save", "flush", "copies", "restore"]
    outcome: str
    time: float
    job: str
    checkpoint: str
    step: int | None
    seconds: float = 0.0
    nbytes: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the outcome is the one that was wanted."""
        return self.outcome in _GOOD

    @property
    def throughput(self) -> float:
        """Bytes per second; 0.0 if unknown."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def summary(self) -> str:
        """What became of which checkpoint, and why if that isn't good, as a text."""
        return f"{self.checkpoint}: {self.outcome}" + (f"; {self.detail}" if self.detail else "")

    def scalars(self) -> dict[str, float]:
        """Return all figures by names such as "save_seconds".

        "save_ok" is 1 or 0. The other figures are there only where the outcome is good.
        """
        found = {"ok": float(self.is_good)}
        if self.is_good:
            found |= {
                "seconds": self.seconds,
                "bytes": float(self.nbytes),
                "bytes_per_second": self.throughput,
            }
            found |= self.figures
        return {f"{self.kind}_{name}": value for name, value in found.items()}


@value_class(kw_only=True)
class Story:
    """All that is known of a job's checkpoints, earlier runs' too, as `dcp-mem report` tells it.

    Attributes:
        job: Name of the job.
        page: The report as an HTML page.
        files: The histories by name: `checkpointHistories.csv` and `recoveries.jsonl`.
        checkpoints: A row for each checkpoint, oldest first, all with the same columns.
        totals: Sums: saves, seconds blocked, bytes flushed, the effective training time ratio
            (`goodput`) and so on.
    """

    job: str
    page: str
    files: Mapping[str, str]
    checkpoints: Sequence[Mapping[str, str | float]]
    totals: Mapping[str, float]


@runtime_checkable
class Tracker(Protocol):
    """Something that records what becomes of checkpoints.

    All calls come from one thread of rank 0, which is not training's. Make the tracker on all
    ranks; it should open what it needs at its first event. A tracker that raises is left out from
    then on.
    """

    def track(self, event: Event) -> None:
        """Record an event.

        Events come in the order in which they become known: flushes and copies some time after
        their save.

        Args:
            event: A save, restore, flush or copy, and how it went.
        """

    def close(self) -> None:
        """Write out what was held back. No event comes after that."""


@runtime_checkable
class Publisher(Tracker, Protocol):
    """A tracker that shows the whole story as well."""

    def publish(self, story: Story) -> None:
        """Show a story in the place of an earlier one.

        It comes at the end, and in between once a minute at most. Where storage doesn't answer it
        is left out.

        Args:
            story: What is known by then.
        """
