"""Last stages of a load: read the opened checkpoint or one in its place, report, record."""

from __future__ import annotations

import heapq
import logging
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from dcp_mem.comm import SingleRank
from dcp_mem.comm.agreement import Failures, attempt, described, known_to_all
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log, log_once
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import NoRecoverableCheckpoint, RankFailed, SegmentCorrupt
from dcp_mem.loading.find import open_next, open_without
from dcp_mem.loading.finish import RecoveryReport, record_load, report_of, restore_redundancy
from dcp_mem.loading.load_attempt import DamagedSegment, LoadAttempt
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.peers import LoadGroup
from dcp_mem.loading.plan import plan_again, planned_names, plans_alone, reads_of
from dcp_mem.loading.read import Reading, read_items
from dcp_mem.loading.sources.base import SOURCE_ERRORS
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.planning.entries import first_of
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.reads import Reads
from dcp_mem.runtime.last_saves import Loaded, counted, note_loaded


def load_opened(
    load: LoadAttempt,
    opened: OpenCheckpoint,
    plan: LoadPlan | Reads,
    planner: LoadPlanner,
    *,
    is_coordinator: bool,
) -> RecoveryReport:
    """Read an opened checkpoint into its tensors, and finish the load.

    1. Every rank reads what it has planned; one exchange says how that went, and adds up what the
       ranks took from where. Where bytes are damaged: again from another copy, or from an older
       checkpoint, planned anew.
    2. One rank leaves a record of the load.
    3. Redundancy that the checkpoint has lost is made again in the background.

    All ranks call this together.

    `planner`: of this rank; it is given the bytes, and plans again for an older checkpoint. Raises
    SegmentCorrupt, NoRecoverableCheckpoint, NotOfOneSave, RankFailed.
    """
    written: set[str] = set()
    try:
        while True:
            result = _read_together(load, opened, plan, planner)
            outcome = result.outcome
            for trouble in outcome.troubles:
                load.note(opened.choice, trouble)
            if not outcome.failures:
                break
            load.note(opened.choice, outcome.failures[0][1])
            load.note_unread(opened.choice, may_pass=outcome.may_pass)
            _raise_if_final(load, opened, planner, result)
            opened.close()
            unread = opened
            opened = _open_another(load, unread, planner, result)
            if not _is_same_save(opened, unread):
                written |= planned_names(plan)
                plan = plan_again(
                    load.ranks, opened, planner, written, is_coordinator=is_coordinator
                )
    finally:
        opened.close()
    left_out: Sequence[str] = ()
    if isinstance(planner, LocalLoadPlanner):
        left_out = planner.names_of(outcome.left_out)
        if load.request.leaves_record and (load.ranks.rank == 0 or not load.is_collective):
            name_left_out(left_out, planner.objects)
            name_missing(outcome.missing)
            name_casts(len(planner.names_of(outcome.is_cast)), outcome.casts)
    report = report_of(load, opened, outcome.used, left_out, sorted(outcome.missing))
    if load.request.leaves_record:
        if (made := opened.description.manifest) is not None:
            saves = ((made.scope, counted(made)),)
            note_loaded(load.request.settings, Loaded(saves=saves))
        if load.ranks.rank == outcome.recorder[1]:
            record_load(load, report)
    restore_redundancy(load, opened.choice)
    log.info("loaded %s from %s in %.2f s", report.checkpoint_id, report.source, report.seconds)
    return report


def name_left_out(names: Sequence[str], objects: Mapping[str, str]) -> None:
    """Say what the checkpoint has below loaded entries that no rank has loaded."""
    for key, advice in objects.items():
        below = [name for name in names if name.startswith(f"{key}.")]
        if below:
            text = f"the checkpoint has more of {key} than is restored: {first_of(below)}"
            log_once(f"{text} ({advice})" if advice else text, logging.WARNING)
    prefixes = tuple(f"{key}." for key in objects)
    others = [name for name in names if not name.startswith(prefixes)]
    if others:
        log_once(f"the checkpoint has entries that the state dict lacks: {first_of(others)}")


def name_missing(names: Collection[str]) -> None:
    """Say what the checkpoint lacks, in a load that isn't strict."""
    if names:
        text = "the checkpoint lacks entries of the state dict, which stay as they are: %s"
        log.warning(text, first_of(sorted(names)))


