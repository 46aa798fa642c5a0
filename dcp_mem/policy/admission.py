"""Decide whether memory takes one more checkpoint, and which ones leave memory for it.

Decided from what each node has in memory, its budget and what the save needs there; for all nodes
alike. The rules:

1. The newest checkpoint that all nodes hold stays, and so does the newest that has copies
   elsewhere.
2. A busy checkpoint stays, and so does a pending one until a newer one is meant for storage.
3. Of the others, these leave first: what a kill has left on some nodes only; then what the
   retention policy doesn't keep; then what isn't pending; among equals the oldest.
4. Only as many leave as it takes. Where all that may leave isn't enough, the save isn't staged, and
   nothing leaves.
5. What leaves becomes free slots. Where there is no room for these beside what the save needs, the
   ranks give back the memory of all slots that this save won't claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace
from enum import Enum
from operator import attrgetter

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.order import newest_first


@sendable
@value_class(kw_only=True)
class NodeMemory:
    """One node's memory before a save; all figures in bytes."""

    kept: tuple[CheckpointFacts, ...]
    used: int
    spare: int  # what of `used` is in slots that this save may claim, or may give back
    free: int
    limit: int | None  # the memory budget; None for none
    needed: int  # what the slots that this save claims take in all, on the node
    records: int = 0
    # whether followers have links to files in it, whose memory comes back when they end
    is_lent: bool = False

    @property
    def room(self) -> int:
        """Bytes that the job may occupy."""
        most = self.used + self.free
        return most if self.limit is None else min(most, self.limit)


class Admission(str, Enum):
    """Whether a checkpoint is staged."""

    STAGE = "stage"
    FULL = "full"


@value_class(kw_only=True)
class Verdict:
    """The decision for all ranks: checkpoints to evict, and whether to stage the new one."""

    action: Admission
    evict: frozenset[str] = frozenset()
    # whether free slots that the save won't claim are given back to the system
    gives_back: bool = False
    needed: int = 0  # if FULL: bytes that the node which lacks room would need
    limit: int = 0  # if FULL: bytes that this node may use
    why: str = ""  # if FULL: what that node lacks, for people
    # if FULL: nothing that is under way will make room either; it is no use to wait
    lasting: bool = False


def admit(nodes: Sequence[NodeMemory], keep: int) -> Verdict:
    """Decide for all nodes together whether one more checkpoint is staged, and what leaves for it.

    `keep`: how many checkpoints stay at most beside the one that is staged.
    """
    nodes = _with_known_copies(nodes)
    evict: set[str] = set()
    whole = frozenset.intersection(*(frozenset(one.key for one in node.kept) for node in nodes))
    groups = (
        [[one for node in nodes for one in node.kept if one.key in whole]]
        if whole
        else [node.kept for node in nodes]
    )
    needed = (_needed(_newest_first(group)) for group in groups)
    staying = frozenset().union(*needed, *(_busy(node.kept) for node in nodes))
    for node in nodes:
        evictable = _evictable(_newest_first(node.kept), staying, whole)
        full = _make_room(node, keep, evict, evictable)
        if full is not None:
            is_lent = any(one.is_lent for one in nodes)
            return replace(full, lasting=not (is_lent or _will_have_room(nodes, keep)))
    gives_back = any(node.used + node.needed + node.records > node.room for node in nodes)
    return Verdict(action=Admission.STAGE, evict=frozenset(evict), gives_back=gives_back)


def still_full(nodes: Sequence[NodeMemory]) -> Verdict | None:
    """Return why a save that was admitted isn't staged, once all has left that was to leave.

    Something may have stayed: a reader that came just then keeps its checkpoint, or its slot.

    `nodes`: every node's memory as it is now. `needed` is what slots have yet to grow by.
    """
    for node in nodes:
        needed = node.used + node.needed + node.records
        if needed > node.room:
            return Verdict(
                action=Admission.FULL,
                needed=needed,
                limit=node.room,
                why="memory that was to be given back for it is still in use",
                lasting=not (node.is_lent or any(one.busy or one.pending for one in node.kept)),
            )
    return None


def retire(kept: Sequence[CheckpointFacts], keep: int) -> frozenset[str]:
    """Return the save ids of what leaves memory once a new checkpoint is complete.

    What isn't chosen leaves, unless it is pending; then the oldest leave until `keep` are left.

    `keep`: how many stay at most, if they may leave.
    """
    leaving: set[str] = set()
    kept = _newest_first(kept)
    staying = _needed(kept) | _busy(kept)
    for one in _evictable(kept, staying, frozenset(each.key for each in kept)):
        if (one.chosen or one.pending) and len(kept) - len(leaving) <= keep:
            break
        leaving.add(one.key)
    return frozenset(leaving)


