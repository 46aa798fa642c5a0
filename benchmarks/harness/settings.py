"""What the command line chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness.states import Workload

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much to measure, and where.

    Attributes:
        quick: Fewer sizes, smaller states.
        repeats: Timed runs within a process.
        tmpfs: A tmpfs to work in.
        disk: A disk to flush to.
        huge: Huge pages of the tmpfs of simulated nodes: "never", "within_size" or "always".
    """

    quick: bool
    repeats: int
    tmpfs: Path
    disk: Path
    huge: str = "never"

    @property
    def restarts(self) -> int:
        """Fresh processes, where only the first run of a process tells."""
        return min(self.repeats, 5)

    @property
    def load_restarts(self) -> int:
        """Fresh processes for first loads: each has to make a checkpoint's worth of tensors."""
        return min(self.repeats, 3) if self.quick else self.restarts

    def repeats_of(self, workload: Workload) -> int:
        """Runs within a process; fewer where torch's planning makes each of them long."""
        return min(self.repeats, 7) if workload.many else self.repeats

    @property
    def peer_repeats(self) -> int:
        """Runs of torch's writers, which take ten times as long as what they are compared with."""
        return min(self.repeats, 2) if self.quick else 3

    @property
    def async_repeats(self) -> int:
        """Runs of torch's asynchronous savers, after a first one that isn't counted."""
        return 1 if self.quick else 2
