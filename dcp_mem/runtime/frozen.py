"""Tensors that don't change from save to save, and the segment that several checkpoints share.

A declaration may be wrong, so each save looks:

1. The same storages, at the same addresses, with the same version counters.
2. Samples of CPU memory against the segment, at other places each time; of what lies on a device,
   a sum of all its bytes.

Now and then, in a thread, all bytes are held against the segment. That finds what the samples miss:
a few values written past the version counter, as `tensor.data[3] = 0` does.

Each rank decides by itself which of its items lie in which of its two segments: where that differs
from the last save, its receipt says so, and the ranks describe the checkpoint anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Segment
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.frames import Spec
from dcp_mem.format.layout import Columns
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.slots import SlotPool
from dcp_mem.memory.views import is_same
from dcp_mem.planning.plain_tensors import PLAIN, Sources
from dcp_mem.planning.tensor_choice import TensorRule
from dcp_mem.runtime.layouts import Layouts, PlanLayout

ItemKey = tuple[str, tuple[int, ...]]
"""Name and offset of an item."""

_LEAST_NBYTES = 1 << 20
"""Fewer frozen bytes than this aren't worth a segment."""
_SAMPLES = 1024
"""Places to look at in all of a rank's frozen memory, at each save."""
_LEAST_SAMPLES = 8
"""Places to look at in each tensor, where it has so many bytes."""
_PIECE = 16 << 20
_MOST_STALE = 64
"""Checkpoints that turned out to hold stale bytes, of which other nodes are told."""
_COMPARED_EVERY = 8
"""Saves from one whole comparison to the next, where none goes to storage."""
_MOST_NAMED = 3


@value_class
class Identity:
    """A tensor's memory and its counter of writes, by which a later save recognises it."""

    storage: StorageWeakRef  # doesn't keep it alive, and no other storage gets its number meanwhile
    address: int
    version: int
    total: int  # of its bytes, where they lie on a device; 0 otherwise

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Identity:
        """Return a tensor's identity as it is now."""
        storage, total = tensor.untyped_storage(), 0 if tensor.is_cpu else _total(tensor)
        return cls(StorageWeakRef(storage), tensor.data_ptr(), tensor._version, total)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether this is the same memory, which no counted write has changed."""
        return (
            self.version == tensor._version
            and self.address == tensor.data_ptr()
            and self.storage.cdata == tensor.untyped_storage()._cdata
            and not self.storage.expired()
        )


@dataclass(eq=False, kw_only=True)
class FrozenSegment:
    """A sealed segment of frozen items, which later checkpoints may share."""

    keys: list[ItemKey]
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
        known = zip(self.identities, tensors, strict=True)
        return [number for number, (one, tensor) in enumerate(known) if not one.is_of(tensor)]

    def differing(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the tensors with other bytes than the segment, by samples."""
        layout, is_cpu = self.layout.layout, np.array([one.is_cpu for one in tensors], bool)
        is_large = layout.payload_nbytes >= 8
        numbers = np.flatnonzero(is_cpu & is_large)
        addresses = np.array([known.address for known in self.identities], np.int64)[numbers]
        copies = self.slot.address + layout.payload_offsets[numbers]
        small, devices = np.flatnonzero(is_cpu & ~is_large), np.flatnonzero(~is_cpu)
        return sorted(
            [
                *(one for one in devices.tolist() if self._total_differs(one, tensors[one])),
                *numbers[_sampled(addresses, copies, layout.payload_nbytes[numbers])].tolist(),
                *(one for one in small.tolist() if not self.is_equal(one, tensors[one])),
            ]
        )

    def _total_differs(self, number: int, tensor: torch.Tensor) -> bool:
        return _total(tensor) != self.identities[number].total

    def adopts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Take tensors for those that were copied here, if all their bytes are the same."""
        identities = list(map(Identity.of, tensors))
        is_same = all(
            one.is_cpu and self.is_equal(number, one) for number, one in enumerate(tensors)
        )
        if is_same:
            self.identities = identities
        return is_same

    def note_replicated(self) -> None:
        """Note that other nodes have copies of it now."""
        self.is_replicated = True

    def is_equal(
        self, number: int, tensor: torch.Tensor, may_go_on: Callable[[], bool] = lambda: True
    ) -> bool:
        """Return whether a tensor has the same bytes as an item of the segment.

        `may_go_on`: asked now and then; where it says no, the rest counts as equal.
        """
        layout, address = self.layout.layout, tensor.data_ptr()
        copy = self.slot.address + int(layout.payload_offsets[number])
        nbytes = int(layout.payload_nbytes[number])
        for start in range(0, nbytes, _PIECE):
            if not may_go_on():
                return True
            if not is_same(address + start, copy + start, min(_PIECE, nbytes - start)):
                return False
        return True


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


@value_class(kw_only=True)
class FrozenItems:
    """A rank's frozen items of one save."""

    rows: Sequence[Any]
    keys: list[ItemKey]
    tensors: Sequence[torch.Tensor]
    layout: PlanLayout
    # the same tensors, where all of the plan's can be copied as bytes; None otherwise
    sources: Sources | None
    # the segment that has their bytes, as far as planning can tell; None: they are copied
    known: FrozenSegment | None = None
    is_lasting: bool = True  # whether the tensors are the caller's own

    def identities(self) -> Sequence[Identity]:
        """Return those of the tensors as they are now; none of copies: no later save has them."""
        return list(map(Identity.of, self.tensors)) if self.is_lasting else ()


