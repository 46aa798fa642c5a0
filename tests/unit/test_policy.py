"""Decisions in all situations that Hypothesis can think of: no torch, no files, no clock."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_mem import ConfigError, Persist, every_n_saves, every_n_steps, every_seconds
from dcp_mem.policy.admission import (
    Admission,
    NodeMemory,
    Verdict,
    admit,
    allowance,
    most_at_once,
    retire,
    still_full,
)
from dcp_mem.policy.election import (
    ElectedCheckpoint,
    FoundCheckpoint,
    RecoveryPlan,
    elect,
    in_common,
)
from dcp_mem.policy.facts import CheckpointFacts, SharedBytes
from dcp_mem.policy.order import Place, SaveNumber
from dcp_mem.policy.persistence import (
    CountedSave,
    Persisted,
    Since,
    count_from,
    persist_policy,
)

# -- admission -------------------------------------------------------------------------------------


def _kept(key: str, created: float, **facts: object) -> CheckpointFacts:
    usual = CheckpointFacts(
        key=key, created=created, nbytes=100, persist=False, pending=False, busy=False
    )
    return replace(usual, **facts)  # type: ignore[arg-type]


def _node(kept: Sequence[CheckpointFacts], **facts: object) -> NodeMemory:
    usual = NodeMemory(
        kept=tuple(kept),
        used=sum(each.nbytes for each in kept),
        spare=0,
        free=10**9,
        limit=None,
        needed=100,
    )
    return replace(usual, **facts)  # type: ignore[arg-type]


@st.composite
def _checkpoints(draw: st.DrawFn) -> list[CheckpointFacts]:
    count = draw(st.integers(0, 5))
    found = []
    for position in draw(st.permutations(range(count))):
        persist = draw(st.booleans())
        found.append(
            CheckpointFacts(
                key=f"save{position}",
                created=float(position),
                nbytes=draw(st.integers(0, 200)),
                persist=persist,
                pending=persist and draw(st.booleans()),
                busy=draw(st.integers(0, 3)) == 0,
                replicated=draw(st.integers(0, 2)) == 0,
            )
        )
    return found


@st.composite
def _nodes(draw: st.DrawFn) -> list[NodeMemory]:
    """Draw nodes with the same checkpoints, but for those that a kill left on some only."""
    checkpoints = draw(_checkpoints())
    nodes = []
    for _ in range(draw(st.integers(1, 3))):
        missing = (
            draw(st.sets(st.sampled_from([each.key for each in checkpoints])))
            if checkpoints
            else set()
        )
        whole = draw(st.integers(0, 2)) > 0
        kept = [
            replace(each, busy=each.busy and draw(st.booleans()))
            for each in checkpoints
            if whole or each.key not in missing
        ]
        kept = _sharing(kept, [draw(st.integers(0, 2)) for _ in kept])
        free_slots = draw(st.integers(0, 200))
        needed = draw(st.integers(0, 200))
        nodes.append(
            NodeMemory(
                kept=tuple(kept),
                used=_occupied(kept) + free_slots,
                spare=draw(st.integers(0, min(free_slots, needed))),
                free=draw(st.integers(0, 400)),
                limit=draw(st.none() | st.integers(0, 800)),
                needed=needed,
            )
        )
    return nodes


def _sharing(kept: Sequence[CheckpointFacts], files: Sequence[int]) -> list[CheckpointFacts]:
    """Have checkpoints share the file that is named for each; 0 is none."""
    return [
        replace(one, shared=(SharedBytes(file, 70 * file, files.count(file)),))
        if file and files.count(file) > 1
        else one
        for one, file in zip(kept, files, strict=True)
    ]


def _occupied(kept: Sequence[CheckpointFacts]) -> int:
    """What they take together."""
    files = {file.file: file.nbytes for one in kept for file in one.shared}
    return sum(one.nbytes for one in kept) + sum(files.values())


def _everywhere(nodes: Sequence[NodeMemory]) -> list[CheckpointFacts]:
    """What every node holds, oldest first."""
    keys = set.intersection(*({each.key for each in node.kept} for node in nodes))
    return sorted(
        (each for each in nodes[0].kept if each.key in keys), key=lambda each: each.created
    )


def _fits(node: NodeMemory, evicted: frozenset[str], keep: int) -> bool:
    staying = [each for each in node.kept if each.key not in evicted]
    freed = _occupied(node.kept) - _occupied(staying)
    occupied = max(node.used - freed - node.spare, 0) + node.needed
    return (
        len(staying) <= allowance(staying, keep)
        and (node.limit is None or occupied <= node.limit)
        and node.needed - node.spare - freed <= node.free
    )


@given(_nodes(), st.integers(1, 3))
def test_what_is_admitted_fits_on_every_node(nodes: list[NodeMemory], keep: int) -> None:
    verdict = admit(nodes, keep)
    if verdict.action is Admission.STAGE:
        assert all(_fits(node, verdict.evict, keep) for node in nodes)


@given(_nodes(), st.integers(1, 3))
def test_nothing_leaves_memory_for_a_save_that_does_not_take_place(
    nodes: list[NodeMemory], keep: int
) -> None:
    verdict = admit(nodes, keep)
    if verdict.action is Admission.FULL:
        assert not verdict.evict
        assert verdict.why


@given(_nodes(), st.integers(1, 3))
@example([_node([_kept("a", 1)]), _node([_kept("a", 1), _kept("b", 2)])], 1)
def test_the_newest_checkpoint_that_every_node_holds_stays(
    nodes: list[NodeMemory], keep: int
) -> None:
    whole = _everywhere(nodes)
    if whole:
        assert whole[-1].key not in admit(nodes, keep).evict


@given(_nodes(), st.integers(1, 3))
def test_where_no_checkpoint_is_whole_each_node_keeps_its_newest(
    nodes: list[NodeMemory], keep: int
) -> None:
    if not _everywhere(nodes):
        newest = {max(node.kept, key=lambda each: each.created).key for node in nodes if node.kept}
        assert not newest & admit(nodes, keep).evict


@given(_nodes(), st.integers(1, 3))
@example(
    [
        _node([_kept("a", 1, busy=True), _kept("b", 2)]),
        _node([_kept("a", 1), _kept("b", 2)], limit=200),
    ],
    2,
)
def test_a_checkpoint_that_is_busy_on_any_node_stays_on_all(
    nodes: list[NodeMemory], keep: int
) -> None:
    busy = {each.key for node in nodes for each in node.kept if each.busy}
    assert not busy & admit(nodes, keep).evict


@given(_nodes(), st.integers(1, 3))
def test_the_newest_checkpoint_that_waits_for_its_flush_stays(
    nodes: list[NodeMemory], keep: int
) -> None:
    persisted = [each for each in _everywhere(nodes) if each.persist]
    if persisted and persisted[-1].pending:
        assert persisted[-1].key not in admit(nodes, keep).evict


@given(_nodes(), st.integers(1, 3))
def test_the_newest_checkpoint_with_copies_stays(nodes: list[NodeMemory], keep: int) -> None:
    replicated = [each for each in _everywhere(nodes) if each.replicated]
    if replicated:
        assert replicated[-1].key not in admit(nodes, keep).evict


@given(_nodes(), st.integers(1, 3))
def test_that_one_node_knows_of_copies_first_changes_nothing(
    nodes: list[NodeMemory], keep: int
) -> None:
    known = {one.key for one in nodes[0].kept if one.replicated}
    aware, unaware = (
        [
            replace(node, kept=tuple(replace(one, replicated=one.key in keys) for one in node.kept))
            for node in nodes
        ]
        for keys in (known, set[str]())
    )
    assert admit([aware[0], *unaware[1:]], keep) == admit(aware, keep)


@given(_nodes(), st.integers(1, 3))
def test_one_node_evicts_no_more_than_it_needs(nodes: list[NodeMemory], keep: int) -> None:
    verdict = admit(nodes[:1], keep)
    for key in verdict.evict:
        others = [each for each in nodes[0].kept if each.key in verdict.evict and each.key != key]
        # The last one that was chosen was still needed: without it, the earlier ones don't do.
        if all(
            _precedes(each, next(one for one in nodes[0].kept if one.key == key)) for each in others
        ):
            assert not _fits(nodes[0], verdict.evict - {key}, keep)


def _precedes(one: CheckpointFacts, other: CheckpointFacts) -> bool:
    return (one.pending, one.created) < (other.pending, other.created)


@given(_nodes(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_the_order_in_which_checkpoints_are_listed(
    nodes: list[NodeMemory], keep: int, random: object
) -> None:
    shuffled = []
    for node in nodes:
        kept = list(node.kept)
        random.shuffle(kept)  # type: ignore[attr-defined]
        shuffled.append(replace(node, kept=tuple(kept)))
    assert admit(shuffled, keep) == admit(nodes, keep)


def test_an_empty_memory_takes_a_first_checkpoint() -> None:
    assert admit([_node([])], 1) == Verdict(action=Admission.STAGE)


def test_up_to_keep_checkpoints_stay_beside_the_one_that_is_staged() -> None:
    kept = [_kept("a", 1), _kept("b", 2)]
    assert admit([_node(kept)], 2) == Verdict(action=Admission.STAGE)
    assert admit([_node(kept)], 1) == Verdict(action=Admission.STAGE, evict=frozenset({"a"}))


def test_an_older_checkpoint_with_copies_stays_beside_a_keep_of_one_until_a_newer_one_has_some() -> (  # noqa: E501
    None
):
    old, new = _kept("old", 1, replicated=True), _kept("new", 2)
    assert admit([_node([old, new])], 1) == Verdict(action=Admission.STAGE)
    assert retire([old, new], 1) == frozenset()
    assert retire([old, new, _kept("newest", 3)], 1) == {"new"}
    assert retire([old, replace(new, replicated=True)], 1) == {"old"}
    assert most_at_once(1, gets_copies=True) == most_at_once(2, gets_copies=True) == 3


def test_an_older_checkpoint_with_copies_takes_the_place_of_one_without() -> None:
    kept = [_kept("old", 1, replicated=True), _kept("middle", 2), _kept("new", 3)]
    assert retire(kept, 2) == {"middle"}
    assert admit([_node(kept[:2])], 2) == Verdict(action=Admission.STAGE)


def test_durable_checkpoints_leave_before_older_ones_that_wait_for_their_flush() -> None:
    kept = [
        _kept("old", 1, persist=True, pending=True),
        _kept("durable", 2, persist=True),
        _kept("new", 3),
    ]
    newest = _kept("newest", 4, persist=True, pending=True)
    assert admit([_node([*kept, newest])], 3).evict == {"durable"}
    assert admit([_node([*kept, newest])], 2).evict == {"durable", "new"}
    assert admit([_node([*kept, newest])], 1).evict == {"durable", "new", "old"}


def test_what_is_not_chosen_and_waits_for_its_flush_stays_while_there_is_room_and_leaves_first_without() -> (  # noqa: E501
    None
):
    best = _kept("best", 1, persist=True, pending=True)
    middle, last = (
        _kept(name, number, persist=True, pending=True)
        for name, number in (("middle", 2), ("last", 3))
    )
    middle = replace(middle, chosen=False)
    assert retire([best, middle, last], 2) == {"middle"}
    assert retire([middle, last], 2) == frozenset()


def test_a_checkpoint_whose_flush_nothing_newer_supersedes_is_waited_for() -> None:
    kept = [_kept("flushing", 1, persist=True, pending=True), _kept("newest", 2)]
    verdict = admit([_node(kept)], 1)
    assert (verdict.action, verdict.evict) == (Admission.FULL, frozenset())
    assert "2 checkpoints are in memory" in verdict.why


def test_a_memory_limit_evicts_and_then_refuses_with_the_figures() -> None:
    kept = [_kept("a", 1), _kept("b", 2)]
    assert admit([_node(kept, limit=300)], 2) == Verdict(action=Admission.STAGE)
    assert admit([_node(kept, limit=299)], 2) == Verdict(
        action=Admission.STAGE, evict=frozenset({"a"}), gives_back=True
    )
    verdict = admit([_node(kept, limit=199)], 2)
    assert (verdict.action, verdict.needed, verdict.limit) == (Admission.FULL, 200, 199)


def test_what_several_share_leaves_with_the_last_of_them() -> None:
    kept = _sharing([_kept("a", 1), _kept("b", 2), _kept("c", 3)], [1, 1, 0])
    node = _node(kept, used=370)
    assert admit([replace(node, limit=370)], 3).evict == {"a"}
    assert admit([replace(node, limit=360)], 3).evict == {"a", "b"}
    assert admit([replace(node, limit=200)], 3).evict == {"a", "b"}
    assert admit([replace(node, limit=199)], 3).action is Admission.FULL
    others = [replace(one, shared=(replace(file, names=3),)) for one in kept for file in one.shared]
    elsewhere = replace(node, kept=(*others, kept[2]), limit=269)  # a third one, which isn't here
    assert admit([elsewhere], 3).action is Admission.FULL


def test_free_slots_of_the_job_are_not_counted_twice() -> None:
    assert admit([_node([_kept("a", 1)], used=200, spare=100, limit=200)], 1) == Verdict(
        action=Admission.STAGE, gives_back=True
    )
    assert admit([_node([_kept("a", 1)], used=200, spare=100, free=0)], 1) == Verdict(
        action=Admission.STAGE, gives_back=True
    )


def test_free_slots_stay_where_there_is_room_for_them_beside_the_save() -> None:
    node = _node([_kept("a", 1)], used=200, spare=100, limit=300)
    assert not admit([node], 1).gives_back
    assert admit([node, replace(node, limit=299)], 1).gives_back


def test_files_beside_the_segments_count() -> None:
    node = _node([_kept("a", 1), _kept("b", 2)], limit=300)
    assert admit([node], 2) == Verdict(action=Admission.STAGE)
    assert admit([replace(node, records=1)], 2).evict == {"a"}
    assert admit([replace(node, records=101)], 2).action is Admission.FULL


def test_a_save_whose_room_is_still_in_use_is_not_staged() -> None:
    node = _node([_kept("a", 1)], used=200, limit=250, needed=50)
    assert still_full([node]) is None
    verdict = still_full([node, replace(node, records=1)])
    assert verdict is not None
    assert (verdict.action, verdict.needed, verdict.limit) == (Admission.FULL, 251, 250)
    assert verdict.lasting
    read = replace(node, used=201, kept=(_kept("a", 1, busy=True),))
    verdict = still_full([read])
    assert verdict is not None
    assert not verdict.lasting


def test_a_full_file_system_refuses_with_the_figures() -> None:
    verdict = admit([_node([_kept("a", 1)], used=100, free=50)], 1)
    assert (verdict.action, verdict.needed, verdict.limit) == (Admission.FULL, 200, 150)
    assert "file system" in verdict.why


def test_what_one_node_must_evict_leaves_all_nodes() -> None:
    kept = [_kept("a", 1), _kept("b", 2)]
    assert admit([_node(kept), _node(kept, limit=250)], 2) == Verdict(
        action=Admission.STAGE, evict=frozenset({"a"}), gives_back=True
    )


def test_what_a_kill_left_on_one_node_only_makes_room_for_what_all_nodes_hold() -> None:
    nodes = [
        _node([_kept("whole", 1)]),
        _node([_kept("whole", 1), _kept("part", 2, persist=True, pending=True)]),
    ]
    assert admit(nodes, 1) == Verdict(action=Admission.STAGE, evict=frozenset({"part"}))


@given(_checkpoints(), st.integers(1, 4))
def test_retention_leaves_at_most_keep_unless_something_holds_more(
    kept: list[CheckpointFacts], keep: int
) -> None:
    leaving = retire(kept, keep)
    staying = [each for each in kept if each.key not in leaving]
    newest = max(kept, key=lambda each: each.created, default=None)
    persisted = max(
        (each for each in kept if each.persist), key=lambda each: each.created, default=None
    )
    assert newest is None or newest in staying
    assert persisted is None or not persisted.pending or persisted in staying
    replicated = max(
        (each for each in kept if each.replicated), key=lambda each: each.created, default=None
    )
    assert replicated is None or replicated in staying
    assert all(each in staying for each in kept if each.busy)
    assert len(staying) >= min(keep, len(kept))
    if len(staying) > keep:
        held = (
            newest,
            replicated,
            persisted if persisted is not None and persisted.pending else None,
        )
        assert all(each.busy or each in held for each in staying)


# -- election --------------------------------------------------------------------------------------


def aged(number: int) -> Place:
    """The place of the run's save of this number."""
    return Place(number=SaveNumber(1, number))


