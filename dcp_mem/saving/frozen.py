"""Frozen items: which they are, and a segment of their own that later checkpoints share.

Each rank decides by itself which of its items lie in which of its two segments: where that differs
from the last save, its receipt says so, and the ranks describe the checkpoint anew.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch

from dcp_mem.common.log import log
from dcp_mem.common.values import Segment
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.frames import Spec, Specs
from dcp_mem.memory.slot import Slot, SlotHold
from dcp_mem.planning.plain_tensors import PLAIN, Sources
from dcp_mem.planning.tensor_choice import TensorRule
from dcp_mem.runtime.frozen import (
    FrozenSegment,
    Identity,
    ItemKey,
    has_identity,
    identity_of,
    matches,
)
from dcp_mem.runtime.layouts import PlanLayout
from dcp_mem.runtime.session import Session

_LEAST_NBYTES = 1 << 20
"""Fewer frozen bytes than this aren't worth a segment."""
_MOST_NAMED = 3
WHY_NOT_WITH_PARITY = "parity is made of all bytes of a checkpoint, and anew each time"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenItems:
    """A rank's frozen items of one save."""

    rows: Sequence[Any]
    keys: Sequence[ItemKey]
    tensors: Sequence[torch.Tensor]
    layout: PlanLayout
    # the same tensors, where all of the plan's can be copied as bytes; None otherwise
    sources: Sources | None
    # the segment that has their bytes, as far as `plan` can tell; None: they are copied
    known: FrozenSegment | None = None
    is_lasting: bool = True  # whether the tensors are the caller's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A plan's tensors, divided into frozen ones and others, each with a segment of their own."""

    whole: PlanLayout
    is_frozen: Sequence[bool]
    keys: Sequence[ItemKey]
    frozen: PlanLayout
    others: PlanLayout


def split(
    session: Session,
    rule: TensorRule,
    keys: Sequence[ItemKey],
    tensors: Sequence[torch.Tensor],
    whole: PlanLayout,
    last: Split | None,
) -> Split | None:
    """Return which of a plan's tensors are frozen; None where too few are.

    `last`: what this plan had at its last save; returned where nothing has changed.
    """
    is_frozen = [
        spec is not None
        and bool(rule(key[0], tensor))
        and spec == expected
        and _is_as_planned(tensor, expected)
        and has_identity(tensor)
        and not session.frozen.is_training(key)
        for key, tensor, spec, expected in zip(
            keys, tensors, whole.dense, whole.expected, strict=True
        )
    ]
    if last is not None and last.whole is whole and last.is_frozen == is_frozen:
        return last
    if sum(one.nbytes for one in compress(tensors, is_frozen)) < _LEAST_NBYTES:
        return None
    frozen = _layout_of(session, compress(whole.expected, is_frozen))
    if not frozen.is_plain:
        return None
    return Split(
        whole=whole,
        is_frozen=is_frozen,
        keys=list(compress(keys, is_frozen)),
        frozen=frozen,
        others=_layout_of(session, compress(whole.expected, map(operator.not_, is_frozen))),
    )


def _is_as_planned(tensor: torch.Tensor, expected: Spec) -> bool:
    """Return whether a tensor is what DCP's planner has announced, and can be copied as it is."""
    return type(tensor) in PLAIN and not tensor.is_meta and (tensor.dtype, tensor.shape) == expected


def _layout_of(session: Session, specs: Iterable[tuple[torch.dtype, torch.Size]]) -> PlanLayout:
    found = list(specs)
    return session.layouts.of(Specs([dtype for dtype, _ in found], [size for _, size in found]))


def with_known_segment(session: Session, group: object, items: FrozenItems) -> FrozenItems:
    """Return the frozen items with the segment that has their bytes, if there is one."""
    known = session.frozen.of(group)
    if known is None or known.layout is not items.layout or not matches(known.keys, items.keys):
        return items
    if not session.slots.has_bytes(known.slot, known.claims):
        return items
    moved = known.moved(items.tensors) if known.identities else []
    if moved or known.is_stale:
        note_change(session, [items.keys[number] for number in moved], "have been written to")
        session.frozen.keep(group, None)
        return items
    return replace(items, known=known)


def warn_without_effect(session: Session, why: str) -> None:
    """Log, once, why frozen tensors have no segment of their own."""
    text = f"frozen= has no effect: {why}"
    if session.last_saves.is_first_warning(text):
        log.warning("%s", text)


def note_change(session: Session, keys: Sequence[ItemKey], what: str) -> None:
    """Log that frozen items have changed; those that change again count as training."""
    if not keys:
        return
    training = session.frozen.note_change(keys)
    log.warning(
        "%d tensors that were declared frozen %s: %s. All frozen tensors are copied again%s",
        len(keys),
        what,
        named(key[0] for key in keys),
        f", and {len(training)} of them count as training from now on" if training else "",
    )


def named(keys: Iterable[str]) -> str:
    """Return a few of these names, for people."""
    found = list(keys)
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


