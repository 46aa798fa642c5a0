"""The order of a job's checkpoints: by numbers that the ranks agree on, whatever clocks say."""

import itertools
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dcp_mem.policy.admission import retire
from dcp_mem.policy.election import FoundCheckpoint, elect
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.order import (
    UNNUMBERED,
    Place,
    SaveNumber,
    contradiction,
    is_newer,
    newest_first,
    next_number,
    raised,
)
from dcp_mem.policy.retention import keep_last, leaving

NUMBERS = st.builds(SaveNumber, st.integers(1, 3), st.integers(1, 3))
PLACES = st.lists(
    st.one_of(
        st.builds(
            Place,
            number=NUMBERS,
            run=st.sampled_from(["", "a", "b"]),
            time=st.floats(0, 9),
            stored_at=st.sampled_from([0.0, 1.0, 2.0, 3.0]),
        ),
        st.builds(
            Place,
            number=st.just(UNNUMBERED),
            time=st.sampled_from([1.0, 2.0, 3.0]),
            stored_at=st.sampled_from([0.0, 1.0, 2.0, 3.0]),
            is_foreign=st.booleans(),
        ),
    ),
    max_size=7,
).map(lambda places: [replace(one, key=(str(index),)) for index, one in enumerate(places)])


def _names(places: list[Place]) -> list[str]:
    return [one.key[0] for one in newest_first(places, lambda one: one)]


# -- the comparison --------------------------------------------------------------------------------


@given(PLACES, st.data())
def test_the_order_does_not_depend_on_how_checkpoints_were_found(
    places: list[Place], data: st.DataObject
) -> None:
    assert _names(data.draw(st.permutations(places))) == _names(places)


@given(PLACES, st.lists(st.floats(0, 2e10), min_size=7, max_size=7))
def test_clocks_say_nothing_about_numbered_checkpoints(
    places: list[Place], times: list[float]
) -> None:
    numbered = [one for one in places if one.number.generation]
    skewed = [replace(one, time=time) for one, time in zip(numbered, times, strict=False)]
    assert _names(skewed) == _names(numbered)


@given(PLACES)
def test_the_greater_number_is_newer_once_generations_are_raised(places: list[Place]) -> None:
    generations = raised(places)
    ordered = newest_first([one for one in places if one.number.generation], lambda one: one)
    numbers = [
        (max(one.number.generation, generations.get(one.run, 0)), one.number.count)
        for one in ordered
    ]
    assert numbers == sorted(numbers, reverse=True)


@given(NUMBERS | st.just(UNNUMBERED), st.integers(0, 5))
def test_the_next_number_is_greater_than_all_that_is_known(
    known: SaveNumber, generation: int
) -> None:
    assert next_number(known, generation) > known
    assert SaveNumber.unpacked(known.packed) == known


def test_what_an_older_dcp_mem_saved_is_older_and_goes_by_its_times() -> None:
    old = [Place(number=UNNUMBERED, time=float(age), key=(f"old-{age}",)) for age in (1, 3, 2)]
    new = Place(number=SaveNumber(1, 1), time=0.0, key=("new",))
    assert _names([*old, new]) == ["new", "old-3", "old-2", "old-1"]


def test_what_another_writer_put_comes_behind_what_storage_had_then() -> None:
    """By the storage's own clock; memory's checkpoints have no time of it."""
    ours = [
        Place(number=SaveNumber(1, count), stored_at=stored_at, key=(f"ours-{count}",))
        for count, stored_at in ((1, 10.0), (2, 20.0), (3, 0.0))
    ]
    torchs = [
        Place(number=UNNUMBERED, time=at, stored_at=at, is_foreign=True, key=(f"torch-{int(at)}",))
        for at in (5.0, 15.0, 25.0)
    ]
    expected = ["ours-3", "torch-25", "ours-2", "torch-15", "ours-1", "torch-5"]
    assert _names([*ours, *torchs]) == expected


def test_a_checkpoint_without_any_time_is_the_oldest() -> None:
    silent = Place(number=UNNUMBERED, is_foreign=True, key=("torch",))
    ours = Place(number=SaveNumber(1, 1), stored_at=9.0, key=("ours",))
    assert _names([silent, ours]) == ["ours", "torch"]


def test_a_run_that_learnt_its_generation_late_is_newer_with_all_its_saves() -> None:
    before = Place(number=SaveNumber(7, 9), run="a", key=("before",))
    early = Place(number=SaveNumber(1, 1), run="b", key=("early",))
    late = Place(number=SaveNumber(8, 2), run="b", key=("late",))
    assert _names([before, early, late]) == ["late", "early", "before"]
    assert is_newer(late, before)
    assert not is_newer(before, late)


# -- steps that contradict -------------------------------------------------------------------------


def test_a_newest_with_an_older_step_is_a_contradiction() -> None:
    newest = Place(number=SaveNumber(2, 1), step=3, key=("step-3", "aa"))
    older = [
        Place(number=SaveNumber(1, step), step=step, key=(f"step-{step}", "bb"))
        for step in (1, 2, 5, 6)
    ]
    assert contradiction(newest, older) == (
        "step-3 (step 3) is the newest by the job's order, but step-6 has a later step (6), "
        "and 1 more"
    )
    assert contradiction(newest, older[:2]) == ""
    assert contradiction(replace(newest, step=None), older) == ""
    assert contradiction(newest, [replace(one, step=None) for one in older]) == ""


