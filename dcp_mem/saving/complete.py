"""Third stage: receipts are exchanged, and the checkpoint becomes COMPLETE on every node."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from dcp_mem import faults
from dcp_mem.errors import RankFailed
from dcp_mem.format.catalog import Catalog, catalog_key
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.segments import Segments, Tail
from dcp_mem.saving.agree import keep_no_more, redundancy_on
from dcp_mem.saving.values import Attempt, Caller, Staged
from dcp_mem.session import SavedPlan

P = TypeVar("P")
Failures = tuple[tuple[int, str], ...]
_MOST_FAILURES = 8


class Describe(Protocol[P]):
    """How the catalog comes about: each rank gives its part, and the coordinator puts them together."""

    def part(self, rank: int, staged: Staged) -> P:
        """What a rank says of its segment."""

    def share(self, parts: Sequence[P]) -> Sequence[P]:
        """The parts, with what is equal in several of them as one object."""

    def catalog(self, parts: Sequence[P]) -> Catalog:
        """Asked of the coordinator, with all ranks' parts."""


class _Receipts(NamedTuple):
    """What all ranks have to say once they have staged; next to nothing where all went as in the last save.

    last: save id of what this plan saved last, as far as each rank knows. is_new: some segment isn't made as it was then.
    tails: of the ranks whose tails lie elsewhere. failures: (rank, text), some of them.
    """

    last: str
    is_new: bool
    tails: tuple[tuple[int, Tail], ...]
    failures: Failures

    def join(self, other: _Receipts) -> _Receipts:
        return _Receipts(
            self.last,
            self.is_new or other.is_new or self.last != other.last,
            self.tails + other.tails,
            _some(self.failures + other.failures),
        )


def _some(failures: Failures) -> Failures:
    return tuple(sorted(failures)[:_MOST_FAILURES])


def complete(
    caller: Caller,
    attempt: Attempt,
    staged: Staged | Exception,
    describe: Describe[Any],
    structure_changed: bool,
) -> tuple[Manifest, Staged]:
    """Exchange receipts and mark the checkpoint COMPLETE on every node; on return this node can restore it.

    staged: this rank's segment, or why it has none. describe: makes the catalog on the coordinator; asked only
    when the plan changed. Raises on all ranks where any of them failed.
    """
    try:
        receipts = _exchange_receipts(caller, staged, structure_changed)
        assert isinstance(staged, Staged)
        faults.point("complete.receipts")
        saved, catalog = _as_last_time(caller, attempt, receipts), None
        if saved is None:
            saved, catalog = _anew(caller, attempt, staged, describe)
        manifest = _manifest(caller, attempt, saved)
        _publish_on_all_nodes(caller, attempt, manifest, catalog)
        if attempt.topology.is_leader:
            has_redundancy = bool(redundancy_on(caller, attempt.topology))
            keep_no_more(caller.session.memory, caller.scope, caller.settings.keep_memory, has_redundancy)
            faults.point("complete.evicted")
        _remember(caller, replace(saved, save_id=attempt.save_id))
        caller.session.persisted.note(attempt.persist)
        return manifest, staged
    except BaseException:
        caller.session.swept = False
        raise
    finally:
        if isinstance(staged, Staged):
            caller.session.slots.share(staged.slot)


def _exchange_receipts(caller: Caller, staged: Staged | Exception, structure_changed: bool) -> _Receipts:
    saved = caller.session.saved.get(caller.plan_key)
    if isinstance(staged, Staged):
        tail = staged.segment.tail
        is_elsewhere = saved is not None and saved.segments.tail[caller.ranks.rank] != tail
        news = ((caller.ranks.rank, tail),) if is_elsewhere else ()
        is_new = structure_changed or _differs(saved, staged, caller.ranks.rank)
        mine = _Receipts("" if saved is None else saved.save_id, is_new, news, ())
    else:
        mine = _Receipts("", False, (), ((caller.ranks.rank, f"{type(staged).__name__}: {staged}"),))
    receipts = caller.ranks.all_reduce(mine, _Receipts.join)
    if receipts.failures:
        if not isinstance(staged, Staged):
            raise staged
        caller.session.slots.abandon(staged.slot)
        raise RankFailed(f"saving {caller.name}", list(receipts.failures))
    return receipts