def name_casts(count: int, casts: Sequence[tuple[str, str, str]]) -> None:
    """Say which tensors are loaded in another dtype than they were saved in: one line a load."""
    if casts:
        shown = [f"{name} ({saved} to {wanted})" for name, saved, wanted in casts[:_MOST_CASTS]]
        more = f", … ({count} in all)" if count > len(shown) else ""
        log.warning("tensors are cast as they are loaded: %s%s", ", ".join(shown), more)


def casts_of(planner: LocalLoadPlanner) -> list[tuple[str, str, str]]:
    """Return the first of the tensors that this rank loads in another dtype."""
    first = heapq.nsmallest(_MOST_CASTS, planner.casts.items())
    return [
        (name, saved.removeprefix("torch."), wanted.removeprefix("torch."))
        for name, (saved, wanted) in first
    ]


_MOST_CASTS = 5

# -- reading ---------------------------------------------------------------------------------------

_DAMAGE = "damaged: "
_MOST_FAILURES = 8


@value_class
class _ReadResult:
    """The outcome of reading on all ranks, and the error of this one."""

    outcome: _Outcome
    error: Exception | None

    def exception(self, name: str) -> Exception:
        """Return what this rank raises: its own error, else one that names the other ranks."""
        return known_to_all(self.error or RankFailed(f"loading {name}", self.outcome.failures))


def _read_together(
    load: LoadAttempt, opened: OpenCheckpoint, plan: LoadPlan | Reads, planner: LoadPlanner
) -> _ReadResult:
    """Read on every rank, and exchange how that went."""
    request = load.request
    # Ranks that saved alone load a checkpoint of their own each: they have nothing to share.
    ranks = load.ranks if load.is_collective else SingleRank()
    group = LoadGroup(
        ranks=ranks,
        memory_root=request.settings.memory_root,
        across_nodes=request.across_nodes,
        transport=request.settings.transport,
    )
    troubles = list[str]()

    def read_all() -> Counter[str]:
        reading = Reading(
            opened=opened,
            plan=plan if isinstance(plan, Reads) else reads_of(opened, plan, planner),
            planner=planner,
            verify=request.verify,
            weights_only=request.weights_only,
            troubles=troubles,
        )
        return read_items(reading, group)

    with collector_paused():
        read = attempt(read_all)
    text, damaged = _failure_text(read.error), _damaged_in_memory(load, opened, read.error)
    local = planner if isinstance(planner, LocalLoadPlanner) else None
    left_out = attempt(bytes if local is None else local.left_out)
    is_cast = attempt(bytes if local is None else local.cast_bits)
    rank = load.ranks.rank
    own = _Outcome(
        failures=((rank, text),) if text else (),
        damaged=frozenset() if damaged is None else frozenset({damaged}),
        texts={text: (rank, number) for number, text in enumerate(troubles)},
        used=read.value if read.error is None else Counter(),
        recorder=(load.memory is None, rank),
        left_out=left_out.value if left_out.error is None else b"",
        may_pass=isinstance(read.error, SegmentCorrupt) and read.error.may_pass,
        missing=frozenset() if local is None else frozenset(local.missing),
        is_cast=is_cast.value if is_cast.error is None else b"",
        casts=() if local is None else tuple(casts_of(local)),
    )
    joined = load.ranks.all_reduce(own, _Outcome.join)
    if not load.is_collective:  # each rank has read a checkpoint of its own
        joined = replace(
            joined,
            left_out=own.left_out,
            missing=own.missing,
            is_cast=own.is_cast,
            casts=own.casts,
        )
    return _ReadResult(joined, read.error)


