"""Copies in other nodes' memory, between real processes.

Nodes are memory roots: each rank has the one of its node.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem import CheckpointStatus, ConfigError, MemoryStorageWriter, ReplicationFailed, State
from dcp_mem.comm import job_ranks
from dcp_mem.comm.timed_store import own_connection
from dcp_mem.comm.transfer import CHUNK
from dcp_mem.common import faults
from dcp_mem.common.files import allocated_bytes
from dcp_mem.common.parallel import daemon
from dcp_mem.format import names
from dcp_mem.format.checksums import BlockChecksums, blocks_of
from dcp_mem.format.manifest import NodeManifest
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import is_leased
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.slots import SlotPool
from dcp_mem.replicating import replicator
from dcp_mem.replicating.plan import copies_of
from tests.support.channels import UsedChannel
from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.plans import SAVES
from tests.support.processes import kill_targets
from tests.support.processes.forks import forked_ranks, raised_by

_MOST_ON_A_NODE, _SMALL_FILES = 12 << 20, 1 << 20
"""For three nodes with a segment of 1, 2 and 3 MiB. A slot has 1 MiB in reserve, consists of pages
of 2 MiB, and may have held the largest segment."""
_PATIENCE = {"DCP_MEM_REPLICATION_TIMEOUT": "3"}
POINTS = [
    "replicate.started",
    "replicate.chunk",
    "replicate.received",
    "replicate.sealed",
    "replicate.recorded",
]


@dataclass(frozen=True)
class Cluster:
    """Where the nodes' memory lies, and how many ranks each has."""

    root: str
    ranks_per_node: int = 1

    def memory(self, rank: int) -> str:
        return f"{self.root}/node{rank // self.ranks_per_node}"

    def writer(self, **options: Any) -> MemoryStorageWriter:
        return MemoryStorageWriter(
            memory_root=self.memory(dist.get_rank()), job="job", **{"replicas": 1, **options}
        )

    def held(self, node: int) -> JobMemory:
        return JobMemory(f"{self.root}/node{node}", "job")


@pytest.fixture
def cluster(memory_root: Path) -> Cluster:
    return Cluster(str(memory_root))


def _state(step: int, nbytes: int = 1 << 20) -> dict[str, Any]:
    """Make a state: parts of different sizes, and byte items that change length per save."""
    rank = dist.get_rank()
    large = torch.arange(nbytes // 4 * (rank % 3 + 1), dtype=torch.int32) + step * 1009 + rank
    return {
        f"large{rank}": large,
        f"small{rank}": torch.full((7,), step),
        f"note{rank}": "." * (step % 3 * 1000 + rank),
    }


def _save(
    writer: MemoryStorageWriter, step: int, nbytes: int = 1 << 20, *, road: str = "dcp_mem.save"
) -> None:
    SAVES[road](_state(step, nbytes), checkpoint_id=f"step-{step}", storage_writer=writer)


def _status(writer: MemoryStorageWriter, step: int) -> CheckpointStatus:
    return next(entry for entry in writer.status() if entry.name == f"step-{step}")


def _errors(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"


def _with_line_sends(change: Callable[[Any], Any]) -> None:
    """Let every chunk that this process sends from now on pass through `change`."""
    send = UsedChannel.send

    def changed(line: Any, data: Any) -> Any:
        return send(
            line, change(data) if len(data) > 1000 and isinstance(data, memoryview) else data
        )

    UsedChannel.send = changed  # type: ignore[assignment,method-assign]


# -- what is copied --------------------------------------------------------------------------------


def _saves_and_waits(cluster: Cluster, replicas: int, road: str) -> list[tuple[State, int, str]]:
    with cluster.writer(replicas=replicas) as writer:
        for step in (1, 2):
            _save(writer, step, 9 << 20, road=road)
            writer.wait(f"step-{step}", "replicated", timeout=60)
    return [(entry.state, entry.replicas, entry.replication_error) for entry in writer.status()]


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "replicas", "road"),
    [
        (2, 1, 1, "torch's planner"),
        (2, 2, 1, "dcp_mem.save"),
        (3, 2, 1, "dcp.save"),
        (5, 1, 2, "dcp_mem.save"),
    ],
)
def test_every_copy_is_what_was_saved_and_has_its_checksums_beside_it(
    memory_root: Path, nodes: int, ranks_per_node: int, replicas: int, road: str
) -> None:
    cluster = Cluster(str(memory_root), ranks_per_node)
    outcomes = forked_ranks(_saves_and_waits, nodes * ranks_per_node, cluster, replicas, road)
    assert outcomes == [[(State.REPLICATED, replicas, "")] * 2] * (nodes * ranks_per_node)
    for name in ("step-1", "step-2"):
        lies_on = _segments(cluster, range(nodes), name)
        assert len(lies_on) == nodes * ranks_per_node
        for found in lies_on.values():
            assert len(found) == replicas + 1
            assert len(set(found)) == 1