_FINDINGS = st.lists(
    st.builds(
        FoundCheckpoint,
        name=st.sampled_from(["one", "two", "three"]),
        save_id=st.sampled_from(["", "aa", "bb"]),
        place=st.integers(0, 5).map(aged),
        problem=st.sampled_from(["", "", "damaged"]),
    ),
    max_size=5,
    unique_by=lambda each: (each.name, each.save_id),
)


@given(st.lists(_FINDINGS, min_size=1, max_size=4), _FINDINGS)
def test_whatever_every_rank_can_read_is_chosen_newest_first_and_all_else_has_a_reason(
    inventories: list[list[FoundCheckpoint]], stored: list[FoundCheckpoint]
) -> None:
    plan = elect(inventories, stored)
    numbers = [choice.place.number for choice in plan.choices]
    assert numbers == sorted(numbers, reverse=True)
    chosen = {(choice.name, choice.save_id): choice for choice in plan.choices}
    assert len(chosen) == len(plan.choices)
    everything = {(one.name, one.save_id) for one in itertools.chain(*inventories, stored)}
    for key in everything:
        whole = {(one.name, one.save_id) for one in stored if not one.problem}
        in_memory = all(
            any((one.name, one.save_id) == key and not one.problem for one in each)
            for each in inventories
        )
        assert (key in chosen) == (in_memory or key in whole)
        if key in chosen:
            assert (chosen[key].memory, chosen[key].storage) == (in_memory, key in whole)
    assert len(plan.reasons) == len(everything) - len(chosen)
    assert all(
        any(reason.startswith(name) for reason in plan.reasons)
        for name, _ in everything - set(chosen)
    )


