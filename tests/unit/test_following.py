"""Which checkpoints a follower may take, and the links by which it holds them."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.links import LinkedCheckpoint, drop_dead_links
from dcp_mem.memory.locks import end_lease
from dcp_mem.policy.admission import Admission, NodeMemory, admit, still_full
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.following import identity, unseen
from dcp_mem.policy.order import Place, SaveNumber
from dcp_mem.policy.redundancy import Redundancy
from tests.support.checkpoints.jobs import Job, load_as_torch, save


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


# -- links ----------------------------------------------------------------------------------------


def test_links_go_with_their_holder_and_dead_ones_with_the_next_save(memory_job: Job) -> None:
    with memory_job.writer(keep_memory=1) as writer:
        save(writer, 1)
        session = writer._saver.open_session()
        memory = session.memory
        (checkpoint,) = memory.checkpoints()
        held, dead = (
            LinkedCheckpoint(memory.links, checkpoint, _segments(checkpoint)) for _ in range(2)
        )
        end_lease(dead.descriptor)  # as the system does for a process that was killed
        save(writer, 2)
        assert not os.path.exists(dead.local.directory)
        assert drop_dead_links(memory.links)
        assert held.is_whole
        held.add_stock_metadata()
        assert load_as_torch(Path(held.local.directory)) == 1
        held.close()
        held.close()
        assert not drop_dead_links(memory.links)


def test_a_file_that_has_a_link_is_no_slot_while_it_has(memory_job: Job) -> None:
    with memory_job.writer(keep_memory=1) as writer:
        save(writer, 1)
        memory = writer._saver.open_session().memory
        (checkpoint,) = memory.checkpoints()
        (segment,) = checkpoint.manifest.segments
        inode = os.stat(checkpoint.segment_path(segment.file)).st_ino
        with LinkedCheckpoint(memory.links, checkpoint, _segments(checkpoint)):
            assert memory.evict(checkpoint)
            assert not memory.checkpoints()
            assert inode not in _slots(memory.slots)
            save(writer, 2)
            (newer,) = memory.checkpoints()
            assert os.stat(newer.segment_path(newer.manifest.segments[0].file)).st_ino != inode


def _segments(checkpoint: LocalCheckpoint) -> list[str]:
    return [segment.file for segment in checkpoint.manifest.segments]


def _slots(directory: str) -> set[int]:
    with os.scandir(directory) as entries:
        return {entry.inode() for entry in entries}


def test_a_checkpoint_that_has_left_can_t_be_linked(memory_job: Job, tmp_path: Path) -> None:
    with memory_job.writer() as writer:
        save(writer, 1)
        memory = writer._saver.open_session().memory
        (checkpoint,) = memory.checkpoints()
        memory.evict(checkpoint)
        links = memory_job.directory / ".links"
        with pytest.raises(FileNotFoundError):
            LinkedCheckpoint(str(links), checkpoint, _segments(checkpoint))
        assert not list(links.iterdir())


def test_a_lease_that_fails_leaves_no_descriptor(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased: list[str] = []

    def share(descriptor: int) -> bool:
        leased.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with memory_job.writer() as writer:
        save(writer, 1)
        (checkpoint,) = writer._saver.open_session().memory.checkpoints()
    monkeypatch.setattr("dcp_mem.memory.links.share", share)
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
        LinkedCheckpoint(str(memory_job.directory / ".links"), checkpoint, [])
    found = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert leased
    assert not set(leased) & set(found)


def test_no_directory_of_links_is_fine(tmp_path: Path) -> None:
    drop_dead_links(str(tmp_path / "none"))