def _segments(cluster: Cluster, nodes: Sequence[int], name: str) -> dict[str, list[bytes]]:
    """Return each file's bytes from every node that has it, checked against the checksums."""
    lies_on: dict[str, list[bytes]] = {}
    for node in nodes:
        memory = cluster.held(node)
        (held,) = memory.find(name)
        for segment in held.manifest.segments:
            path = Path(held.segment_path(segment.file))
            checksums = Path(held.directory, names.checksums_file(segment.file))
            if path.exists():
                data = path.read_bytes()[: segment.nbytes]
                if segment.node != memory.node or held.replication.outcome == "replicated":
                    _assert_matches(data, checksums, segment.file)
                lies_on.setdefault(segment.file, []).append(data)
    return lies_on


def _assert_matches(data: bytes, path: Path, file: str) -> None:
    table = NodeManifest.from_json(path.read_bytes()).tables[file]
    checksums = BlockChecksums(blocks_of(table.offsets, table.lengths))
    checksums.add(0, memoryview(data))
    assert checksums.result().tolist() == table.crc32c.tolist()
    assert len(table.crc32c) >= len(data) // (1 << 20)


def _saves_in_racks(cluster: Cluster) -> None:
    with cluster.writer(failure_domain=lambda: f"rack{dist.get_rank() // 2}") as writer:
        _save(writer, 1)
        writer.wait(None, "replicated", timeout=60)


