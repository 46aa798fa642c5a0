"""What plain gloo does with the same bytes, between the same nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.harness.clock import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that this rank sends to another rank and receives from it at the same time.

    Attributes:
        outgoing: None: it sends nothing.
        incoming: None: it receives nothing.
    """

    outgoing: torch.Tensor | None
    incoming: torch.Tensor | None
    other: int

    def as_one(self) -> float:
        """Return the seconds of one message each way."""
        return self._in_messages_of(max(self._nbytes(self.outgoing), self._nbytes(self.incoming)))

    def in_chunks(self) -> float:
        """Return the seconds of messages of 8 MiB."""
        return self._in_messages_of(CHUNK)

    def ways(self) -> Mapping[str, Callable[[], float]]:
        """Return the ways to exchange, by name."""
        return {"one message": self.as_one, "8 MiB messages": self.in_chunks}

    def _in_messages_of(self, nbytes: int) -> float:
        return seconds(lambda: self._pass(nbytes))

    def _pass(self, nbytes: int) -> None:
        works = (
            []
            if self.incoming is None
            else [dist.irecv(one, self.other) for one in self.incoming.split(nbytes)]
        )
        works += (
            []
            if self.outgoing is None
            else [dist.isend(one, self.other) for one in self.outgoing.split(nbytes)]
        )
        for work in works:
            assert work is not None
            work.wait()

    @staticmethod
    def _nbytes(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.nbytes


def touched(nbytes: int) -> torch.Tensor:
    """Return bytes in memory whose pages are all there."""
    return torch.ones(nbytes, dtype=torch.uint8)


def in_tmpfs(path: Path, nbytes: int) -> torch.Tensor:
    """Return bytes in an unlinked file, whose pages are all there."""
    tensor = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
    path.unlink()
    return tensor.fill_(1)
