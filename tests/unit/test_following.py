"""Which checkpoints a follower may take."""

from collections.abc import Sequence
from dataclasses import replace

from dcp_mem.policy.admission import Admission, NodeMemory, admit, still_full
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.following import identity, unseen
from dcp_mem.policy.order import Place, SaveNumber
from dcp_mem.policy.redundancy import Redundancy


def _choice(
    count: int, *, run: str = "", generation: int = 1, **facts: object
) -> ElectedCheckpoint:
    name, save_id = f"step-{count}", f"{generation:04x}{count:04x}"
    place = Place(number=SaveNumber(generation, count), run=run, key=(name, save_id))
    options = {"memory": True, "storage": False} | facts
    return ElectedCheckpoint(name=name, save_id=save_id, place=place, **options)  # type: ignore[arg-type]


def _names(choices: Sequence[ElectedCheckpoint]) -> list[str]:
    return [one.name for one in choices]


def test_at_first_all_that_can_be_loaded_will_do() -> None:
    assert _names(unseen([_choice(3), _choice(2)], None)) == ["step-3", "step-2"]


def test_only_what_is_newer_than_the_last_one_will_do() -> None:
    choices = [_choice(3), _choice(2), _choice(1)]
    assert _names(unseen(choices, choices[1].place)) == ["step-3"]
    assert not unseen(choices, choices[0].place)
    assert not unseen(choices, _choice(9).place)


def test_a_run_that_went_back_makes_new_checkpoints() -> None:
    last = _choice(500)
    assert _names(unseen([_choice(7, generation=2), last], last.place)) == ["step-7"]


def test_a_generation_that_was_raised_since_holds_for_the_last_one_too() -> None:
    """The run's own checkpoints show that it got generation 5; so another run's 4 is older."""
    last = _choice(2, run="a", generation=1)
    choices = [_choice(1, run="a", generation=5), _choice(9, run="b", generation=4)]
    assert not unseen(choices, last.place)


def test_a_save_of_the_same_name_is_another_checkpoint() -> None:
    first, second = (
        ElectedCheckpoint(
            name="newest",
            save_id=save_id,
            place=Place(number=SaveNumber(1, count), key=("newest", save_id)),
            memory=True,
            storage=False,
        )
        for count, save_id in ((1, "aa"), (2, "bb"))
    )
    assert unseen([second], first.place) == [second]


def test_what_is_damaged_in_memory_may_come_from_storage() -> None:
    damaged = {identity(_choice(3))}
    assert not unseen([_choice(3)], None, damaged)
    assert _names(unseen([_choice(3, storage=True)], None, damaged)) == ["step-3"]


def test_only_durable_leaves_out_what_lies_in_memory_alone() -> None:
    choices = [_choice(3), _choice(2, storage=True)]
    assert _names(unseen(choices, None, only_durable=True)) == ["step-2"]


def test_nothing_is_rebuilt_or_copied_for_a_follower() -> None:
    choices = [
        _choice(3, lost={0: ()}),
        _choice(2, lost={0: ()}, storage=True, redundancy=Redundancy(parity=2)),
    ]
    (found,) = unseen(choices, None)
    assert (found.name, found.memory, found.lost) == ("step-2", False, {})
    assert not found.redundancy


def test_a_save_that_lacks_what_followers_hold_may_wait_for_it() -> None:
    """Of two slots within the limit, a follower has one."""
    newest = CheckpointFacts(key="2", created=2.0, number=SaveNumber(1, 2), nbytes=100)
    node = NodeMemory(kept=(newest,), used=200, spare=0, free=1000, limit=200, needed=100)
    assert admit([node], 1).lasting
    assert still_full([node]) is not None
    verdict, late = (
        admit([replace(node, is_lent=True)], 1),
        still_full([replace(node, is_lent=True)]),
    )
    assert (verdict.action, verdict.lasting) == (Admission.FULL, False)
    assert late is not None
    assert not late.lasting