class Split(NamedTuple):
    """A plan's tensors, divided into frozen ones and others, each with a segment of their own."""

    is_frozen: Sequence[bool]
    is_other: Sequence[bool]
    frozen: PlanLayout
    others: PlanLayout


@dataclass(slots=True, kw_only=True)
class FilledFrozen:
    """A slot that has the bytes of the frozen items; a segment of this save once it is sealed."""

    items: FrozenItems
    segment: FrozenSegment  # what is known of the slot's bytes, for the next saves
    slots: SlotPool
    # ends the hold on a slot that is a segment of earlier checkpoints already; None for another one
    end_hold: Callable[[], None] | None = None
    sealed: Segment | None = None

    def seal(self, memory: JobMemory, rank: int, save_id: str, name: str) -> None:
        """Make a segment of this save of the slot; a shared one gets a link.

        Raises DcpMemError.
        """
        number, known = rank + names.FROZEN, self.segment
        file = names.segment_file(number, save_id)
        path = os.path.join(memory.checkpoint_directory(name), file)

        def add(directory: str) -> None:
            if self.end_hold is None:
                self.slots.seal(known.slot, path)
            elif not self.slots.link(known.slot, known.claims, path):
                raise DcpMemError(f"the segment of frozen tensors that {name} was to share is gone")

        memory.add_segment(name, add)
        self.sealed = Segment(
            rank=number,
            node=memory.node,
            file=file,
            nbytes=known.layout.layout.nbytes,
            layout=known.layout.described.key,
        )

    def give_back(self) -> None:
        """Give the slot back: its save has failed, whether it was sealed or not."""
        if self.end_hold is None:
            self.slots.abandon(self.segment.slot)
            return
        if self.sealed is not None:
            self.slots.unlink(self.segment.slot)
        self.end_hold()

    def share(self) -> None:
        """Let readers and the agent in to the sealed segment."""
        if self.end_hold is None:
            self.slots.share(self.segment.slot)
        else:
            self.end_hold()


