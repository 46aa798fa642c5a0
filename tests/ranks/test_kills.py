"""A kill at any named point loses at most the checkpoint being staged, and never mixes two."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from _pytest.mark.structures import ParameterSet

import dcp_mem
from dcp_mem.common import faults
from dcp_mem.flushing import agent, agent_handle
from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration
from dcp_mem.format import names
from dcp_mem.memory import locks, slots
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.slots import SlotPool
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.posix_upload import PosixUpload
from tests.support.checkpoints.plans import SAVES
from tests.support.processes.kill_targets import (
    OVERLAPPED,
    ROAD,
    CallFailed,
    Line,
    Loaded,
    Place,
    Restarted,
    agents_of,
    flush_in_armed_thread,
    forked,
    full_state,
    kill_agents,
    load_all,
    name_of,
    outlive_agent,
    restart,
    save,
    save_all,
    save_armed,
    save_for_mortal_agent,
    slots_in,
    stock_steps,
    wait_for,
    wait_until_durable,
)
from tests.support.variants import VARIANT, with_variants

SAVE_POINTS = [
    point for point in faults.POINTS if point.startswith(("save.", "stage.", "complete."))
]
FLUSH_POINTS = [point for point in faults.POINTS if point.startswith("flush.")]
LEADER_POINTS = ["complete.catalog", "complete.manifest", "complete.evicted", "save.finished"]
"""Points that only a node's leader passes; the last one all ranks, unless torch plans."""
AFTER_THE_VOTE = ("complete.evicted", "save.finished")
"""Points where every rank knows that the checkpoint is complete, and may go on without the others.

With torch's planner, the ranks part later.
"""
OVERLAP_POINTS = [point for point in faults.POINTS if point.startswith("overlap.")]
OF_BOTH = [point for point in SAVE_POINTS if point not in LEADER_POINTS]
COMPLETE_FROM = SAVE_POINTS.index("complete.manifest")
MOMENTS = ["stage.copying", "stage.sealed", "complete.manifest"]
"""While the new checkpoint is a part, is whole in one process, and is complete.
"""
OF_DCP = ("dcp.save", "torch's planner")


def on(roads: Sequence[str], point: str, shift: int = 0) -> dict[str, str]:
    """Return the environment of one road: points that follow each other take roads in turn."""
    return {ROAD: roads[(SAVE_POINTS.index(point) + shift) % len(roads)]}


def test_every_fault_point_of_the_package_is_listed_and_every_listed_one_exists() -> None:
    package = Path(dcp_mem.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if path.name != "faults.py"]
    passed = re.findall(r'faults\.point\(\s*"([^"]+)"', "\n".join(sources))
    asked = re.findall(r'faults\.is_armed\(\s*"([^"]+)"', "\n".join(sources))
    assert sorted(set(passed)) == sorted(faults.POINTS)  # both roads of a save pass save.finished
    assert set(asked) <= set(faults.POINTS)
    assert len(re.findall(r"faults\.(?:point|is_armed)\(", "\n".join(sources))) == len(
        passed
    ) + len(asked)


# -- save, seal, completion ------------------------------------------------------------------------


def newest_after(point: str) -> int:
    """The step that has to be the newest one after a kill at a point of save 3."""
    return 3 if point in SAVE_POINTS[COMPLETE_FROM:] else 2


def check_memory(place: Place, world_size: int | None, newest: set[int]) -> None:
    """Check that memory has one of `newest`, the steps before it that `keep` keeps, and no more."""
    other_size = 2 if world_size is None else None
    for size in (world_size, other_size):
        ranks = forked(
            load_all, size, place, [None, name_of(3), name_of(2), name_of(1)], False
        ).join()
        assert all(found == ranks[0] for found in ranks)
        found, third, second, first = ranks[0]
        assert isinstance(found, Loaded), found
        assert found.step in newest
        assert isinstance(third, Loaded) == (found.step == 3), third
        assert second == Loaded(2, name_of(2), "memory")
        assert isinstance(first, Loaded) or found.step == 3, first
        for loaded in (found, third, second, first):
            assert isinstance(loaded, str) or (loaded.name, loaded.source) == (
                name_of(loaded.step),
                "memory",
            )
    stock = stock_steps(Path(place.root) / place.job)
    assert all(name == name_of(step) for name, step in stock.items())