@given(st.lists(_FINDINGS, min_size=1, max_size=4), _FINDINGS, st.data())
def test_the_order_of_ranks_and_findings_does_not_matter(
    inventories: list[list[FoundCheckpoint]], stored: list[FoundCheckpoint], data: st.DataObject
) -> None:
    shuffled = [
        data.draw(st.permutations(each)) for each in data.draw(st.permutations(inventories))
    ]
    assert elect(shuffled, data.draw(st.permutations(stored))) == elect(inventories, stored)


@given(
    st.lists(st.none() | st.frozensets(st.integers(0, 4)), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_nodes_put_together_what_they_have(
    having: list[frozenset[int] | None], lies_on_storage: bool, is_damaged_there: bool
) -> None:
    """Five segments; None is a node without any trace of them."""
    whole = frozenset(range(5))
    inventories = [
        []
        if segments is None
        else [
            FoundCheckpoint(
                name="step-1",
                save_id="aa",
                place=aged(1),
                count=5,
                segments=None if segments == whole else segments,
            )
        ]
        for segments in having
    ]
    stored = (
        [
            FoundCheckpoint(
                name="step-1",
                save_id="aa",
                place=aged(1),
                problem="torn" if is_damaged_there else "",
            )
        ]
        if lies_on_storage
        else []
    )
    plan = elect(inventories, stored)
    there = frozenset().union(*(segments for segments in having if segments is not None))
    is_stored = lies_on_storage and not is_damaged_there
    assert bool(plan.choices) == (there == whole or is_stored)
    for choice in plan.choices:
        assert (choice.memory, choice.storage) == (there == whole, is_stored)
        if all(segments == whole for segments in having):
            assert choice.holders is None
            continue
        assert choice.holders == {
            segment: tuple(
                rank
                for rank, segments in enumerate(having)
                if segments is not None and segment in segments
            )
            for segment in sorted(there)
        }
        knowing = [rank for rank, segments in enumerate(having) if segments is not None]
        assert choice.teller == (knowing[0] if there and len(knowing) < len(having) else None)
    for reason in plan.reasons:
        missing = ", ".join(str(segment) for segment in sorted(whole - there))
        assert any(segments is not None for segments in having) == (
            f"segments of ranks {missing}" in reason
        )


def test_memory_and_storage_of_one_save_are_one_choice() -> None:
    finding = FoundCheckpoint(name="step-1", save_id="aa", place=aged(1))
    assert elect([[finding], [finding]], [finding]).choices == (
        ElectedCheckpoint(
            name="step-1",
            save_id="aa",
            place=replace(aged(1), key=("step-1", "aa")),
            memory=True,
            storage=True,
        ),
    )


def test_a_newer_save_of_the_same_name_comes_first_and_the_stored_one_after_it() -> None:
    plan = elect(
        [[FoundCheckpoint(name="latest", save_id="bb", place=aged(2))]],
        [FoundCheckpoint(name="latest", save_id="aa", place=aged(1))],
    )
    assert [(one.save_id, one.memory, one.storage) for one in plan.choices] == [
        ("bb", True, False),
        ("aa", False, True),
    ]


def _stored(metadata: str, **options: Any) -> FoundCheckpoint:
    return FoundCheckpoint(name="step-1", save_id="", place=aged(1), metadata=metadata, **options)


@pytest.mark.parametrize(
    ("known", "stored", "removed", "choices", "reason"),
    [
        ({"was_stored": True}, [_stored("new")], (), [""], "is in its place now"),
        ({"was_stored": True}, [_stored("new", problem="damaged")], (), ["aa"], "damaged"),
        ({"was_stored": True}, [], (), ["aa"], ""),
        ({"was_stored": True, "replaces": ""}, [], {"step-1"}, ["aa"], ""),
        ({}, [_stored("old")], (), ["aa", ""], ""),
        ({"replaces": "old"}, [_stored("old")], (), ["aa", ""], ""),
        ({"replaces": "old"}, [_stored("new")], (), [""], "has saved a checkpoint of that name"),
        ({"replaces": ""}, [_stored("new")], (), [""], "has saved a checkpoint of that name"),
        ({"replaces": ""}, [], {"step-1"}, [], "its directory was removed"),
    ],
)
def test_memory_stands_for_what_nobody_has_replaced_or_removed(
    known: dict[str, Any],
    stored: list[FoundCheckpoint],
    removed: set[str],
    choices: list[str],
    reason: str,
) -> None:
    finding = FoundCheckpoint(name="step-1", save_id="aa", place=aged(2), **known)
    plan = elect([[finding], [finding]], stored, removed=removed)
    assert [one.save_id for one in plan.choices] == choices
    assert reason in "".join(plan.reasons)


def test_a_save_goes_before_copies_of_it_that_storage_has_under_other_names() -> None:
    here = FoundCheckpoint(name="step-5", save_id="aa", place=aged(5))
    copy = replace(here, name="step-5-backup", is_renamed=True)
    newer = FoundCheckpoint(name="step-6", save_id="bb", place=aged(6))
    (first, second) = elect([[here]], [copy]).choices
    assert (first.name, first.memory, second.name) == ("step-5", True, "step-5-backup")
    assert [one.name for one in elect([[]], [copy, newer, here]).choices] == [
        "step-6",
        "step-5",
        "step-5-backup",
    ]


def test_reasons_say_what_is_missing_where() -> None:
    plan = elect(
        [
            [
                FoundCheckpoint(name="step-2", save_id="bb", place=aged(2)),
                FoundCheckpoint(name="step-1", save_id="aa", place=aged(1), problem="2 of 9 bytes"),
            ],
            [],
        ],
        [],
    )
    assert plan.choices == ()
    assert plan.reasons == (
        "step-2 (save bb): memory: only 1 of 2 ranks' nodes hold it; not committed on storage",
        "step-1 (save aa): memory: 2 of 9 bytes; not committed on storage",
    )
    (reason,) = elect(
        [[]],
        [
            FoundCheckpoint(
                name="step-3", save_id="", place=aged(3), problem="segment of rank 1: missing"
            )
        ],
    ).reasons
    assert reason == "step-3: not in memory; storage: segment of rank 1: missing"


def test_nothing_found_is_an_empty_plan() -> None:
    assert elect([[], []], []) == RecoveryPlan((), ())


def test_ranks_that_saved_alone_have_in_common_what_each_of_them_has_by_name() -> None:
    def plan(*choices: tuple[str, str, int]) -> RecoveryPlan:
        return RecoveryPlan(
            tuple(
                ElectedCheckpoint(
                    name=name, save_id=save_id, place=aged(age), memory=True, storage=False
                )
                for name, save_id, age in choices
            ),
            (),
        )

    first = plan(("c", "11", 4), ("b", "12", 3), ("b", "13", 2), ("a", "14", 1))
    second = plan(("b", "21", 2), ("a", "22", 1))
    common = in_common([first, second])
    assert [choice.name for choice in common.choices] == ["b", "a"]
    assert common.choices[0].save_id == "12"
    assert common.reasons == ("c: not every rank has its part",)


# -- persistence -----------------------------------------------------------------------------------


def _persisted(policy: Persist, times: Sequence[float]) -> list[int]:
    """Which of the saves at these times go to storage."""
    chosen: list[int] = []
    for number, now in enumerate(times):
        since = Since(number - chosen[-1], now - times[chosen[-1]]) if chosen else None
        if policy.wants(since):
            chosen.append(number)
    return chosen


@given(st.integers(1, 9), st.integers(0, 60))
def test_every_nth_save_is_persisted_from_the_first_on(n: int, saves: int) -> None:
    assert _persisted(every_n_saves(n), [float(i) for i in range(saves)]) == list(
        range(0, saves, n)
    )


@given(st.integers(1, 50), st.lists(st.integers(0, 30), max_size=40))
def test_an_interval_persists_the_first_save_and_then_the_first_after_each(
    seconds: int, gaps: list[int]
) -> None:
    times = [float(time) for time in itertools.accumulate(gaps)]
    chosen = _persisted(every_seconds(seconds), times)
    assert not times or chosen[0] == 0
    for earlier, later in itertools.pairwise(chosen):
        assert times[later] - times[earlier] >= seconds
        assert later == earlier + 1 or times[later - 1] - times[earlier] < seconds
    if chosen:
        assert times[-1] - times[chosen[-1]] < seconds or chosen[-1] == len(times) - 1


@given(st.integers(1, 50), st.lists(st.integers(0, 30), max_size=40))
def test_every_n_steps_persists_the_first_save_and_then_the_first_n_steps_on(
    n: int, gaps: list[int]
) -> None:
    steps = list(itertools.accumulate(gaps))
    chosen: list[int] = []
    for number, step in enumerate(steps):
        since = Since(number - chosen[-1], 0.0, step - steps[chosen[-1]]) if chosen else None
        if every_n_steps(n).wants(since, step):
            chosen.append(number)
    assert not steps or chosen[0] == 0
    for earlier, later in itertools.pairwise([*chosen, len(steps) - 1] if steps else []):
        assert all(steps[between] - steps[earlier] < n for between in range(earlier, later))
        assert later not in chosen or later == earlier or steps[later] - steps[earlier] >= n


def test_training_that_goes_back_persists_its_first_save() -> None:
    assert every_n_steps(100).wants(Since(1, 0.0, -40), 60)


def test_steps_that_nobody_told_are_an_error_that_says_how_to_tell_them() -> None:
    with pytest.raises(ConfigError, match=r"annotate_next_save\(step="):
        every_n_steps(100).wants(None)


def test_true_and_false_are_all_and_none() -> None:
    assert _persisted(persist_policy(True), [0.0] * 5) == [0, 1, 2, 3, 4]
    assert _persisted(persist_policy(False), [0.0] * 5) == []
    assert persist_policy(every_n_saves(3)) == every_n_saves(3)


def _counted(policy: Persist, saves: Sequence[tuple[int | None, float]]) -> list[int]:
    """Which of these saves, each of a step and at a time, one process has go to storage."""
    chosen: list[int] = []
    before: CountedSave | None = None
    for number, (step, now) in enumerate(saves):
        name = f"step-{step}"
        is_chosen, persisted = policy.count(before, name, step, now)
        chosen += [number] * is_chosen
        before = CountedSave(name=name, step=step, persisted=persisted, at=now)
    return chosen


_POLICIES = st.sampled_from(
    [every_n_saves(3), every_n_steps(25), every_seconds(40), Persist(saves=4, seconds=50)]
)


@given(_POLICIES, st.integers(0, 60), st.data())
def test_restarts_anywhere_leave_the_saves_that_are_chosen_as_they_were(
    policy: Persist, saves: int, data: st.DataObject
) -> None:
    """A restart costs no time of the job; its clock begins anywhere; some saves are made again."""
    undisturbed = _counted(policy, [(10 * n, 10.0 * n) for n in range(saves)])
    made: list[CountedSave] = []
    chosen: set[int] = set()
    number, clock, resumed = 0, 0.0, None
    while number < saves:
        own = made[-1] if made and resumed is None else None
        before = count_from(own, [] if resumed is None else [resumed], 10 * number)
        is_chosen, persisted = policy.count(before, f"step-{10 * number}", 10 * number, clock)
        chosen |= {number} if is_chosen else set()
        made = made[:number]
        made.append(
            CountedSave(name=f"step-{10 * number}", step=10 * number, persisted=persisted, at=clock)
        )
        number, clock, resumed = number + 1, clock + 10, None
        if data.draw(st.integers(0, 4)) == 0:
            kept = data.draw(st.integers(max(0, number - 3), number - 1))
            clock = data.draw(st.sampled_from([0.0, 1e6]))
            resumed = replace(made[kept], at=clock)
            is_made_again = data.draw(st.booleans())
            number, clock = kept + 1 - is_made_again, clock + (0 if is_made_again else 10)
            made = made[: kept + 1]
    assert chosen == set(undisturbed)


def test_a_look_at_an_older_checkpoint_moves_no_counts() -> None:
    own = CountedSave(name="step-140", step=140, persisted=Persisted(4, 4.0, 100), at=9.0)
    older = CountedSave(name="step-100", step=100, persisted=Persisted(0, 0.0, 100), at=10.0)
    assert count_from(own, [older], 150) is own
    assert count_from(own, [older], 110) is older
    assert count_from(own, [older], 20) is own
    assert count_from(None, [older], 20) is None
    assert count_from(own, [older], None) is own
    assert count_from(None, [older], None) is older


def test_a_policy_of_both_persists_at_whichever_comes_first() -> None:
    both = Persist(saves=3, seconds=10.0)
    assert _persisted(both, [0.0, 1, 2, 3, 14, 15, 16, 17]) == [0, 3, 4, 7]


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        *(
            (make, n)
            for make in (every_n_saves, every_n_steps)
            for n in (0, -1, 1.5, True, "2", None)
        ),
        *((every_seconds, seconds) for seconds in (0, -1, float("nan"), "10", None, True)),
        *((persist_policy, persist) for persist in (1, 0, None, "yes", every_n_saves)),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Callable[[Any], object], bad: object) -> None:
    with pytest.raises(ConfigError, match=make.__name__.removesuffix("_policy")):
        make(bad)