class FrozenTensors:
    """Which tensors are frozen, and the segment of them that the last save of each group has.

    Saves call this in their turn; any thread may wait for the comparison, or cancel it. One
    comparison at a time: what comes while it works is left to the next save.

    `stale`: save ids of checkpoints that turned out to hold stale bytes, the last ones.
    """

    def __init__(self, memory: JobMemory, slots: SlotPool, layouts: Layouts) -> None:
        self._memory, self._slots, self._layouts = memory, slots, layouts
        self.stale: deque[str] = deque(maxlen=_MOST_STALE)
        self._known: dict[object, FrozenSegment] = {}
        self._changes = Counter[ItemKey]()
        self._thread: threading.Thread | None = None
        self._is_cancelled = False

    # -- which are frozen -------------------------------------------------------------------------

    def split(
        self,
        rule: TensorRule,
        keys: Sequence[ItemKey],
        tensors: Sequence[torch.Tensor],
        whole: PlanLayout,
    ) -> Split | None:
        """Return which of a plan's tensors are frozen; None where too few are."""
        is_frozen = [
            spec is not None
            and bool(rule(key[0], tensor))
            and spec == expected
            and _is_as_planned(tensor, expected)
            and _has_identity(tensor)
            and self._changes[key] < 2
            for key, tensor, spec, expected in zip(
                keys, tensors, whole.dense, whole.expected, strict=True
            )
        ]
        if sum(one.nbytes for one in compress(tensors, is_frozen)) < _LEAST_NBYTES:
            return None
        is_other = list(map(operator.not_, is_frozen))
        frozen = self._layouts.of(whole.expected.only(is_frozen))
        others = self._layouts.of(whole.expected.only(is_other))
        return Split(is_frozen, is_other, frozen, others) if frozen.is_plain else None

    def _note_change(self, keys: Sequence[ItemKey], what: str) -> None:
        """Log that frozen items have changed; those that change again count as training."""
        if not keys:
            return
        self._changes.update(keys)
        training = sum(self._changes[key] > 1 for key in keys)
        log.warning(
            "%d tensors that were declared frozen %s: %s. All frozen tensors are copied again%s",
            len(keys),
            what,
            _named(keys),
            f", and {training} of them count as training from now on" if training else "",
        )

    # -- a save of them ---------------------------------------------------------------------------

    def has_segment(self, group: object) -> bool:
        """Return whether the last complete save of a group of ranks has a frozen segment."""
        return group in self._known

    def segment_of(self, group: object, items: FrozenItems) -> FrozenSegment | None:
        """Return the segment that has the bytes of frozen items; None: they are to be copied."""
        known = self._known.get(group)
        if known is None or known.layout is not items.layout or known.keys != items.keys:
            return None
        end_hold = self._slots.hold(known.slot, known.claims)
        if end_hold is None:
            return None
        try:
            is_adopted = not known.identities and known.adopts(items.tensors)
            moved = known.moved(items.tensors) if known.identities else []
            if known.identities and not (moved or known.is_stale):
                differing = [] if is_adopted else known.differing(items.tensors)
                if not differing:
                    return known
                shared = ", ".join(name for name, _ in known.since) or "none"
                what = "have changed past their counters of writes"
                what += f" (checkpoints that share them: {shared})"
                self._note_change([items.keys[number] for number in differing], what)
            self._note_change([items.keys[number] for number in moved], "have been written to")
        finally:
            end_hold()
        self._known.pop(group, None)
        return None

    def held(self, items: FrozenItems) -> FilledFrozen | None:
        """Return the known segment of frozen items, held until it is sealed; None for none."""
        known = items.known
        end_hold = None if known is None else self._slots.hold(known.slot, known.claims)
        if known is None or end_hold is None:
            return None
        if known.is_stale:  # found while the ranks agreed
            end_hold()
            return None
        return FilledFrozen(items=items, segment=known, slots=self._slots, end_hold=end_hold)

    def made(self, items: FrozenItems, slot: Slot, identities: Sequence[Identity]) -> FilledFrozen:
        """Return what is known of a slot that the frozen items have been copied into."""
        segment = FrozenSegment(
            keys=items.keys,
            layout=items.layout,
            identities=identities,
            slot=slot,
            claims=slot.claims,
        )
        return FilledFrozen(items=items, segment=segment, slots=self._slots)

    def remember(self, group: object, frozen: FilledFrozen | None, save: tuple[str, str]) -> None:
        """Have the next save share what this complete one has; None where that has no such segment.

        `save`: its name and save id.
        """
        if frozen is None:
            self._known.pop(group, None)
            return
        if frozen.end_hold is not None:
            frozen.segment.since.append(save)
        self._known[group] = frozen.segment

    # -- all bytes, behind training ---------------------------------------------------------------

    def compare_if_due(self, frozen: FilledFrozen | None, *, is_persisted: bool) -> None:
        """Have all frozen bytes held against their segment behind training, if that is due.

        Where they differ, the checkpoints that may hold stale bytes are rejected.
        """
        if frozen is None or (self._thread is not None and self._thread.is_alive()):
            return
        known = frozen.segment
        is_due = len(known.since) >= (1 if is_persisted else _COMPARED_EVERY)
        if not (known.identities and is_due):
            return
        end_hold = self._slots.hold(known.slot, known.claims)
        if end_hold is not None:
            self._is_cancelled = False
            work = partial(self._compare, known, frozen.items.tensors, end_hold)
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

    def _compare(
        self,
        segment: FrozenSegment,
        tensors: Sequence[torch.Tensor],
        end_hold: Callable[[], None],
    ) -> None:
        """Compare; what has been written to in a way that the next save sees is left to that."""
        shared = list(segment.since)  # those that come meanwhile wait for the next comparison

        def may_go_on() -> bool:
            return not self._is_cancelled

        differing: set[int] = set()
        try:
            differing = {
                number
                for number, tensor in enumerate(tensors)
                if tensor.is_cpu and not segment.is_equal(number, tensor, may_go_on)
            }
            faults.point("frozen.compared")
            moved = segment.moved(tensors)
            differing.difference_update(moved)
            if differing:
                segment.is_stale = True
            elif not (moved or self._is_cancelled):
                segment.since = segment.since[len(shared) :]
        except Exception:
            log.warning("frozen tensors could not be compared", exc_info=True)
            return
        finally:
            end_hold()
        if differing:
            keys = [segment.keys[number] for number in sorted(differing)]
            self._note_change(keys, "have changed past their counters of writes")
            self._reject(keys, shared)

    def _reject(self, keys: Sequence[ItemKey], shared: Sequence[tuple[str, str]]) -> None:
        """Reject checkpoints that may hold stale bytes; the agent marks what storage has of them.

        `shared`: name and save id of each.
        """
        why = f"frozen tensors had changed unnoticed: {_named(keys)}"
        left = set(shared)
        self.stale.extend(save_id for _, save_id in shared)
        for checkpoint in self._memory.checkpoints():
            if (checkpoint.name, checkpoint.manifest.save_id) in left:
                with contextlib.suppress(FileNotFoundError):  # it has just been evicted
                    self._memory.reject(checkpoint, why)
                    left.discard((checkpoint.name, checkpoint.manifest.save_id))
        gone = [name for name, save_id in shared if (name, save_id) in left]
        log.error(
            "%s. Checkpoints that may hold them as they were before are rejected: %s%s",
            why,
            ", ".join(name for name, _ in shared),
            "; no longer in memory, so run dcp-mem reject for what storage has of: "
            f"{', '.join(gone)}"
            if gone
            else "",
        )


def _is_as_planned(tensor: torch.Tensor, expected: Spec) -> bool:
    """Return whether a tensor is what DCP's planner has announced, and can be copied as it is."""
    return type(tensor) in PLAIN and not tensor.is_meta and (tensor.dtype, tensor.shape) == expected


def _has_identity(tensor: torch.Tensor) -> bool:
    """Return whether a tensor counts its writes, and can be compared with the bytes of a copy."""
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and not (tensor.is_inference() or tensor.is_neg() or tensor.is_conj())


def _named(keys: Sequence[ItemKey]) -> str:
    """Return the names of a few of these items, for people."""
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return ", ".join(name for name, _ in keys[:_MOST_NAMED]) + more
