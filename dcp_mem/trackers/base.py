"""What trackers are told, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

KINDS = ("save", "flush", "copies", "restore")
_GOOD = ("complete", "durable", "replicated", "restored")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has come of a checkpoint.

    kind, outcome: a "save" is "complete", "skipped" or "failed"; a "flush" "durable", "skipped" or "failed" (then it is tried
    again); "copies" are "replicated" or "failed"; a "restore" is "restored". time: when that was known, or happened, in seconds
    since the epoch. step: None where nobody knows. seconds: that it took; of a save, that training was kept. nbytes: of the
    whole checkpoint; of copies, of all of them; of a restore, what all ranks took. figures: more of them, by name. detail: why
    it failed; of a restore, what was passed over.
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
        """Whether it came to what it should have."""
        return self.outcome in _GOOD

    @property
    def throughput(self) -> float:
        """Bytes per second; 0.0 where nothing is known of one of them."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def scalars(self) -> dict[str, float]:
        """All that is a number, by names such as "save_seconds". "save_ok" is 1 or 0; the others are those of good ones."""
        found = {"ok": float(self.is_good)}
        if self.is_good:
            found |= {"seconds": self.seconds, "bytes": float(self.nbytes), "bytes_per_second": self.throughput}
            found |= self.figures
        return {f"{self.kind}_{name}": value for name, value in found.items()}


@runtime_checkable
class Tracker(Protocol):
    """Something that takes down what comes of checkpoints.

    All calls come from one thread of rank 0, which is not training's. Make it on all ranks; what it opens, it opens when it is
    first told something. A tracker that raises is left out from then on.
    """

    def track(self, event: Event) -> None:
        """Take down an event. They come in the order in which they are known; flushes and copies some time after their save."""

    def close(self) -> None:
        """Put in its place what was held back. Nothing comes after that."""
