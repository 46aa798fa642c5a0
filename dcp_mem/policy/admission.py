"""Which checkpoints memory keeps, and whether a new one may be staged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Kept:
    """A complete checkpoint in a node's memory, as the policy sees it.

    key: its save id. busy: being read, flushed or replicated at this moment. pending: meant for storage and not there yet.
    replicated: other nodes have copies of it, and newer ones are to get copies too. chosen: the retention policy keeps it, as
    long as there is room.
    """

    key: str
    created: float
    nbytes: int
    persist: bool
    pending: bool
    busy: bool
    replicated: bool = False
    chosen: bool = True


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """One node's memory before a save. All figures in bytes.

    used: what the job occupies now, free slots included. spare: what of that can be reused for this save as it is.
    free: what the file system still has. limit: the budget, or None. needed: what this save needs on the node.
    """

    kept: tuple[Kept, ...]
    used: int
    spare: int
    free: int
    limit: int | None
    needed: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do: evict these checkpoints (save ids), and then stage or not.

    needed, limit: the figures of the node that decided it, in bytes, where the verdict is not "stage". lasting: no flush
    will make room either, so that it is of no use to wait.
    """

    action: Literal["stage", "full"]
    evict: frozenset[str] = frozenset()
    needed: int = 0
    limit: int = 0
    why: str = ""
    lasting: bool = False


def admit(nodes: Sequence[NodeMemory], keep: int) -> Verdict:
    """Decide for all nodes together whether one more checkpoint is staged, and what leaves memory for it.

    The newest checkpoint that all nodes hold never leaves, nor does the newest that has copies elsewhere, nor one that is
    busy or awaits its flush with no newer one to take its place. What a kill has left on some nodes only leaves first.
    """
    nodes = _of_one_mind(nodes)
    evict: set[str] = set()
    whole = frozenset.intersection(*(frozenset(kept.key for kept in node.kept) for node in nodes))
    groups = [[kept for node in nodes for kept in node.kept if kept.key in whole]] if whole else [n.kept for n in nodes]
    staying = frozenset().union(*map(_wanted, groups), *(_busy(node.kept) for node in nodes))
    for node in nodes:
        full = _make_room(node, keep, evict, _evictable(node.kept, staying, whole))
        if full is not None:
            return replace(full, lasting=not _will_have_room(nodes, keep))
    return Verdict("stage", frozenset(evict))


def _of_one_mind(nodes: Sequence[NodeMemory]) -> list[NodeMemory]:
    """The nodes, where one that has written down that a checkpoint is replicated speaks for all: others are just about to."""
    replicated = {one.key for node in nodes for one in node.kept if one.replicated}
    return [
        replace(node, kept=tuple(replace(one, replicated=one.key in replicated) for one in node.kept)) for node in nodes
    ]


def _will_have_room(nodes: Sequence[NodeMemory], keep: int) -> bool:
    """Whether there is room once everything is durable, and nobody reads or flushes any more."""
    if not any(one.busy or one.pending for node in nodes for one in node.kept):
        return False
    done = [replace(node, kept=tuple(replace(one, busy=False, pending=False) for one in node.kept)) for node in nodes]
    return admit(done, keep).action == "stage"


def retire(kept: Sequence[Kept], keep: int) -> frozenset[str]:
    """What leaves memory once a new checkpoint is complete: at most `keep` stay, chosen ones and such as await their flush."""
    leaving: set[str] = set()
    for candidate in _evictable(kept, _wanted(kept) | _busy(kept), frozenset(one.key for one in kept)):
        if (candidate.chosen or candidate.pending) and len(kept) - len(leaving) <= keep:
            break
        leaving.add(candidate.key)
    return frozenset(leaving)


def allowance(kept: Sequence[Kept], keep: int) -> int:
    """How many checkpoints may stay while another is staged: one more than a `keep` of 1 where only an older one has copies."""
    return max(keep, len(_newest(kept) | _newest([one for one in kept if one.replicated])))


def most_at_once(keep: int, gets_copies: bool) -> int:
    """How many checkpoints a node's memory holds at most, with the one that is being staged."""
    return max(keep, 2 if gets_copies else 1) + 1


def _make_room(node: NodeMemory, keep: int, evict: set[str], evictable: Sequence[Kept]) -> Verdict | None:
    staying = [kept for kept in node.kept if kept.key not in evict]
    freed = sum(kept.nbytes for kept in node.kept if kept.key in evict)
    for candidate in [*(kept for kept in evictable if kept.key not in evict), None]:
        lacking = _lacking(node, len(staying), allowance(staying, keep), freed)
        if not lacking:
            return None
        if candidate is None:
            limit = node.limit if node.limit is not None else node.used + node.free
            return Verdict("full", needed=node.used - freed - node.spare + node.needed, limit=limit, why=lacking)
        evict.add(candidate.key)
        staying.remove(candidate)
        freed += candidate.nbytes
    return None


def _lacking(node: NodeMemory, staying: int, keep: int, freed: int) -> str:
    growth = max(0, node.needed - node.spare - freed)
    if staying > keep:
        return f"{staying} checkpoints are in memory, which may keep {keep} while another is staged"
    if node.limit is not None and max(node.used - freed - node.spare, 0) + node.needed > node.limit:
        return "the memory limit leaves no room for another checkpoint"
    if growth > node.free:
        return "the file system of the memory root leaves no room for another checkpoint"
    return ""


def _evictable(kept: Sequence[Kept], staying: frozenset[str], whole: frozenset[str]) -> list[Kept]:
    """Parts of checkpoints first, then those that aren't chosen, then those that nobody waits for, then those whose flush a newer
    one supersedes.

    Among equals, the oldest first. staying: save ids that don't leave. whole: those that all nodes hold.
    """
    free = [checkpoint for checkpoint in kept if checkpoint.key not in staying]
    return sorted(free, key=lambda one: (one.key in whole, one.chosen, one.pending, one.created))


def _wanted(kept: Sequence[Kept]) -> frozenset[str]:
    """The newest checkpoint, the newest with copies, and the newest that is meant for storage while it isn't there."""
    pending = {checkpoint.key for checkpoint in kept if checkpoint.pending}
    replicated = _newest([one for one in kept if one.replicated])
    return _newest(kept) | replicated | (_newest([one for one in kept if one.persist]) & pending)


def _newest(kept: Sequence[Kept]) -> frozenset[str]:
    return frozenset({max(kept, key=lambda checkpoint: checkpoint.created).key} if kept else ())


def _busy(kept: Sequence[Kept]) -> frozenset[str]:
    return frozenset(checkpoint.key for checkpoint in kept if checkpoint.busy)