def test_copies_go_to_other_failure_domains(cluster: Cluster) -> None:
    forked_ranks(_saves_in_racks, 4, cluster)
    for rank in range(4):
        file = names.segment_file(rank, cluster.held(0).checkpoints()[0].manifest.save_id)
        having = [
            node
            for node in range(4)
            if Path(cluster.held(node).checkpoints()[0].segment_path(file)).exists()
        ]
        assert {node // 2 for node in having} == {0, 1}


def _saves_on_one_node(cluster: Cluster) -> tuple[State, str, str]:
    with cluster.writer() as writer:
        for step in (1, 2):
            _save(writer, step)
        error = raised_by(lambda: writer.wait("step-2", "replicated", timeout=10))
        return _status(writer, 2).state, _errors(error), _status(writer, 2).replication_error


def test_on_one_node_saves_go_on_without_copies_and_one_warning(
    memory_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for state, error, why in forked_ranks(_saves_on_one_node, 2, Cluster(str(memory_root), 2)):
        assert state is State.COMPLETE
        assert error == f"ReplicationFailed: checkpoint 'step-2' was not replicated: {why}"
        assert why == "all ranks that save together run on one node"
    assert capfd.readouterr().out.count("replicas=1 makes no copies") == 1


# -- memory ----------------------------------------------------------------------------------------


def _saves_often(cluster: Cluster, keep: int, on_replication: str, limit: int) -> list[int]:
    with cluster.writer(
        keep_memory=keep, on_replication=on_replication, memory_limit=limit
    ) as writer:
        taken = []
        for step in range(10):
            _save(writer, step)
            taken.append(allocated_bytes(f"{cluster.memory(dist.get_rank())}/job"))
        if on_replication == "wait":
            writer.wait(None, "replicated", timeout=60)
    return taken


@pytest.mark.parametrize("keep", [1, 2])
def test_ten_saves_take_no_more_memory_than_their_copies_and_one_more_checkpoint(
    cluster: Cluster, keep: int
) -> None:
    for taken in forked_ranks(_saves_often, 3, cluster, keep, "wait", 10 * _MOST_ON_A_NODE):
        assert max(taken) <= (keep + 1) * _MOST_ON_A_NODE + _SMALL_FILES
    for node in range(3):
        assert len(cluster.held(node).checkpoints()) == keep


def _prepares_and_saves(cluster: Cluster) -> tuple[set[int], set[int]]:
    """Which slots were ready before the first save, and which became of that."""
    with cluster.writer() as writer:
        assert writer.prepare(_state(1)).wait(30)
        slots = Path(cluster.memory(dist.get_rank()), "job", ".slots")
        ready = {path.stat().st_ino for path in slots.iterdir()}
        _save(writer, 1, road="dcp.save")
        writer.wait("step-1", "replicated", timeout=30)
        (held,) = cluster.held(dist.get_rank()).checkpoints()
        return ready, {path.stat().st_ino for path in Path(held.directory).glob("*.distcp")}


def test_slots_for_copies_are_ready_before_the_first_save_where_it_is_prepared(
    cluster: Cluster,
) -> None:
    for ready, used in forked_ranks(_prepares_and_saves, 3, cluster):
        assert len(used) == 2
        assert used < ready
        assert len(ready) == 6


@pytest.mark.parametrize("on_replication", ["skip", "cancel"])
def test_a_memory_limit_holds_whatever_becomes_of_copies(
    cluster: Cluster, on_replication: str
) -> None:
    # The newest, one that is being copied, the newest with copies, and one being staged.
    limit = 5 * _MOST_ON_A_NODE
    for taken in forked_ranks(_saves_often, 3, cluster, 1, on_replication, limit):
        assert max(taken) <= limit


# -- what goes wrong -------------------------------------------------------------------------------


def _flipped(data: Any) -> Any:
    data = bytearray(data)
    data[700_000] ^= 1
    return memoryview(data)


def _saves_with_a_flipped_byte(cluster: Cluster) -> list[tuple[State, str]]:
    send = UsedChannel.send
    with cluster.writer(keep_memory=3) as writer:
        for step in (1, 2, 3):
            if step == 2 and dist.get_rank() == 0:
                _with_line_sends(_flipped)
            else:
                UsedChannel.send = send  # type: ignore[method-assign]
            _save(writer, step)
            raised_by(lambda step=step: writer.wait(f"step-{step}", "replicated", timeout=30))  # type: ignore[misc]
        found = [_status(writer, step) for step in (1, 2, 3)]
        return [(entry.state, entry.replication_error) for entry in found]


def test_a_copy_with_a_flipped_byte_is_not_sealed_and_the_next_checkpoint_is_replicated(
    cluster: Cluster,
) -> None:
    for first, second, third in forked_ranks(_saves_with_a_flipped_byte, 2, cluster):
        assert first == (State.REPLICATED, "")
        assert second[0] is State.COMPLETE
        assert "rank 1: receiving from rank 0" in second[1]
        assert "came otherwise than it was sent, 3 times" in second[1]
        assert third == (State.REPLICATED, "")
    (held,) = cluster.held(1).find("step-2")
    segments = {names.rank_of(path.name) for path in Path(held.directory).glob("*.distcp")}
    assert segments == {1}
    assert len(_segments(cluster, [0], "step-2")) == 2  # rank 1's came as it was


def _saves_with_failing_copies(cluster: Cluster) -> list[str]:
    with cluster.writer(keep_memory=1) as writer:
        _save(writer, 1)
        writer.wait("step-1", "replicated", timeout=30)
        if dist.get_rank() == 0:
            _with_line_sends(_flipped)
        for step in (2, 3, 4):
            _save(writer, step)
    return [entry.name for entry in writer.status() if entry.in_memory]


def test_memory_keeps_the_newest_replicated_checkpoint_beside_newer_ones_that_are_not(
    cluster: Cluster,
) -> None:
    assert forked_ranks(_saves_with_failing_copies, 2, cluster) == [["step-4", "step-1"]] * 2


def _saves_until_a_peer_is_lost(
    cluster: Cluster, lost: int, what: str
) -> tuple[str, list[tuple[str, str]]]:
    writer = cluster.writer()
    _save(writer, 1)
    writer.wait("step-1", "replicated", timeout=30)
    if dist.get_rank() == lost:
        faults.arm(what)
    _save(writer, 2)
    if dist.get_rank() == lost:
        time.sleep(60)
    error = raised_by(lambda: writer.wait("step-2", "replicated", timeout=30))
    return _errors(error), [(entry.name, entry.state.value) for entry in writer.status()]


@pytest.mark.parametrize("point", POINTS)
def test_survivors_of_a_kill_have_it_in_their_status_and_the_next_start_goes_on(
    cluster: Cluster, point: str
) -> None:
    ranks = kill_targets.forked(
        _saves_until_a_peer_is_lost, 3, cluster, 1, f"{point}:kill:1", env=_PATIENCE
    )
    outcomes = ranks.join(killed={1})
    for error, states in (outcomes[0], outcomes[2]):
        assert ".cc:" not in error
        if point == "replicate.recorded":
            assert error == "NoneType: None"
        else:
            assert error.startswith("ReplicationFailed")
            assert states == [("step-2", "complete"), ("step-1", "replicated")]
    _segments(cluster, range(3), "step-2")  # whatever has a name is whole
    kill_targets.forked(_saves_on, 3, cluster, env=_PATIENCE).join()
    for node in range(3):
        memory = cluster.held(node)
        newest, older = memory.checkpoints()
        assert (newest.name, newest.replication.outcome) == ("step-4", "replicated")
        assert (older.name, older.replication.outcome) == ("step-3", "replicated")
        assert list(Path(memory.slots).iterdir()) == []
    assert len(_segments(cluster, range(3), "step-4")) == 3


def _saves_on(cluster: Cluster) -> None:
    with cluster.writer() as writer:
        for step in (3, 4):
            _save(writer, step)
            writer.wait(f"step-{step}", "replicated", timeout=30)


def test_a_peer_that_hangs_times_out_and_copies_between_others_are_made(cluster: Cluster) -> None:
    ranks = kill_targets.forked(
        _saves_until_a_peer_is_lost, 4, cluster, 3, "replicate.started:stop:1", env=_PATIENCE
    )
    ranks.wait_until_stopped(3)
    for rank in range(3):
        kill_targets.wait_for(lambda rank=rank: not ranks.is_running(rank), f"rank {rank} to end")  # type: ignore[misc]
    ranks.send(3, signal.SIGKILL)
    outcomes = ranks.join(killed={3})
    assert all(error.startswith("ReplicationFailed") for error, _ in outcomes[:3])
    assert [len(found) for found in _segments(cluster, range(3), "step-2").values()] == [2, 2, 1]


# -- one save after the other ----------------------------------------------------------------------


def _saves_while_copies_are_under_way(
    cluster: Cluster, on_replication: str
) -> list[tuple[str, str]]:
    with cluster.writer(keep_memory=3, on_replication=on_replication) as writer:
        _save(writer, 0)
        writer.wait("step-0", "replicated", timeout=30)
        _with_line_sends(_slowly)
        for step in (1, 2):
            _save(writer, step, 3 * CHUNK)
        raised_by(lambda: writer.wait("step-2", "replicated", timeout=60))
    return [
        (_status(writer, step).state.value, _status(writer, step).replication_error)
        for step in (1, 2)
    ]


def _slowly(data: Any) -> Any:
    time.sleep(0.5)
    return data


def test_a_save_waits_for_the_copies_of_the_one_before(cluster: Cluster) -> None:
    for outcome in forked_ranks(_saves_while_copies_are_under_way, 2, cluster, "wait"):
        assert outcome == [("replicated", ""), ("replicated", "")]


def test_a_save_that_skips_is_complete_without_copies(cluster: Cluster) -> None:
    for outcome in forked_ranks(_saves_while_copies_are_under_way, 2, cluster, "skip"):
        assert outcome == [
            ("replicated", ""),
            ("complete", "the replication of an older checkpoint was under way"),
        ]


def test_a_save_that_overtakes_gets_its_copies_and_the_one_before_none(cluster: Cluster) -> None:
    for (state, error), second in forked_ranks(
        _saves_while_copies_are_under_way, 2, cluster, "cancel"
    ):
        assert state == "complete"
        assert "Overtaken" in error
        assert second == ("replicated", "")


def _overtakes_often(cluster: Cluster) -> float:
    """Seconds that it took, with copies given up at any point of their way."""
    started = time.monotonic()
    with cluster.writer(on_replication="cancel") as writer:
        for step in range(12):
            _save(writer, step, 2 * CHUNK)
        writer.wait(None, "replicated", timeout=60)
    return time.monotonic() - started


def test_copies_that_are_given_up_halfway_keep_nobody_waiting_for_a_time_out(
    cluster: Cluster,
) -> None:
    assert (
        max(
            forked_ranks(
                _overtakes_often, 3, cluster, timeout=90, env={"DCP_MEM_REPLICATION_TIMEOUT": "600"}
            )
        )
        < 90
    )


def _evicts_while_it_sends(cluster: Cluster) -> bytes:
    """Rank 0 has its segment sent, and loses it in the middle; what was in it?"""
    sending, goes_on, content = threading.Event(), threading.Event(), b""

    def hold_up(data: Any) -> Any:
        sending.set()
        assert goes_on.wait(30)
        return data

    with cluster.writer() as writer:
        session = writer._saver.open_session()
        if dist.get_rank() == 0:
            _with_line_sends(hold_up)
        _save(writer, 1, 3 * CHUNK)
        if dist.get_rank() == 0:
            assert sending.wait(30)
            session.prefaulting.stop()
            content = _evict_and_overwrite(session.memory, session.slots)
            goes_on.set()
        session.replicator.wait(60)
        dist.barrier()
    return content


def _evict_and_overwrite(memory: JobMemory, slots: SlotPool) -> bytes:
    """Return what the segment of rank 0 held."""
    (found,) = memory.find("step-1")
    memory.publish(found.manifest)  # as where a planner hands over metadata in `finish`
    segment = found.manifest.segments.numbered(0)
    content = Path(found.segment_path(segment.file)).read_bytes()[: segment.nbytes]
    assert memory.evict(found)
    claimed = [slots.take(segment.nbytes, "") for _ in range(len(slots.free()) + 1)]
    for slot in claimed:
        os.pwrite(slot.descriptor, b"\xff" * segment.nbytes, 0)
        slots.abandon(slot)
    return content


def test_a_copy_is_whole_where_the_segment_leaves_memory_while_it_is_sent(
    cluster: Cluster,
) -> None:
    content, _ = forked_ranks(_evicts_while_it_sends, 2, cluster)
    (copied,) = cluster.held(1).find("step-1")
    segment = copied.manifest.segments.numbered(0)
    assert Path(copied.segment_path(segment.file)).read_bytes()[: segment.nbytes] == content


def _saves_two_and_leaves(cluster: Cluster) -> None:
    writer = cluster.writer()
    for step in (1, 2):
        _save(writer, step)


def test_a_process_that_ends_finishes_its_copies_first(cluster: Cluster) -> None:
    forked_ranks(_saves_two_and_leaves, 2, cluster)
    for node in range(2):
        assert [held.replication.outcome for held in cluster.held(node).checkpoints()] == [
            "replicated"
        ] * 2


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"replicas": -1}, {"replicas": 1.5}, {"on_replication": "never"}, {"failure_domain": 7}],
)
def test_arguments_that_cannot_work_are_refused(memory_root: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MemoryStorageWriter(memory_root=memory_root, job="job", **options)


@pytest.mark.parametrize(
    ("variable", "text"), [("DCP_MEM_REPLICAS", "many"), ("DCP_MEM_REPLICATION_TIMEOUT", "-1")]
)
def test_variables_that_cannot_work_are_refused(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=variable):
        MemoryStorageWriter(memory_root=memory_root, job="job")


def test_the_environment_gives_replicas_and_failure_domain(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_REPLICAS", "2")
    monkeypatch.setenv("DCP_MEM_FAILURE_DOMAIN", "rack7")
    chosen = MemoryStorageWriter(memory_root=memory_root, job="job").settings
    assert (chosen.redundancy.copies, chosen.failure_domain) == (2, "rack7")


def test_a_wait_for_copies_that_nobody_wants_is_an_error(memory_root: Path) -> None:
    with pytest.raises(ConfigError, match="replicas=0"):
        MemoryStorageWriter(memory_root=memory_root, job="job").wait("step-1", "replicated")


# -- who sends what to whom ------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.lists(st.integers(0, 50), min_size=12, max_size=12),
    st.integers(0, 5),
)
def test_each_segment_goes_to_ranks_on_as_many_other_nodes_as_asked_for(
    nodes: list[int], racks: list[int], sizes: list[int], replicas: int
) -> None:
    places = tuple(f"node{node}" for node in nodes)
    domains = tuple(f"rack{racks[node]}" for node in nodes)
    copies = copies_of(places, domains, tuple(sizes[: len(nodes)]), replicas)
    for rank, node in enumerate(places):
        targets = [places[copy.receiver] for copy in copies if copy.sender == rank]
        assert len(set(targets)) == len(targets) == min(replicas, len(set(places)) - 1)
        assert node not in targets


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 3))
def test_equal_segments_come_to_the_ranks_of_a_node_in_equal_numbers(
    nodes: int, per_node: int, replicas: int
) -> None:
    places = tuple(f"node{node}" for node in range(nodes) for _ in range(per_node))
    copies = copies_of(places, places, (8,) * len(places), replicas)
    counts = [sum(copy.receiver == rank for copy in copies) for rank in range(len(places))]
    assert len(set(counts)) == 1