def check_restart(place: Place, world_size: int | None, newest: set[int]) -> None:
    """A restarted job resumes, saves on, and takes no more memory than `keep` + 1 checkpoints."""
    size = world_size or 1
    for restarted in forked(restart, world_size, place).join():
        assert isinstance(restarted, Restarted)
        assert restarted.resumed in newest
        assert restarted.slots <= (place.keep + 1) * size
    assert slots_in(place) == place.keep * size


class Kill(NamedTuple):
    """A kill of one rank, of one or two, at a point of save 3."""

    road: str
    world_size: int | None
    point: str
    rank: int = 0

    @property
    def env(self) -> dict[str, str]:
        if self.road == "dcp":
            return on(OF_DCP, self.point, shift=(self.world_size or 1) - 1 - self.rank)
        return {OVERLAPPED: "1"} if self.road == "async" else {ROAD: "dcp_mem.save"}


def kills() -> Iterator[ParameterSet]:
    """On each road each point; the gate has each point once on two ranks, and some on one."""
    for road in ("dcp", "dcp_mem", "async"):
        more = OVERLAP_POINTS if road == "async" else []
        for number, point in enumerate([*SAVE_POINTS, *more]):
            lone = [*more, "complete.manifest"] if more else MOMENTS
            yield pytest.param(Kill(road, None, point), marks=[] if point in lone else VARIANT)
            for rank in (0, 1) if point in (*OF_BOTH, *more) else (0,):
                in_gate = rank == number % 2 or point in LEADER_POINTS
                yield pytest.param(Kill(road, 2, point, rank), marks=[] if in_gate else VARIANT)


@pytest.mark.parametrize("kill", list(kills()), ids=str)
def test_kill_of_a_rank_leaves_the_staged_checkpoint_or_the_previous_one(
    kill: Kill, memory_root: Path
) -> None:
    place = Place(str(memory_root))
    armed = {kill.rank: f"{kill.point}:kill:1"}
    outcomes = forked(save_armed, kill.world_size, place, [1, 2], 3, armed, env=kill.env).join(
        killed={kill.rank}
    )
    # Rank 1 is not needed any more once it has told that it sealed: then rank 0 may or may not have
    # heard it.
    is_told = (kill.point, kill.rank) == ("complete.receipts", 1)
    newest = {2, 3} if is_told else {newest_after(kill.point)}
    for error in outcomes[: kill.rank] + outcomes[kill.rank + 1 :]:
        if kill.point not in AFTER_THE_VOTE:
            assert error, "the save returned where a rank was killed in it"
        if kill.road == "dcp_mem" and not error:
            newest = {3}  # no collective of DCP follows ours there
    check_memory(place, kill.world_size, newest)
    check_restart(place, kill.world_size, newest)


@pytest.mark.parametrize("point", with_variants(SAVE_POINTS, gate=SAVE_POINTS[::2]))
def test_kill_of_all_ranks_leaves_the_staged_checkpoint_or_the_previous_one(
    point: str, memory_root: Path
) -> None:
    place = Place(str(memory_root))
    passed_by_both = [*OF_BOTH, "save.finished"]  # the latter on the road that it takes here
    armed = dict.fromkeys(range(2 if point in passed_by_both else 1), f"{point}:stop:1")
    ranks = forked(save_armed, 2, place, [1, 2], 3, armed, env=on(tuple(SAVES), point))
    for rank in armed:
        ranks.wait_until_stopped(rank)
    for rank in (1, 0):  # rank 0 is stopped, and can't end by itself when it loses the other one
        ranks.send(rank, signal.SIGKILL)
    ranks.join(killed={0, 1})
    check_memory(place, 2, {newest_after(point)})
    check_restart(place, 2, {newest_after(point)})


