"""Connections of two ranks each, over gloo, for bulk.

In a group of many, gloo breaks off everything with everybody as soon as one of them keeps a message waiting for too long.
Here nobody but the two notices. And each has a thread of its own, where a group has one for all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dcp_mem.ranks.prompt import connected

_TAG = 0x64638


class GlooLine:
    """One rank's end of a line."""

    def __init__(self, store: dist.Store, is_sender: bool, seconds: float) -> None:
        """Connect; returns once the other end has done so too. store: where the two meet, and nobody else."""
        self._other = 1 if is_sender else 0
        # Any: torch declares no methods for a gloo group that isn't registered
        self._group: Any = connected(store, 1 - self._other, 2, seconds)

    def send(self, data: Any) -> _Passing:
        return _Passing(self._group.send([torch.frombuffer(data, dtype=torch.uint8)], self._other, _TAG))

    def receive(self, data: Any) -> _Passing:
        return _Passing(self._group.recv([torch.frombuffer(data, dtype=torch.uint8)], self._other, _TAG))

    def close(self) -> None:
        self._group = None


class _Passing:
    """A message on its way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