@dataclass(slots=True, kw_only=True)
class FilledFrozen:
    """A slot that has the bytes of the frozen items; a segment of this save once it is sealed."""

    items: FrozenItems
    segment: FrozenSegment  # what is known of the slot's bytes, for the next saves
    # on the slot where it is a segment already, of earlier checkpoints; None otherwise
    hold: SlotHold | None = None
    sealed: Segment | None = None
    path: str = ""

    def seal(self, session: Session, rank: int, save_id: str, name: str) -> None:
        """Make a segment of this save of the slot; a shared one gets a link.

        Raises DcpMemError.
        """
        number, known = rank + names.FROZEN, self.segment
        file = names.segment_file(number, save_id)
        path = os.path.join(session.memory.checkpoint_directory(name), file)

        def add(directory: str) -> None:
            if self.hold is None:
                session.slots.seal(known.slot, path)
            elif not session.slots.link(known.slot, known.claims, path):
                raise DcpMemError(f"the segment of frozen tensors that {name} was to share is gone")

        session.memory.add_segment(name, add)
        self.path = path
        self.sealed = Segment(
            rank=number,
            node=session.memory.node,
            file=file,
            nbytes=known.layout.layout.nbytes,
            layout=known.layout.described.key,
        )

    def give_back(self, session: Session) -> None:
        """Give the slot back: its save has failed, whether it was sealed or not."""
        if self.hold is None:
            session.slots.abandon(self.segment.slot)
            return
        if self.path:
            session.slots.unlink(self.segment.slot, self.path)
        self.hold.end()

    def share(self, session: Session) -> None:
        """Let readers and the agent in to the sealed segment."""
        if self.hold is None:
            session.slots.share(self.segment.slot)
        else:
            self.hold.end()


def reused(session: Session, group: object, items: FrozenItems) -> FilledFrozen | None:
    """Return the known segment of frozen items, held until it is sealed; None for none."""
    known = items.known
    hold = None if known is None else session.slots.hold(known.slot, known.claims)
    if known is None or hold is None:
        return None
    if not known.identities and not _adopt(known, items):
        hold.end()
        session.frozen.keep(group, None)
        return None
    moved = known.moved(items.tensors)
    changed = moved or known.differing(items.tensors)
    if not changed and not known.is_stale:
        return FilledFrozen(items=items, segment=known, hold=hold)
    hold.end()
    keys = [items.keys[number] for number in changed]
    if moved:
        note_change(session, keys, "have been written to")
    elif changed:
        shared = ", ".join(name for name, _ in known.since) or "none"
        what = f"have changed past their counters of writes (checkpoints that share them: {shared})"
        note_change(session, keys, what)
    session.frozen.keep(group, None)
    return None


def _adopt(known: FrozenSegment, items: FrozenItems) -> bool:
    """Take the tensors for those that the segment is of, if all their bytes are the same."""
    identities = identities_of(items)
    is_same = all(
        one.is_cpu and known.is_equal(number, one.data_ptr())
        for number, one in enumerate(items.tensors)
    )
    known.identities = identities if is_same else ()
    return is_same


def made(items: FrozenItems, slot: Slot, identities: Sequence[Identity]) -> FilledFrozen:
    """Return what is known of a slot that the frozen items have been copied into."""
    segment = FrozenSegment(
        keys=items.keys,
        layout=items.layout,
        identities=identities if items.is_lasting else (),
        slot=slot,
        claims=slot.claims,
    )
    return FilledFrozen(items=items, segment=segment)


def identities_of(items: FrozenItems) -> list[Identity]:
    """Return the identities of the frozen tensors as they are now."""
    return list(map(identity_of, items.tensors))


def remember(
    session: Session, group: object, frozen: FilledFrozen | None, save: tuple[str, str]
) -> None:
    """Have the next save share what this complete one has.

    `frozen`: this save's segment of frozen items; None where it has none.
    """
    if frozen is None:
        session.frozen.keep(group, None)
        return
    segment = frozen.segment
    if frozen.hold is not None:
        segment.since.append(save)
    session.frozen.keep(group, segment)


def compare_if_due(session: Session, frozen: FilledFrozen | None, *, is_persisted: bool) -> None:
    """Have all frozen bytes held against their segment behind training, if that is due.

    Where they differ, the checkpoints that may hold stale bytes are rejected.

    `frozen`: this save's segment of frozen items; None where it has none.
    """
    if frozen is None or session.frozen.comparison.is_busy:
        return
    known, items = frozen.segment, frozen.items
    if not known.identities or not known.is_compared_now(is_persisted=is_persisted):
        return
    hold = session.slots.hold(known.slot, known.claims)
    if hold is None:
        return

    def end(keys: Sequence[ItemKey], shared: Sequence[tuple[str, str]]) -> None:
        hold.end()
        if keys:
            note_change(session, keys, "have changed past their counters of writes")
            _reject(session, keys, shared)

    session.frozen.comparison.start(known, items.tensors, end)


def _reject(session: Session, keys: Sequence[ItemKey], shared: Sequence[tuple[str, str]]) -> None:
    """Reject checkpoints that may hold stale bytes; the agent marks on storage what lies there."""
    why = f"frozen tensors had changed unnoticed: {named(key[0] for key in keys)}"
    left = set(shared)
    session.frozen.stale.extend(save_id for _, save_id in shared)
    for checkpoint in session.memory.checkpoints():
        if (checkpoint.name, checkpoint.manifest.save_id) in left:
            with contextlib.suppress(FileNotFoundError):  # it has just been evicted
                session.memory.reject(checkpoint, why)
                left.discard((checkpoint.name, checkpoint.manifest.save_id))
    gone = [name for name, save_id in shared if (name, save_id) in left]
    log.error(
        "%s. Checkpoints that may hold them as they were before are rejected: %s%s",
        why,
        ", ".join(name for name, _ in shared),
        f"; no longer in memory, so run dcp-mem reject for what storage has of: {', '.join(gone)}"
        if gone
        else "",
    )