@pytest.mark.parametrize("point", SAVE_POINTS)
@pytest.mark.parametrize("world_size", [None, 2])
def test_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(
    world_size: int | None, point: str, memory_root: Path
) -> None:
    place = Place(str(memory_root), keep=1)
    forked(save_all, world_size, place, [2], "best").join()
    env = on(tuple(SAVES), point, shift=world_size or 1)
    forked(save_armed, world_size, place, [], 3, {0: f"{point}:kill:1"}, "best", env=env).join(
        killed={0}
    )
    for size in (world_size, 2 if world_size is None else None):
        for found in forked(load_all, size, place, [None, "best"]).join():
            assert found == [Loaded(newest_after(point), "best", "memory")] * 2
    # Its `.metadata` is made behind the save: until the next one, torch's own readers see the old
    # one, the new one, or none.
    assert (
        stock_steps(memory_root / place.job).items()
        <= {"best": 2}.items() | {"best": newest_after(point)}.items()
    )
    forked(save_all, world_size, place, [4, 5, 6, 7], "best").join()
    assert stock_steps(memory_root / place.job) == {"best": 7}
    assert slots_in(place) <= (place.keep + 1) * (world_size or 1)
    assert forked(load_all, None, place, ["best"]).join()[0] == [Loaded(7, "best", "memory")]


@pytest.mark.parametrize(
    "kill",
    [
        *(
            pytest.param(Kill("", 2, point, rank), marks=[] if rank == number % 2 else VARIANT)
            for number, point in enumerate(SAVE_POINTS)
            for rank in ((0, 1) if point != "save.finished" else (0,))
        ),
        Kill("async", 2, "overlap.begun", 0),
        Kill("async", 2, "overlap.copied", 1),
        Kill("async", 2, "stage.sealed", 1),
        Kill("async", 2, "complete.receipts", 1),
        Kill("async", 2, "complete.catalog", 0),
        Kill("async", 2, "complete.catalog", 1),
        Kill("async", 2, "complete.manifest", 0),
    ],
    ids=str,
)
def test_kill_on_one_of_two_nodes_leaves_both_with_the_same_whole_checkpoint(
    kill: Kill, memory_root: Path
) -> None:
    """Each rank has its own memory root, and keeps one checkpoint there: the tightest case."""
    place = two_nodes(memory_root, keep=1)
    env = kill.env if kill.road else on(tuple(SAVES), kill.point, shift=kill.rank)
    armed = {kill.rank: f"{kill.point}:kill:1"}
    forked(save_armed, 2, place, [1, 2], 3, armed, env=env).join(killed={kill.rank})
    on_first, on_second = (held_on(root, place.job) for root in place.roots)
    assert on_first & on_second, (on_first, on_second)
    forked(save_all, 2, place, [4, 5, 6]).join()
    for root in place.roots:
        assert slots_in(Place(root)) <= place.keep + 1
        assert {name for name, _ in held_on(root, place.job)} == {name_of(6)}


def held_on(root: str, job: str) -> set[tuple[str, str]]:
    """Return (name, save id) of each complete checkpoint on a node; check that it is whole."""
    memory = JobMemory(root, job)
    found = set()
    for held in memory.checkpoints():
        assert held.manifest.of_node(memory.node)
        for segment in held.manifest.of_node(memory.node):
            assert Path(held.segment_path(segment.file)).stat().st_size >= segment.nbytes
        found.add((held.name, held.manifest.save_id))
    return found


def two_nodes(memory_root: Path, path: Path | None = None, keep: int = 2) -> Place:
    roots = [memory_root / "node0", memory_root / "node1"]
    for root in roots:
        root.mkdir(mode=0o700)
    return Place(
        str(roots[0]), None if path is None else str(path), keep=keep, roots=tuple(map(str, roots))
    )


def test_kill_before_the_new_metadata_is_shown_is_made_good_by_the_next_save(
    memory_root: Path,
) -> None:
    place = Place(str(memory_root))
    forked(save_all, None, place, [1], "best").join()
    forked(save_armed, None, place, [], 2, {0: "complete.manifest:kill:1"}, "best").join(killed={0})
    # It is whole, although it isn't the newest.
    assert stock_steps(memory_root / place.job) == {"best": 1}
    forked(save_all, None, place, [3]).join()
    assert stock_steps(memory_root / place.job) == {"best": 2, name_of(3): 3}