@sendable
@value_class(kw_only=True)
class _Outcome:
    """Bytes that some ranks have read, and failures of these ranks."""

    # (rank, text); first of all those that aren't damage, of which one is final. The first few of
    # them.
    failures: Failures
    damaged: frozenset[DamagedSegment]  # segments in memory that turned out to be damaged
    # what was wrong with sources; with the rank that says so, and the place among what that rank
    # says
    texts: Mapping[str, tuple[int, int]]
    used: Counter[str]  # bytes that these ranks took, by the label of the source
    # whether the rank that is to leave a record has no memory of the job, and its number: the
    # lowest of those that have, else the lowest of all
    recorder: tuple[bool, int]
    left_out: bytes  # a bit for each entry below a loaded one that none of these ranks loads
    may_pass: bool  # whether some rank couldn't read just now what may be whole
    missing: frozenset[str]  # what some rank's state dict has, and the checkpoint lacks
    is_cast: bytes  # a bit for each entry that some rank loads in another dtype; b"" for none
    casts: tuple[tuple[str, str, str], ...]  # name and dtypes of the first of them

    @property
    def is_damage(self) -> bool:
        """Whether damaged bytes are all that went wrong."""
        return all(text.startswith(_DAMAGE) for _, text in self.failures)

    @property
    def troubles(self) -> list[str]:
        """What was wrong with sources, where others had the bytes whole; in order."""
        return sorted(self.texts, key=self.texts.__getitem__)

    def join(self, other: _Outcome) -> _Outcome:
        """Join the outcomes of two sets of ranks."""
        failures = sorted(
            self.failures + other.failures,
            key=lambda one: (one[1].startswith(_DAMAGE), one[0]),
        )
        texts = {**self.texts, **other.texts}
        for text in self.texts.keys() & other.texts.keys():
            texts[text] = min(self.texts[text], other.texts[text])
        return _Outcome(
            failures=tuple(failures[:_MOST_FAILURES]),
            damaged=self.damaged | other.damaged,
            texts=texts,
            used=self.used + other.used,
            recorder=min(self.recorder, other.recorder),
            left_out=bytes(map(operator.and_, self.left_out, other.left_out)),
            may_pass=self.may_pass or other.may_pass,
            missing=self.missing | other.missing,
            is_cast=_either(self.is_cast, other.is_cast),
            casts=tuple(sorted({*self.casts, *other.casts})[:_MOST_CASTS]),
        )


def _either(one: bytes, other: bytes) -> bytes:
    """Return the bits that either has."""
    return bytes(map(operator.or_, one, other)) if one and other else one or other


def _failure_text(error: Exception | None) -> str:
    if error is None:
        return ""
    return f"{_DAMAGE}{error}" if isinstance(error, SOURCE_ERRORS) else described(error)


def _damaged_in_memory(
    load: LoadAttempt, opened: OpenCheckpoint, error: Exception | None
) -> DamagedSegment | None:
    """Return the segment that is newly known to be damaged in this node's memory.

    Only of a checkpoint that all ranks saved together: another node may have a copy.
    """
    if load.memory is None or not load.is_collective:
        return None
    if not isinstance(error, SegmentCorrupt) or error.source != MemorySource.label:
        return None
    save_id = opened.choice.save_id
    if load.is_damaged(save_id, error.rank):
        return None
    return load.memory.node, save_id, error.rank


# -- falling back ----------------------------------------------------------------------------------


def _raise_if_final(
    load: LoadAttempt, opened: OpenCheckpoint, planner: LoadPlanner, result: _ReadResult
) -> None:
    """Raise on all ranks if neither another copy nor an older checkpoint can help."""
    outcome = result.outcome
    if not outcome.is_damage or not (outcome.damaged or _may_be_older(load, planner)):
        raise result.exception(opened.choice.name)


def _open_another(
    load: LoadAttempt, unread: OpenCheckpoint, planner: LoadPlanner, result: _ReadResult
) -> OpenCheckpoint:
    """Open the same checkpoint without its damaged segments, else an older one."""
    name, outcome = unread.choice.name, result.outcome
    why = outcome.failures[0][1]
    may_be_older = _may_be_older(load, planner)
    try:
        opened = open_without(load, outcome.damaged) if outcome.damaged else open_next(load)
    except NoRecoverableCheckpoint:
        if may_be_older:
            raise
        raise result.exception(name) from None
    if _is_same_save(opened, unread):
        log.warning("%s is damaged (%s); loading it from elsewhere", name, why)
        return opened
    if not may_be_older:
        opened.close()
        raise result.exception(name)
    log.warning("%s is damaged (%s); loading %s", name, why, opened.choice.name)
    return opened


def _may_be_older(load: LoadAttempt, planner: LoadPlanner) -> bool:
    """Return whether an older checkpoint will do: none was asked for, and ranks can plan again."""
    return load.request.wanted is None and plans_alone(planner)


def _is_same_save(one: OpenCheckpoint, other: OpenCheckpoint) -> bool:
    return (one.choice.name, one.choice.save_id) == (other.choice.name, other.choice.save_id)