def allowance(kept: Sequence[CheckpointFacts], keep: int) -> int:
    """Return how many checkpoints may stay while another one is staged.

    That is `keep`, or 2 where `keep` is 1 and only an older checkpoint than the newest has copies.
    """
    if keep > 1:
        return keep
    kept = _newest_first(kept)
    return max(keep, len(_newest(kept) | _newest([one for one in kept if one.replicated])))


def most_at_once(keep: int, gets_copies: bool) -> int:
    """Return how many checkpoints a node's memory holds at most, the one being staged included."""
    return max(keep, 2 if gets_copies else 1) + 1


def _with_known_copies(nodes: Sequence[NodeMemory]) -> list[NodeMemory]:
    """Return the nodes with a checkpoint replicated on all if one of them has noted it so.

    The other nodes are just about to note it too.
    """
    replicated = {one.key for node in nodes for one in node.kept if one.replicated}
    return [
        replace(
            node, kept=tuple(replace(one, replicated=one.key in replicated) for one in node.kept)
        )
        for node in nodes
    ]


def _will_have_room(nodes: Sequence[NodeMemory], keep: int) -> bool:
    """Tell whether there is room once all is durable and nothing is read or flushed any more."""
    if not any(one.busy or one.pending for node in nodes for one in node.kept):
        return False
    done = [
        replace(node, kept=tuple(replace(one, busy=False, pending=False) for one in node.kept))
        for node in nodes
    ]
    return admit(done, keep).action is Admission.STAGE


def _make_room(
    node: NodeMemory, keep: int, evict: set[str], evictable: Sequence[CheckpointFacts]
) -> Verdict | None:
    """Add to `evict` until the node has room; return a verdict if it never has."""
    staying = [one for one in node.kept if one.key not in evict]
    for candidate in [*(one for one in evictable if one.key not in evict), None]:
        freed = _freed(node.kept, evict)
        lacking = _lacking(node, len(staying), allowance(staying, keep), freed)
        if not lacking:
            return None
        if candidate is None:
            return Verdict(
                action=Admission.FULL,
                needed=_needed_in_all(node, freed),
                limit=node.limit if node.limit is not None else node.room,
                why=lacking,
            )
        evict.add(candidate.key)
        staying.remove(candidate)
    return None


def _freed(kept: Sequence[CheckpointFacts], evict: Set[str]) -> int:
    """Return the bytes that leave with these checkpoints; shared ones only with the last sharer."""
    leaving = [one for one in kept if one.key in evict]
    shared = Counter(file for one in leaving for file in one.shared)
    return sum(one.nbytes for one in leaving) + sum(
        file.nbytes for file, count in shared.items() if count >= file.names
    )


def _lacking(node: NodeMemory, staying: int, keep: int, freed: int) -> str:
    """Return what the node lacks for the save once `freed` bytes are free; "" if nothing."""
    needed = _needed_in_all(node, freed)
    if staying > keep:
        return f"{staying} checkpoints are in memory, which may keep {keep} while another is staged"
    if node.limit is not None and needed > node.limit:
        return "the memory limit leaves no room for another checkpoint"
    if needed > node.used + node.free:
        return "the file system of the memory root leaves no room for another checkpoint"
    return ""


def _needed_in_all(node: NodeMemory, freed: int) -> int:
    """Return what the node's job occupies with the save, once `freed` bytes are given back."""
    return max(node.used - freed - node.spare, 0) + node.needed + node.records


def _evictable(
    kept: Sequence[CheckpointFacts], staying: frozenset[str], whole: frozenset[str]
) -> list[CheckpointFacts]:
    """Return what may leave, in the order of rule 3; `kept`: newest first."""
    free = [one for one in reversed(kept) if one.key not in staying]
    return sorted(free, key=lambda one: (one.key in whole, one.chosen, one.pending))


def _needed(kept: Sequence[CheckpointFacts]) -> frozenset[str]:
    """Return the newest, the newest with copies, and the newest meant for storage if pending.

    `kept`: newest first.
    """
    pending = {one.key for one in kept if one.pending}
    replicated = _newest([one for one in kept if one.replicated])
    return _newest(kept) | replicated | (_newest([one for one in kept if one.persist]) & pending)


def _newest(kept: Sequence[CheckpointFacts]) -> frozenset[str]:
    return frozenset([one.key for one in kept if not one.rejected][:1])


def _newest_first(kept: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
    return newest_first(kept, attrgetter("place"))


def _busy(kept: Sequence[CheckpointFacts]) -> frozenset[str]:
    return frozenset([one.key for one in kept if one.busy])