def test_kill_while_finish_replaces_the_metadata_leaves_the_checkpoint_whole(
    memory_root: Path,
) -> None:
    """A planner may hand over its metadata only to `finish`; then it is published a second time."""
    place = Place(str(memory_root), keep=1)
    forked(save_all, None, place, [1]).join()
    memory = JobMemory(place.root, place.job)
    (held,) = memory.checkpoints()
    own = Path(held.directory, ".dcp_mem")
    other = own / f"catalog-{'0' * 16}"
    # A catalog that no manifest names yet.
    shutil.copy(Path(held.directory, names.catalog_file(held.manifest.catalog)), other)
    assert forked(load_all, None, place, [None]).join()[0] == [Loaded(1, name_of(1), "memory")]
    forked(save_all, None, place, [2]).join()
    assert forked(load_all, None, place, [None]).join()[0] == [Loaded(2, name_of(2), "memory")]
    assert not other.exists()


# -- flush and commit ------------------------------------------------------------------------------


def committed_after(point: str) -> bool:
    """Whether a flush that was killed at a point has committed."""
    return FLUSH_POINTS.index(point) >= FLUSH_POINTS.index("flush.committed")


def check_storage(place: Place, expected: Mapping[str, int], ranks: int = 1) -> None:
    """Check that storage has exactly these checkpoints, whole, and no file of other attempts."""
    assert place.path is not None
    assert stock_steps(place.path) == expected
    for name in expected:
        directory = Path(place.path) / name
        files = sorted(path.name for path in directory.rglob("*") if path.is_file())
        save_ids = {match[1] for file in files if (match := re.search(r"-([0-9a-f]{8})[.-]", file))}
        assert len(save_ids) == 1, files
        # Those beside the segments: .metadata, manifest, catalog, one node's manifest, the ticket.
        assert len(files) == ranks + 5, files


def check_from_storage_alone(place: Place, world_size: int | None, step: int) -> None:
    """With the memory lost, every world size loads the step from storage."""
    shutil.rmtree(Path(place.root) / place.job)
    for size in (world_size, 2 if world_size is None else None):
        for found in forked(load_all, size, place, [None]).join():
            assert found == [Loaded(step, name_of(step), "storage")]