def _one_fails_to_connect(cluster: Cluster) -> list[tuple[State, bool]]:
    """Rank 1 has no connection to the store once; what became of two saves?"""
    left = [1] if dist.get_rank() == 1 else []

    def connect_later(store: dist.Store, seconds: float) -> dist.Store:
        if left:
            left.pop()
            raise RuntimeError("can't start new thread")
        return own_connection(store, seconds)

    with patch.object(job_ranks, "own_connection", connect_later), cluster.writer() as writer:
        for step in (1, 2):
            _save(writer, step)
            _ended(writer, step)
        return [(entry.state, not entry.replication_error) for entry in writer.status()]


def _ended(writer: MemoryStorageWriter, step: int) -> None:
    with suppress(ReplicationFailed):
        writer.wait(f"step-{step}", "replicated", timeout=60)
    dist.barrier()


def test_a_rank_that_fails_before_it_asks_for_connections_is_in_step_at_the_next_save(
    cluster: Cluster,
) -> None:
    for states in forked_ranks(_one_fails_to_connect, 2, cluster, env=_PATIENCE):
        assert sorted(states, key=str) == [(State.COMPLETE, False), (State.REPLICATED, True)]


def _cannot_start(cluster: Cluster) -> tuple[list[tuple[State, bool]], int]:
    """Rank 1 can't start its first replication; what becomes of two saves, and of slots?"""
    left = [1] if dist.get_rank() == 1 else []
    abandoned: list[int] = []
    abandon = SlotPool.abandon

    def start(act: Callable[[], object], name: str) -> threading.Thread:
        if left and name == "dcp_mem-replicate":
            left.pop()
            raise RuntimeError("can't start new thread")
        return daemon(act, name)

    def count(pool: SlotPool, slot: Slot) -> None:
        abandoned.append(slot.inode)
        abandon(pool, slot)

    with (
        patch.object(replicator, "daemon", start),
        patch.object(SlotPool, "abandon", count),
        cluster.writer() as writer,
    ):
        _save(writer, 1)
        _ended(writer, 1)
        (held,) = cluster.held(dist.get_rank()).find("step-1")
        wait_until(lambda: not is_leased(held.manifest_path), "the lease ends")
        abandoned_before = len(abandoned)
        dist.barrier()
        _save(writer, 2)
        _ended(writer, 2)
        states = [(entry.state, not entry.replication_error) for entry in writer.status()]
    return states, abandoned_before


def test_a_replication_that_cannot_start_gives_back_its_slots_and_its_lease(
    cluster: Cluster,
) -> None:
    found = forked_ranks(_cannot_start, 2, cluster, env=_PATIENCE)
    for states, _ in found:
        assert sorted(states, key=str) == [(State.COMPLETE, False), (State.REPLICATED, True)]
    assert [abandoned for _, abandoned in found] in ([0, 1], [1, 1])  # rank 0 may learn of it first
