"""What the command line chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.states import Workload

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to measure, and where.

    `repeats` counts runs within a process; `restarts` counts fresh processes where only the first
    run of a process tells.
    """

    quick: bool
    repeats: int
    tmpfs: Path
    disk: Path

    @property
    def restarts(self) -> int:
        return 5

    @property
    def load_restarts(self) -> int:
        """Fresh processes for first loads: each has a checkpoint's worth of tensors to make first."""
        return 3 if self.quick else self.restarts

    def repeats_of(self, workload: Workload) -> int:
        """Runs within a process; where torch's planning makes each of them long, fewer."""
        return min(self.repeats, 7) if workload.many else self.repeats

    @property
    def peer_repeats(self) -> int:
        """Runs of torch's writers: ten times slower than what they are compared with."""
        return 2 if self.quick else 3

    @property
    def async_repeats(self) -> int:
        """Runs of torch's asynchronous savers, after a first one that isn't counted."""
        return 1 if self.quick else 2
