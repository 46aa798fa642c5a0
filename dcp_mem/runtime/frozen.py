"""Tensors that don't change from save to save, and the segment that several checkpoints share.

A declaration may be wrong, so each save looks:

1. The same storages, at the same addresses, with the same version counters.
2. Samples of CPU memory against the segment, at other places each time; of what lies on a device,
   a sum of all its bytes.

Now and then, in a thread, all bytes are held against the segment (`WholeComparison`). That finds
what the samples miss: a few values written past the version counter, as `tensor.data[3] = 0` does.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.format.layout import Columns
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.views import is_same
from dcp_mem.runtime.layouts import PlanLayout

ItemKey = tuple[str, tuple[int, ...]]
"""Name and offset of an item."""

_SAMPLES = 1024
"""Places to look at in all of a rank's frozen memory, at each save."""
_LEAST_SAMPLES = 8
"""Places to look at in each tensor, where it has so many bytes."""
_PIECE = 16 << 20
_MOST_STALE = 64
"""Checkpoints that turned out to hold stale bytes, of which other nodes are told."""
_COMPARED_EVERY = 8
"""Saves from one whole comparison to the next, where none goes to storage."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A tensor's memory and its counter of writes, by which a later save recognises it."""

    storage: StorageWeakRef  # doesn't keep it alive, and no other storage gets its number meanwhile
    address: int
    version: int
    total: int = 0  # of its bytes, where they lie on a device; 0 otherwise


def identity_of(tensor: torch.Tensor) -> Identity:
    """Return a tensor's identity as it is now, for a later save to compare."""
    return Identity(
        StorageWeakRef(tensor.untyped_storage()),
        tensor.data_ptr(),
        tensor._version,
        0 if tensor.is_cpu else _total(tensor),
    )


def has_identity(tensor: torch.Tensor) -> bool:
    """Return whether a tensor counts its writes, and can be compared with the bytes of a copy."""
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and not (tensor.is_inference() or tensor.is_neg() or tensor.is_conj())


@dataclass(eq=False, kw_only=True)
class FrozenSegment:
    """A sealed segment of frozen items, which later checkpoints may share."""

    keys: Sequence[ItemKey]
    layout: PlanLayout
    # of the tensors when they were copied; none where those were private copies
    identities: Sequence[Identity]
    slot: Slot
    claims: int
    # (name, save id) of checkpoints that share it since all bytes were last compared
    since: list[tuple[str, str]] = field(default_factory=list)
    is_stale: bool = False  # whether a comparison has found other bytes in the tensors
    is_replicated: bool = False  # whether the nodes that are to have copies have had them

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the tensors that are others, or have been written to."""
        found = []
        for number, (known, tensor) in enumerate(zip(self.identities, tensors, strict=True)):
            if (
                known.version != tensor._version
                or known.address != tensor.data_ptr()
                or known.storage.cdata != tensor.untyped_storage()._cdata
                or known.storage.expired()
            ):
                found.append(number)
        return found

    def differing(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the tensors with other bytes than the segment, by samples."""
        layout, is_cpu = self.layout.layout, [tensor.is_cpu for tensor in tensors]
        devices = [
            number
            for number, here in enumerate(is_cpu)
            if not here and _total(tensors[number]) != self.identities[number].total
        ]
        numbers = np.flatnonzero(np.array(is_cpu, bool) & (layout.payload_nbytes >= 8))
        addresses = np.array([known.address for known in self.identities], np.int64)[numbers]
        copies = self.slot.address + layout.payload_offsets[numbers]
        small = np.flatnonzero(np.array(is_cpu, bool) & (layout.payload_nbytes < 8))
        return sorted(
            [
                *devices,
                *numbers[_sampled(addresses, copies, layout.payload_nbytes[numbers])].tolist(),
                *(one for one in small.tolist() if not self.is_equal(one, tensors[one].data_ptr())),
            ]
        )

    def note_replicated(self) -> None:
        """Note that other nodes have copies of it now."""
        self.is_replicated = True

    def is_equal(
        self, number: int, address: int, may_go_on: Callable[[], bool] = lambda: True
    ) -> bool:
        """Return whether memory has the same bytes as an item of the segment.

        `may_go_on`: asked now and then; where it says no, the rest counts as equal.
        """
        layout = self.layout.layout
        copy = self.slot.address + int(layout.payload_offsets[number])
        nbytes = int(layout.payload_nbytes[number])
        for start in range(0, nbytes, _PIECE):
            if not may_go_on():
                return True
            if not is_same(address + start, copy + start, min(_PIECE, nbytes - start)):
                return False
        return True

    def is_compared_now(self, *, is_persisted: bool) -> bool:
        """Return whether all bytes are to be compared after this save."""
        return bool(self.since) and (is_persisted or len(self.since) >= _COMPARED_EVERY)