def _remember(caller: Caller, saved: SavedPlan) -> None:
    session = caller.session
    before = session.saved.get(caller.plan_key)
    session.saved[caller.plan_key] = saved
    if before is not None and before.catalog != saved.catalog:
        session.catalogs.keep_only({one.catalog for one in session.saved.values()})


def _differs(saved: SavedPlan | None, staged: Staged, number: int) -> bool:
    return (
        saved is None
        or saved.segments.layout[number] != staged.segment.layout
        or len(saved.segments.tail[number]) != len(staged.segment.tail)
        or saved.items != staged.plan.fingerprint(staged.items)
    )


def _as_last_time(caller: Caller, attempt: Attempt, receipts: _Receipts) -> SavedPlan | None:
    """What this plan saved last, with what the receipts say; None where that doesn't tell all."""
    saved = caller.session.saved.get(caller.plan_key)
    if saved is None or receipts.is_new:
        return None
    return replace(saved, segments=saved.segments.moved_on(attempt.save_id, dict(receipts.tails)))


def _anew(caller: Caller, attempt: Attempt, staged: Staged, describe: Describe[Any]) -> tuple[SavedPlan, Any]:
    """The coordinator makes the catalog from everyone's items; the nodes' leaders get its bytes."""
    ranks = caller.ranks
    found = ranks.all_reduce({ranks.rank: staged.segment}, operator.or_)
    segments = Segments.of(attempt.save_id, (found[rank] for rank in range(ranks.size)))
    parts = ranks.gather(describe.part(caller.rank, staged), describe.share)
    data, error = b"", ""
    if ranks.rank == 0:
        try:
            data = describe.catalog(parts).to_bytes()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    key, error = ranks.broadcast((catalog_key(data), error))
    if error:
        raise RankFailed(f"describing {caller.name}", [(0, error)])
    caller.session.heap_grew = True
    return SavedPlan(key, staged.plan.fingerprint(staged.items), segments), ranks.tell_leaders(data)


def _manifest(caller: Caller, attempt: Attempt, saved: SavedPlan) -> Manifest:
    return Manifest(
        name=caller.name,
        save_id=attempt.save_id,
        scope=caller.scope,
        job=caller.settings.job,
        created=attempt.created,
        world_size=caller.ranks.size,
        persist=attempt.persist,
        committer=saved.segments.node[0],
        segments=saved.segments,
        catalog=saved.catalog,
        stage_seconds=time.monotonic() - attempt.started,
        step=attempt.about.step,
        metrics=attempt.about.metrics,
    )


def _publish_on_all_nodes(caller: Caller, attempt: Attempt, manifest: Manifest, catalog: Any) -> None:
    """Publish on this node, if this rank leads it; no node gives up an older checkpoint before all have this one.

    No rank of an own plan goes on before that either. (DCP keeps its ranks together by itself, until `finish`.)
    catalog: its bytes, where this node hasn't got it yet.
    """
    failure: Exception | None = None
    if attempt.topology.is_leader:
        try:
            if catalog is not None:
                caller.session.catalogs.put(catalog)
            caller.session.publish(manifest)
        except Exception as error:
            failure = error
    failures: Failures = ()
    if failure is not None:
        failures = ((caller.ranks.rank, f"{type(failure).__name__}: {failure}"),)
    if len(set(attempt.topology.nodes)) > 1 or caller.plan_id:
        failures = caller.ranks.all_reduce(failures, lambda some, others: _some(some + others))
    if failure is not None:
        raise failure
    if failures:
        raise RankFailed(f"publishing {caller.name}", list(failures))