@pytest.mark.parametrize("point", FLUSH_POINTS)
def test_agent_killed_in_a_flush_leaves_it_to_the_agent_that_the_restarted_job_starts(
    point: str, memory_root: Path, tmp_path: Path
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"))
    forked(save_for_mortal_agent, 2, place, 1, f"{point}:kill:1").join()
    wait_for(lambda: not agents_of(memory_root), "the armed agent to be killed")
    assert stock_steps(tmp_path / "storage") == ({name_of(1): 1} if committed_after(point) else {})
    forked(save_all, 2, place, [2], "", True).join()
    forked(wait_until_durable, None, place, [1]).join()
    check_storage(place, {name_of(1): 1, name_of(2): 2}, ranks=2)
    check_from_storage_alone(place, 2, 2)


@pytest.mark.parametrize("point", with_variants(FLUSH_POINTS, gate=FLUSH_POINTS[::3]))
def test_agent_killed_in_a_flush_is_started_again_by_a_trainer_that_waits(
    point: str, memory_root: Path, tmp_path: Path
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"))
    forked(outlive_agent, None, place, 1, f"{point}:kill:1").join()
    check_storage(place, {name_of(1): 1})


@pytest.mark.parametrize("point", with_variants(FLUSH_POINTS, gate=FLUSH_POINTS[1::3]))
def test_trainer_killed_in_its_own_flush_thread_leaves_the_flush_to_its_restart(
    point: str, memory_root: Path, tmp_path: Path
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"), agent="thread")
    forked(flush_in_armed_thread, None, place, [1], 2, f"{point}:kill:1").join(killed={0})
    expected = {name_of(1): 1, name_of(2): 2} if committed_after(point) else {name_of(1): 1}
    assert stock_steps(tmp_path / "storage") == expected
    (found,) = forked(load_all, None, place, [None], False).join()[0]
    assert found == Loaded(2, name_of(2), "memory")
    forked(save_all, None, place, [3]).join()
    check_storage(place, {name_of(1): 1, name_of(2): 2, name_of(3): 3})
    assert agents_of(memory_root) == []


@pytest.mark.parametrize("point", with_variants(FLUSH_POINTS, gate=FLUSH_POINTS[::2]))
def test_kill_while_a_durable_checkpoint_is_replaced_leaves_the_old_or_the_new_one(
    point: str, memory_root: Path, tmp_path: Path
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"), agent="thread")
    forked(flush_in_armed_thread, None, place, [1], 2, f"{point}:kill:1", "best").join(killed={0})
    stored = 2 if committed_after(point) else 1
    assert stock_steps(tmp_path / "storage") == {"best": stored}
    (newest, named) = forked(load_all, None, place, [None, "best"]).join()[0]
    assert newest == named == Loaded(2, "best", "memory")
    aside = Path(place.root) / "aside"
    (memory_root / place.job).rename(aside)
    (newest, named) = forked(load_all, None, place, [None, "best"]).join()[0]
    assert newest == named == Loaded(stored, "best", "storage")
    aside.rename(memory_root / place.job)
    forked(save_all, None, place, [3]).join()
    check_storage(place, {"best": 2, name_of(3): 3})


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        (point, rank)
        for point in FLUSH_POINTS
        for rank in (0, 1)
        # Only the committing node passes these.
        if rank == 0 or point not in ("flush.manifest", "flush.commit", "flush.committed")
    ],
)
def test_agent_killed_on_one_of_two_nodes_leaves_its_part_to_the_next_agent(
    point: str, rank: int, memory_root: Path, tmp_path: Path
) -> None:
    place = two_nodes(memory_root, tmp_path / "storage")
    forked(save_for_mortal_agent, 2, place, 1, f"{point}:kill:1", "", rank).join()
    wait_for(lambda: not agents_of(place.roots[rank]), "the armed agent to be killed")
    assert stock_steps(tmp_path / "storage") in ({}, {name_of(1): 1})
    forked(save_all, 2, place, [2], "", True).join()
    wait_for(
        lambda: name_of(1) in stock_steps(tmp_path / "storage"),
        "the older checkpoint to be committed as well",
    )
    assert stock_steps(tmp_path / "storage") == {name_of(1): 1, name_of(2): 2}
    for found in forked(load_all, 2, place, [None, name_of(1)]).join():
        assert [one.step for one in found] == [2, 1]


# -- agents and trainers come and go ---------------------------------------------------------------


def test_agent_killed_while_idle_is_started_again_by_the_next_save(
    memory_root: Path, tmp_path: Path
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"))
    with Line(place) as trainer:
        trainer.call("save", 1)
        trainer.call("wait", name_of(1))
        (first,) = agents_of(memory_root)
        kill_agents(memory_root)
        trainer.call("save", 2)
        wait_for(lambda: name_of(2) in stock_steps(tmp_path / "storage"), "the new agent to flush")
        (second,) = agents_of(memory_root)
        assert second.pid != first.pid


def test_agent_killed_at_work_is_started_again_by_a_trainer_that_closes(
    memory_root: Path, tmp_path: Path
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"))
    with Line(place) as trainer:
        trainer.call("export", {"DCP_MEM_FAULTS": "flush.segments:stop:1"})
        trainer.call("save", 1)
        trainer.call("export", {"DCP_MEM_FAULTS": ""})
        (first,) = agents_of(memory_root)
        wait_for(lambda: first.status() == psutil.STATUS_STOPPED, "the agent to come to the point")
        first.kill()
        trainer.call("close")
    check_storage(place, {name_of(1): 1})


def test_sigterm_to_the_trainer_does_not_lose_the_flush(memory_root: Path, tmp_path: Path) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"))
    with Line(place) as trainer:
        trainer.call("export", {"DCP_MEM_FAULTS": "flush.started:stop:1"})
        trainer.call("save", 1)
        (flusher,) = agents_of(memory_root)
        wait_for(
            lambda: flusher.status() == psutil.STATUS_STOPPED, "the agent to come to the point"
        )
        # A launcher signals everything that the job has started.
        os.killpg(trainer.process.pid(), signal.SIGTERM)
        wait_for(lambda: not trainer.process.is_running(0), "the trainer to end")
    assert stock_steps(tmp_path / "storage") == {}
    flusher.send_signal(signal.SIGTERM)  # a scheduler tells every process of the node
    flusher.send_signal(signal.SIGCONT)
    wait_for(lambda: stock_steps(tmp_path / "storage") == {name_of(1): 1}, "the flush")
    wait_for(lambda: agents_of(memory_root) == [], "the agent to end once nothing is left to do")
    check_from_storage_alone(place, None, 1)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_process_that_just_ends_loses_nothing(kind: str, memory_root: Path, tmp_path: Path) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"), agent=kind)
    forked(save_all, 2, place, [1, 2]).join()
    for found in forked(load_all, 2, place, [None, name_of(1)], False).join():
        assert found == [Loaded(2, name_of(2), "memory"), Loaded(1, name_of(1), "memory")]
    wait_for(
        lambda: stock_steps(tmp_path / "storage") == {name_of(1): 1, name_of(2): 2},
        "both to be flushed",
    )
    check_from_storage_alone(place, 2, 2)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_wait_in_a_process_that_saves_nothing_has_the_rest_flushed(
    kind: str, memory_root: Path, tmp_path: Path
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"), agent=kind)
    if kind == "process":
        forked(save_for_mortal_agent, None, place, 1, "flush.started:kill:1").join()
        wait_for(lambda: agents_of(memory_root) == [], "the agent to be killed")
    else:
        forked(flush_in_armed_thread, None, place, [], 1, "flush.started:kill:1").join(killed={0})
    forked(wait_until_durable, None, place, [1]).join()
    check_storage(place, {name_of(1): 1})


def _save_and_stay(place: Place, go: Path) -> None:
    """Save one step, and keep running until told: an agent lives as long as a trainer does."""
    writer = place.writer()
    save(writer, 1)
    writer.wait(name_of(1), timeout=60)
    wait_for(go.exists, "the test to have looked")


def test_many_processes_that_wake_the_agent_at_once_have_one(
    memory_root: Path, tmp_path: Path
) -> None:
    places = [
        Place(str(memory_root), str(tmp_path / f"storage{number}"), job=f"job{number}")
        for number in range(4)
    ]
    processes = [forked(_save_and_stay, 2, place, tmp_path / "go") for place in places]
    wait_for(
        lambda: all(Path(str(place.path), name_of(1), ".metadata").exists() for place in places),
        "the flushes",
    )
    wait_for(lambda: len(agents_of(memory_root)) == 1, "all agents but one to end")
    (serving,) = agents_of(memory_root)
    log = Path(agent_handle.log_path(str(memory_root))).read_text()
    assert re.findall(r"agent (\d+) serves", log) == [str(serving.pid)]
    (tmp_path / "go").touch()
    for process in processes:
        process.join()
    for place in places:
        check_storage(place, {name_of(1): 1}, ranks=2)


def test_agent_that_meets_one_about_to_end_takes_its_place(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(memory_root), str(tmp_path / "storage"))
    forked(save_for_mortal_agent, None, place, 1, "flush.started:kill:1").join()
    wait_for(lambda: agents_of(memory_root) == [], "the agent to be killed")
    ending = os.open(memory_root / ".agent" / "lock", os.O_RDWR)
    wait_for(lambda: locks.try_lease(ending, exclusive=True), "the killed agent's lock to be free")

    def end_without_an_answer(*_: object) -> bytes:
        locks.end_lease(ending)
        return b""

    monkeypatch.setattr(agent, "send", end_without_an_answer)
    monkeypatch.setattr(agent, "_LINGER", 0.0)
    agent.run(str(memory_root), Registration(job=place.job, url=str(place.path), overwrite=True))
    os.close(ending)
    check_storage(place, {name_of(1): 1})


def test_two_flushers_never_work_on_one_checkpoint(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example two ranks' flush threads: they would upload the same objects twice."""
    place = Place(str(memory_root), str(tmp_path / "storage"))
    forked(save_for_mortal_agent, None, place, 1, "flush.started:kill:1").join()
    wait_for(lambda: agents_of(memory_root) == [], "the agent to be killed")
    (held,) = JobMemory(str(memory_root), place.job).checkpoints()
    wait_for(lambda: not locks.is_leased(held.manifest_path), "the killed agent's lease to end")
    uploads: list[str] = []
    at_work, go_on, upload = threading.Event(), threading.Event(), PosixStorage.upload

    def upload_slowly(storage: PosixStorage, key: str, nbytes: int, source: object) -> PosixUpload:
        uploads.append(key)
        at_work.set()
        assert go_on.wait(30)
        return upload(storage, key, nbytes)

    monkeypatch.setattr(PosixStorage, "upload", upload_slowly)
    registration = Registration(job=place.job, url=str(place.path), overwrite=True)
    first, second = (JobFlusher(str(memory_root), registration) for _ in range(2))
    working = threading.Thread(target=first.flush_next)
    working.start()
    assert at_work.wait(30)
    second.flush_next()
    go_on.set()
    working.join()
    assert len(uploads) == 1
    assert not second.due_times()
    check_storage(place, {name_of(1): 1})


@pytest.mark.parametrize(
    "point",
    with_variants(
        ["stage.claimed", "stage.copying", "stage.sealed", "complete.catalog"],
        gate=["stage.copying", "complete.catalog"],
    ),
)
def test_stopped_trainer_and_its_restart_never_share_a_slot(point: str, memory_root: Path) -> None:
    place = Place(str(memory_root), keep=1)
    with Line(place) as old, Line(place) as new:
        for step in (1, 2):
            old.call("save", step)
        old.call("arm", f"{point}:stop:1")
        old.begin("save", 3)
        old.process.wait_until_stopped(0)
        assert new.call("load").step == 2
        for step in range(3, 9):
            new.call("save", step + 100, name_of(step))
            assert new.call("load") == Loaded(step + 100, name_of(step), "memory")
        assert slots_in(place) <= (place.keep + 1) * 2  # each of the two holds its own
        old.process.send(0, signal.SIGCONT)
        old.end()  # it saves an old step under an old name, which is whole all the same
        assert new.call("load", name_of(8)).step == 108
        assert (
            stock_steps(memory_root / place.job).items() <= {name_of(8): 108, name_of(3): 3}.items()
        )
        for step in range(9, 12):
            old.call("save", step + 200, f"old-{step}")
            new.call("save", step + 100, name_of(step))
            assert new.call("load", name_of(step)).step == step + 100
            assert old.call("load").step == step + 100
        assert set(stock_steps(memory_root / place.job).values()) <= {111, 211}


def test_kill_in_the_middle_of_a_copy_really_leaves_a_mix_in_a_slot_that_nobody_reads(
    memory_root: Path,
) -> None:
    place = Place(str(memory_root))
    forked(save_armed, None, place, [1, 2], 3, {0: "stage.copying:kill:1"}).join(killed={0})
    (slot,) = (memory_root / place.job / ".slots").iterdir()
    raw = slot.read_bytes()
    state = full_state(3)
    copied = [
        name for name, value in state.items() if name != "note" and value.numpy().tobytes() in raw
    ]
    assert 0 < len(copied) < len(state) - 1
    check_memory(place, None, {2})


@pytest.mark.parametrize("point", ["complete.receipts", "complete.catalog", "complete.manifest"])
def test_rank_that_is_ahead_of_its_leader_reserves_no_slot_too_many(
    point: str, memory_root: Path
) -> None:
    place = Place(str(memory_root))
    ranks = forked(save_armed, 2, place, [1, 2, 3], 4, {0: f"{point}:stop:1"})
    ranks.wait_until_stopped(0)
    ranks.send(0, signal.SIGCONT)
    ranks.join()
    assert slots_in(place) <= (place.keep + 1) * 2


@pytest.mark.parametrize("sizes", [(2, None, 2, None), (None, 2, None, 2)])
def test_restarts_in_other_world_sizes_stay_within_the_memory(
    sizes: tuple[int | None, ...], memory_root: Path
) -> None:
    place = Place(str(memory_root))
    forked(save_all, sizes[0], place, [1, 2, 3]).join()
    for size in sizes[1:]:
        for restarted in forked(restart, size, place, 6).join():
            assert restarted.slots <= (place.keep + 1) * 2


@pytest.mark.parametrize("length", [0, 1000])
def test_damaged_checkpoint_that_a_load_passed_over_can_leave_memory(
    length: int, memory_root: Path
) -> None:
    place = Place(str(memory_root), keep=1)
    forked(save_all, None, place, [1]).join()
    (segment,) = (memory_root / place.job / name_of(1)).glob("*.distcp")
    os.truncate(segment, length)
    with Line(place) as trainer:
        with pytest.raises(CallFailed, match=f"{length} of .* bytes"):
            trainer.call("load")
        for step in (2, 3, 4):
            trainer.call("save", step)
            assert {name for name, _ in held_on(place.root, place.job)} == {name_of(step)}
            assert trainer.call("load").step == step


# -- slots that several processes reach for --------------------------------------------------------


def free_slot(directory: Path) -> str:
    """Name of a free slot that no process holds."""
    (directory / ".slots").mkdir(mode=0o700)
    pool = SlotPool(str(directory / ".slots"))
    pool.abandon(pool.claim(4096, ""))
    pool.close(keep_free=True)
    (entry,) = (directory / ".slots").iterdir()
    return entry.name


def take_fill_and_end(directory: Path) -> None:
    """What another process does with the free slot: a whole checkpoint, after which it ends."""
    pool = SlotPool(str(directory / ".slots"))
    slot = pool.claim(4096, "")
    slot.write_at(0, b"saved")
    pool.seal(slot, str(directory / "segment"))
    pool.close(keep_free=True)


def before_lease(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `act` happen just before a slot's lease is asked for the `number`-th time."""
    asked, original = itertools.count(1), locks.try_lease

    def try_lease(descriptor: int, *, exclusive: bool) -> bool:
        if next(asked) == number:
            act()
        return original(descriptor, exclusive=exclusive)

    for module in (slots, locks):
        monkeypatch.setattr(module, "try_lease", try_lease)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_slot_that_became_a_segment_while_it_was_reached_for_is_not_written(
    number: int, memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_slot(memory_root)
    before_lease(number, lambda: take_fill_and_end(memory_root), monkeypatch)
    pool = SlotPool(str(memory_root / ".slots"))
    slot = pool.claim(4096, "")
    slot.write_at(0, b"other")
    assert (memory_root / "segment").read_bytes()[:5] == b"saved"
    pool.seal(slot, str(memory_root / "another"))
    pool.close()


def test_slot_lost_to_another_process_is_not_taken_for_one_with_frames(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flock releases a lease before it converts it: meanwhile another process may take the slot."""
    free_slot(memory_root)
    pool, other = SlotPool(str(memory_root / ".slots")), SlotPool(str(memory_root / ".slots"))
    slot = pool.claim(4096, "frames")
    slot.frames = "frames"
    pool.abandon(slot)
    locks.end_lease(slot.descriptor)
    quicker = os.open(slot.path, os.O_RDONLY)
    assert locks.try_lease(quicker, exclusive=True)
    assert pool.claim(4096, "frames") is not slot
    os.close(quicker)
    taken = other.claim(4096, "")
    assert taken.inode == slot.inode
    taken.write_at(0, b"other")
    other.abandon(taken)
    other.close(keep_free=True)
    again = [
        one
        for one in (pool.claim(4096, "frames"), pool.claim(4096, "frames"))
        if one.inode == slot.inode
    ]
    assert [one.frames for one in again] == [""]
    pool.close()


def test_slot_is_nobody_elses_from_the_moment_that_it_exists(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (memory_root / ".slots").mkdir(mode=0o700)
    pool, other = SlotPool(str(memory_root / ".slots")), SlotPool(str(memory_root / ".slots"))
    taken: list[int] = []
    before_lease(1, lambda: taken.append(other.claim(4096, "").inode), monkeypatch)
    slot = pool.claim(4096, "")
    assert taken
    assert slot.inode not in taken
    pool.close()
    other.close()