def _total(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bytes, taken as numbers, on its device."""
    flat = tensor.detach().reshape(-1)
    flat = flat.view(torch.uint8) if flat.numel() else flat.new_zeros(0, dtype=torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if not flat.numel() % dtype.itemsize and not flat.data_ptr() % dtype.itemsize:
            flat = flat.view(dtype)
            break
    return int(flat.sum(dtype=torch.int64).item())


def _sampled(addresses: Columns, copies: Columns, nbytes: Columns) -> Columns:
    """Return which memory differs from its copy at places chosen by chance."""
    if not len(nbytes):
        return np.zeros(0, np.int64)
    counts = np.maximum(_LEAST_SAMPLES, (_SAMPLES * nbytes) // nbytes.sum())
    which = np.repeat(np.arange(len(nbytes)), counts)
    words = (np.random.default_rng().random(len(which)) * (nbytes[which] // 8)).astype(np.int64)
    here, there = addresses[which] + 8 * words, copies[which] + 8 * words
    if not ((here | there) & 7).any():
        is_other = _words[here // 8 - 1] != _words[there // 8 - 1]
    else:
        is_other = _bytes[here - 1] != _bytes[there - 1]
    found: Columns = np.unique(which[is_other])
    return found


_bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (1 << 56)).from_address(1))
"""All memory, from address 1 on; only what a tensor or a slot holds is looked at."""
_words = np.ctypeslib.as_array((ctypes.c_uint64 * (1 << 53)).from_address(8))
"""The same in words of eight bytes, from address 8 on."""


class WholeComparison:
    """Holds all bytes of frozen CPU tensors against their segment, in a thread.

    Any thread may wait for it. One at a time: what comes while it works is left to the next save.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_cancelled = False

    @property
    def is_busy(self) -> bool:
        """Whether it compares just now."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        segment: FrozenSegment,
        tensors: Sequence[torch.Tensor],
        on_end: Callable[[Sequence[ItemKey], Sequence[tuple[str, str]]], None],
    ) -> None:
        """Begin; what has been written to in a way that the next save sees is left to that.

        `segment`: its slot stays as it is until `on_end` is called. `on_end`: called with the items
        that differ, and the checkpoints that share them since the last comparison that found none.
        """
        self.wait()
        self._is_cancelled = False
        work = partial(self._work, segment, tensors, on_end)
        self._thread = daemon(work, "dcp_mem-frozen")

    def wait(self) -> None:
        """Return once nothing is compared any more."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def cancel(self) -> None:
        """End the comparison, if there is one, without a result."""
        self._is_cancelled = True
        self.wait()

    def _work(
        self,
        segment: FrozenSegment,
        tensors: Sequence[torch.Tensor],
        on_end: Callable[[Sequence[ItemKey], Sequence[tuple[str, str]]], None],
    ) -> None:
        shared = list(segment.since)  # those that come meanwhile wait for the next comparison
        differing: list[int] = []
        is_whole = False

        def may_go_on() -> bool:
            return not self._is_cancelled

        try:
            differing = [
                number
                for number, tensor in enumerate(tensors)
                if tensor.is_cpu and not segment.is_equal(number, tensor.data_ptr(), may_go_on)
            ]
            faults.point("frozen.compared")
            moved = set(segment.moved(tensors))
            differing = [number for number in differing if number not in moved]
            is_whole = not (moved or self._is_cancelled)
        except Exception:
            log.warning("frozen tensors could not be compared", exc_info=True)
            differing = []
        finally:
            if differing:
                segment.is_stale = True
            elif is_whole:
                segment.since = segment.since[len(shared) :]
            on_end([segment.keys[number] for number in differing], shared)


class FrozenSegments:
    """The frozen segments of one process's last saves, and what became of its declarations.

    `comparison`: of all bytes, now and then. `stale`: save ids of checkpoints that turned out to
    hold stale bytes, the last ones.
    """

    def __init__(self) -> None:
        self.comparison = WholeComparison()
        self.stale: deque[str] = deque(maxlen=_MOST_STALE)
        self._known: dict[object, FrozenSegment] = {}
        self._changes: dict[ItemKey, int] = {}

    def of(self, group: object) -> FrozenSegment | None:
        """Return the segment of the last complete save of a group of ranks."""
        return self._known.get(group)

    def keep(self, group: object, segment: FrozenSegment | None) -> None:
        """Take note of a complete save."""
        if segment is None:
            self._known.pop(group, None)
        else:
            self._known[group] = segment

    def note_change(self, keys: Sequence[ItemKey]) -> list[ItemKey]:
        """Count that items have changed which were declared frozen.

        Returns those that have changed before, and count as training from now on.
        """
        for key in keys:
            self._changes[key] = self._changes.get(key, 0) + 1
        return [key for key in keys if self._changes[key] > 1]

    def is_training(self, key: ItemKey) -> bool:
        """Return whether an item changes time and again, whatever was declared."""
        return self._changes.get(key, 0) > 1


def matches(left: Sequence[ItemKey], right: Sequence[ItemKey]) -> bool:
    """Return whether two segments have the same items in the same order."""
    return left is right or (len(left) == len(right) and all(map(operator.eq, left, right)))