# -- nodes with clocks of their own ----------------------------------------------------------------


@dataclass
class _Node:
    clock: float
    memory: dict[int, Place] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)

    def newest(self) -> SaveNumber:
        claimed = (SaveNumber(generation) for generation in self.claims.values())
        numbers = (
            max(one.number, SaveNumber(self.claims.get(one.run, 0), one.number.count))
            for one in self.memory.values()
        )
        return max([*numbers, *claimed], default=UNNUMBERED)


class Job(RuleBasedStateMachine):
    """A job on nodes whose clocks are skewed, jump and stand still; nodes are lost and come back.

    Steps only grow, so the step says which of two checkpoints is newer. After a loss the run may
    not know what storage has: then storage's claim raises its generation.
    """

    @initialize(skews=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=3))
    def start(self, skews: list[float]) -> None:
        self.nodes = [_Node(1e9 + skew) for skew in skews]
        self.storage: dict[int, Place] = {}
        self.claimed: list[str] = []  # the run of each generation, from 1 on
        self.step = 0
        self.runs = itertools.count()
        self.restart(loads=True)

    @rule(loads=st.booleans())
    def restart(self, loads: bool) -> None:
        """A run begins; it loads the newest, or begins anew where memory has nothing."""
        self.run, self.generation, self.known = f"run{next(self.runs)}", 0, UNNUMBERED
        if loads or any(node.memory for node in self.nodes):
            places = [*self._places().values()]
            self.known = max((place.number for place in places), default=UNNUMBERED)

    @rule(lost=st.integers(0, 2), clock=st.floats(0, 2e9))
    def lose(self, lost: int, clock: float) -> None:
        """A node is lost, and another one takes its place, whose clock says something else."""
        self.nodes[lost % len(self.nodes)] = _Node(clock)
        self.restart(loads=True)

    @rule(node=st.integers(0, 2), jump=st.floats(-1e6, 1e6))
    def jump(self, node: int, jump: float) -> None:
        self.nodes[node % len(self.nodes)].clock += jump

    @rule(stored=st.booleans(), keep=st.integers(1, 3))
    def save(self, stored: bool, keep: int) -> None:
        self.step += 1
        known = max([self.known, *(node.newest() for node in self.nodes)])
        claimed = max(node.claims.get(self.run, 0) for node in self.nodes[:1])
        generation = max(self.generation, claimed) if self.generation else 0
        number = next_number(known, generation)
        self.known, self.generation = number, number.generation
        place = Place(
            number=number,
            run=self.run,
            time=self.nodes[0].clock,
            step=self.step,
            key=(str(self.step),),
        )
        for node in self.nodes:
            node.memory[self.step] = place
            facts = [_facts(step, one, node) for step, one in node.memory.items()]
            for key in retire(facts, keep):
                del node.memory[int(key)]
        self._claim(place)
        if stored:
            self._store(place, keep)

    def _claim(self, place: Place) -> None:
        """The agent of the first node claims a generation for the run."""
        if self.run not in self.nodes[0].claims or (
            self.nodes[0].claims[self.run] < place.number.generation
        ):
            while len(self.claimed) + 1 < place.number.generation:
                self.claimed.append("")
            self.claimed.append(self.run)
            self.nodes[0].claims[self.run] = len(self.claimed)

    def _store(self, place: Place, keep: int) -> None:
        """The agent of the first node commits."""
        generation = self.nodes[0].claims[self.run]
        stored = replace(place, number=SaveNumber(generation, place.number.count))
        self.storage[self.step] = stored
        facts = [_facts(step, one) for step, one in self.storage.items()]
        for one in leaving(keep_last(keep), facts):
            del self.storage[int(one.key)]

    @invariant()
    def the_newest_is_elected(self) -> None:
        """Of all that is left, whoever may look for it."""
        left = {*self.storage, *(step for node in self.nodes for step in node.memory)}
        inventories = [
            [_found(step, _facts(step, one, node).place) for step, one in node.memory.items()]
            for node in self.nodes
        ]
        everywhere = set.intersection(*(set(node.memory) for node in self.nodes))
        stored = [_found(step, one) for step, one in self.storage.items()]
        plan = elect(inventories, stored)
        loadable = everywhere | set(self.storage)
        if loadable:
            assert plan.choices[0].name == str(max(loadable)), (left, plan.choices)

    def _places(self) -> dict[int, Place]:
        found = {step: one for node in self.nodes for step, one in node.memory.items()}
        return {**found, **self.storage}


def _facts(step: int, place: Place, node: _Node | None = None) -> CheckpointFacts:
    claimed = 0 if node is None else node.claims.get(place.run, 0)
    number = SaveNumber(max(place.number.generation, claimed), place.number.count)
    return CheckpointFacts(key=str(step), created=place.time, number=number, step=step)


def _found(step: int, place: Place) -> FoundCheckpoint:
    return FoundCheckpoint(name=str(step), save_id=f"{step:08x}", place=place)


TestJob = Job.TestCase
