"""Replicas that should be equal: tensors that several ranks hold, compared every so many saves."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dcp_mem.comm import Ranks, is_first_of_node
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.sendable import sendable
from dcp_mem.errors import ConfigError
from dcp_mem.format.checksums import checksum
from dcp_mem.functional import without_stateful
from dcp_mem.planning.flatten import flatten
from dcp_mem.planning.plain_tensors import is_plain
from dcp_mem.planning.shard_marks import mark_of
from dcp_mem.planning.sharded_tensors import local_chunk

TURNS = 8
"""Comparisons after which every tensor has had its turn: each copies a part of the state only."""
_MOST_NAMED = 8
Chunk = tuple[str, tuple[int, ...]]
"""A tensor's name, and where its chunk begins in it."""


@sendable
class _Sums(NamedTuple):
    """Checksums of chunks that some ranks hold, joined."""

    found: dict[Chunk, dict[int, tuple[int, ...]]]  # by chunk, the ranks that have each checksum

    def join(self, other: _Sums) -> _Sums:
        joined = dict(self.found)
        for chunk, ranks_of in other.found.items():
            both = dict(joined.get(chunk, {}))
            for crc, ranks in ranks_of.items():
                both[crc] = (*both.get(crc, ()), *ranks)
            joined[chunk] = both
        return _Sums(joined)


class ReplicaCheck:
    """Compares, across ranks, the tensors that data parallelism keeps equal.

    Every rank copies some of them when it saves, and sums up its copies behind training. The next
    save compares the sums. All ranks call everything together.

    `every`: saves from one comparison to the next; None for none. Raises ConfigError.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError(f"compare_replicas={every!r}: give a number of saves, at least 1")
        self._every = every
        self._saves = 0
        self._name = ""
        self._sums: dict[Chunk, int] = {}
        self._thread: threading.Thread | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a comparison has been begun; the same on all ranks."""
        return self._thread is not None

    def is_due(self) -> bool:
        """Count a save; return whether its state is to be compared."""
        if self._every is None:
            return False
        self._saves += 1
        return self._saves % self._every == 0

    def begin(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """Sum up copies of this turn's part in the background; return the state without objects."""
        assert self._every is not None
        turn = self._saves // self._every % TURNS
        self._name, self._sums = name, {}
        try:
            state = without_stateful(state)
            copies = {
                chunk: tensor.to("cpu", copy=True).contiguous()
                for chunk, tensor in _replicated(state)
                if zlib.crc32(repr(chunk).encode()) % TURNS == turn
            }
        except Exception:  # the save goes on; the other ranks compare what they have
            log.exception("replicas of %s aren't compared on this rank", name)
            copies = {}
        sums = self._sums
        self._thread = daemon(lambda: _sum_up(copies, sums), "dcp_mem-replicas")
        return state

    def finish(self, ranks: Ranks) -> Sequence[str]:
        """Return what differs between ranks, alike on all of them; each node logs it."""
        thread, self._thread = self._thread, None
        assert thread is not None
        thread.join()
        me: tuple[int, ...] = (ranks.rank,)
        own = {chunk: {crc: me} for chunk, crc in self._sums.items()}
        found = ranks.all_reduce(_Sums(own), _Sums.join).found
        wrong = sorted((chunk, sums) for chunk, sums in found.items() if len(sums) > 1)
        texts = [
            f"{self._name}: {name} differs between replicas: {_described(sums)}"
            for (name, _), sums in wrong[:_MOST_NAMED]
        ]
        if len(wrong) > _MOST_NAMED:
            texts.append(f"{self._name}: so do {len(wrong) - _MOST_NAMED} more tensors")
        if is_first_of_node():
            for text in texts:
                log.warning("%s", text)
        return texts


def _replicated(state: Mapping[str, Any]) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield the chunks that other ranks may hold as well: plain tensors, replicated DTensors."""
    _, leaves = flatten(state)
    for name, value in zip(leaves.names, leaves.values, strict=True):
        if type(value) is DTensor:
            mesh, placements = value.device_mesh, value.placements
            is_shared = any(
                placement.is_replicate() and mesh.size(dimension) > 1
                for dimension, placement in enumerate(placements)
            )
            local = value._local_tensor.detach()
            if is_shared and mesh.get_coordinate() is not None and is_plain(local):
                yield (name, local_chunk(value.shape, mesh, placements)[1]), local
        elif isinstance(value, torch.Tensor) and is_plain(value.detach()) and not mark_of(value):
            yield (name, ()), value.detach()


def _sum_up(copies: Mapping[Chunk, torch.Tensor], sums: dict[Chunk, int]) -> None:
    for chunk, tensor in copies.items():
        sums[chunk] = checksum(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _described(sums: Mapping[int, Sequence[int]]) -> str:
    """Return which ranks have the same bytes, for people."""
    groups = sorted((sorted(ranks) for ranks in sums.values()), key=lambda ranks: -len(ranks))
    return " and ".join(
        f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}" for ranks in groups
    )


def _listed(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return some + (f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")
