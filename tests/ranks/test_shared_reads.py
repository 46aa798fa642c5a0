"""Loads that ranks make together: storage sends each byte once per node, or once in all."""

import errno
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
from dcp_mem import NoRecoverableCheckpoint
from dcp_mem.policy import pieces, sharing
from dcp_mem.policy.pieces import Extent, cut, merged, with_large_apart
from dcp_mem.policy.sharing import LoadShare
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.plans import LOADS
from tests.support.processes import faults, kill_targets
from tests.support.processes.forks import forked, forked_ranks, raised_by
from tests.support.sharing import Need, shared_out
from tests.support.variants import examples

SOON = 30.0
EXTENTS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300)).map(lambda pair: (min(pair), max(pair))),
    max_size=8,
)


@contextmanager
def small_pieces(nbytes: int) -> Iterator[None]:
    """Requests of so many bytes, so that few bytes make many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pieces, sharing):
            patch.setattr(module, "PIECE", nbytes)
        yield


def _by_file(places: Sequence[tuple[int, int]]) -> dict[str, list[Extent]]:
    """Return the ranges that cover these places, which are (number of a file, place in it)."""
    found: dict[str, list[Extent]] = {}
    for file, place in places:
        found.setdefault(f"file{file}", []).append((place, place + 1))
    return {file: merged(extents, 1) for file, extents in found.items()}


def _bytes_of(extents: Sequence[Extent]) -> set[int]:
    return {place for start, stop in extents for place in range(start, stop)}


# -- pieces ----------------------------------------------------------------------------------------


@given(EXTENTS, st.integers(1, 50))
def test_merged_ranges_cover_the_given_ones_and_only_small_gaps_between(
    extents: list[Extent], gap: int
) -> None:
    found = merged(extents, gap)
    assert _bytes_of(extents) <= _bytes_of(found)
    assert all(later[0] - earlier[1] >= gap for earlier, later in pairwise(found))
    extra = sorted(_bytes_of(found) - _bytes_of(extents))
    runs = "".join("1" if place in extra else " " for place in range(301)).split()
    assert all(len(run) < gap for run in runs)


@given(EXTENTS, st.integers(1, 60), st.integers(1, 20))
def test_large_ranges_stay_apart_and_small_ones_are_merged(
    extents: list[Extent], large: int, most_apart: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_LARGE", large)
        patch.setattr(pieces, "_MOST_APART", most_apart)
        found = with_large_apart(extents)
    assert _bytes_of(extents) <= _bytes_of(found) <= _bytes_of(merged(extents))
    assert sum(stop - start for start, stop in found) == len(_bytes_of(found)), (
        "some bytes would come twice"
    )
    distinct = merged(extents, 0)
    least = max(large, len(_bytes_of(extents)) // most_apart)
    assert {one for one in distinct if one[1] - one[0] >= least} <= set(found)


@given(
    st.integers(0, 100),
    st.integers(0, 300),
    st.integers(1, 40),
    st.lists(st.integers(0, 400), max_size=30),
)
def test_pieces_are_cut_at_the_edges_and_lose_nothing(
    start: int, nbytes: int, most: int, inner: list[int]
) -> None:
    edges = sorted({start, start + nbytes, *inner})
    with small_pieces(most):
        found = list(cut((start, start + nbytes), edges))
        anywhere = list(cut((start, start + nbytes), None))
    for cuts in (found, anywhere):
        assert [place for piece in cuts for place in range(*piece)] == list(
            range(start, start + nbytes)
        )
    assert all(stop - low <= most for low, stop in anywhere)
    for low, stop in found:
        assert {low, stop} <= set(edges)
        assert stop - low <= most or not any(low < edge < stop for edge in edges)


# -- who fetches what ------------------------------------------------------------------------------


@st.composite
def _needs(draw: st.DrawFn) -> list[Need]:
    nodes = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=7))
    common = {"x": merged(draw(EXTENTS), 1)}
    everything = st.just(common) | st.fixed_dictionaries(
        {}, optional={"x": EXTENTS, "y": EXTENTS}
    ).map(lambda extents: {file: merged(of_file, 1) for file, of_file in extents.items()})
    return [Need(node, draw(everything)) for node in nodes]


def _played(
    needs: Sequence[Need], parts: Sequence[LoadShare], held: Collection[str] = ()
) -> list[Counter[tuple[str, int]]]:
    """Play all ranks' parts, and count what each asks storage for; fail where a part is wrong."""
    asked = [Counter[tuple[str, int]]() for _ in needs]
    there: list[Counter[tuple[str, int]]] = [Counter() for _ in needs]
    for rank, part in enumerate(parts):
        for file, extents in part.alone.items():
            asked[rank].update((file, place) for extent in extents for place in range(*extent))
        there[rank].update(asked[rank])
        for one in part.pieces:
            places = [(one.file, place) for place in range(one.start, one.stop)]
            if one.origin is None and one.file not in held:
                asked[rank].update(places)
            if one.origin is not None or one.file not in held:
                there[rank].update(places)
            assert rank not in one.to
            if one.origin is not None and needs[one.origin].node == needs[rank].node:
                assert not one.to, "who takes from a neighbour must wait for nobody else"
            assert all(needs[to].node == needs[rank].node for to in one.to) or one.origin is None
    for rank, part in enumerate(parts):
        for to, other in enumerate(parts):
            given = [one[:2] for one in part.pieces if to in one.to]
            assert given == [one[:2] for one in other.pieces if one.origin == rank], (
                "messages between two ranks have no names but their order"
            )
    for rank, need in enumerate(needs):
        wanted = {
            (file, place) for file, extents in need.extents.items() for place in _bytes_of(extents)
        }
        assert wanted <= there[rank].keys()
        assert set(there[rank].values()) <= {1}, "some bytes come twice"
    return asked


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_where_everything_moves_each_node_asks_another_one(ranks_per_node: int) -> None:
    nodes = [number for number in range(16) for _ in range(ranks_per_node)]
    needs = [Need(f"node{node:02}", {f"file{(node + 1) % 16:02}": [(0, 400)]}) for node in nodes]
    files = [f"file{number:02}" for number in range(16)]
    with small_pieces(50):
        parts = shared_out(needs, lambda file: [int(file[4:]) * ranks_per_node])
        _played(needs, parts, files)
    came = [sum(one.origin is not None for one in part.pieces) for part in parts]
    assert came == [8] * len(needs)


@settings(max_examples=examples(300))
@given(_needs(), st.booleans())
def test_every_rank_gets_what_it_needs_and_storage_gives_it_once(
    needs: list[Need], across_nodes: bool
) -> None:
    with small_pieces(8):
        parts = shared_out(needs, across_nodes=across_nodes)
        asked = _played(needs, parts)
    for node in {need.node for need in needs}:
        of_node = [asked[rank] for rank, need in enumerate(needs) if need.node == node]
        assert set(sum(of_node, Counter[tuple[str, int]]()).values()) <= {1}
    if across_nodes:
        assert set(sum(asked, Counter[tuple[str, int]]()).values()) <= {1}


def test_shards_of_six_replicas_are_read_once_and_evenly() -> None:
    """Sharded over 4 nodes and saved by 5 ranks: the borders of files and shards differ."""
    shards, replicas, per_node, nbytes = 4, 6, 2, 4000
    needs = [
        Need(
            f"node{node:02}",
            _by_file(
                [
                    (place // 800, place % 800)
                    for place in range(nbytes)
                    if place * shards * per_node // nbytes == node % shards * per_node + rank
                ]
            ),
        )
        for node in range(shards * replicas)
        for rank in range(per_node)
    ]
    with small_pieces(10):
        asked = _played(needs, shared_out(needs, across_nodes=True))
    assert set(sum(asked, Counter[tuple[str, int]]()).values()) == {1}
    assert max(sum(one.values()) for one in asked) <= 2 * nbytes / len(needs)


def test_every_two_of_nine_nodes_share_bytes_that_nobody_else_needs() -> None:
    pairs = list(combinations(range(9), 2))
    needs = [
        Need(
            f"node{node}", {f"file{pair}": [(0, 30)] for pair, of in enumerate(pairs) if node in of}
        )
        for node in range(9)
    ]
    with small_pieces(10):
        asked = _played(needs, shared_out(needs, across_nodes=True))
    assert set(sum(asked, Counter[tuple[str, int]]()).values()) == {1}


@given(st.lists(st.integers(0, 60), unique=True))
def test_a_set_of_nodes_is_kept_as_runs(leaders: list[int]) -> None:
    runs = sharing._as_runs(sorted(leaders))
    assert [leader for run in runs for leader in run] == sorted(leaders)
    assert len(sharing._as_runs(range(0, 16384, 8))) == 1


def test_reading_is_shared_out_evenly() -> None:
    needs = [Need("ab"[rank // 4], {"x": [(0, 8000)]}) for rank in range(8)]
    with small_pieces(10):
        for across_nodes, each in ((False, 2000), (True, 1000)):
            asked = _played(needs, shared_out(needs, across_nodes=across_nodes))
            assert [sum(one.values()) for one in asked] == [each] * 8


@settings(max_examples=examples(300))
@given(_needs(), st.sets(st.sampled_from("abc"), min_size=1), st.booleans())
def test_what_nodes_have_in_memory_leaves_them_once_for_each_node_that_lacks_it(
    needs: list[Need], having: set[str], across_nodes: bool
) -> None:
    """`x` lies in the memory of some nodes, `y` on storage alone."""
    holding = [rank for rank, need in enumerate(needs) if need.node in having]
    if not holding:
        return
    needs = [
        Need(
            node,
            {file: one for file, one in extents.items() if file != "x" or node not in having},
        )
        for node, extents in needs
    ]
    with small_pieces(8):
        parts = shared_out(
            needs, lambda file: holding if file == "x" else (), across_nodes=across_nodes
        )
        asked = _played(needs, parts, ["x"])
    assert all(file != "x" for one in asked for file, _ in one)
    sent, came = Counter[int](), Counter[tuple[str, int]]()
    for rank, part in enumerate(parts):
        for one in part.pieces:
            if one.file == "x" and one.origin is None:
                assert rank in holding
                (to,) = one.to
                sent[rank] += one.stop - one.start
                came.update((needs[to].node, place) for place in range(one.start, one.stop))
    assert came == Counter(
        {(need.node, place) for need in needs for place in _bytes_of(need.extents.get("x", ()))}
    )
    # Nodes that decide by themselves each send evenly, so that their differences may add up.
    assert max(sent.values(), default=0) - min(sent[rank] for rank in holding) <= 8 * len("abc")


def test_nodes_that_need_little_of_one_segment_ask_different_ranks_for_it() -> None:
    holding = range(16)
    needs = [
        Need(f"node{rank // 8:03}", {} if rank in holding else {"x": [(0, 5)]})
        for rank in range(8 * 66)
    ]
    parts = shared_out(needs, lambda file: holding)
    _played(needs, parts, ["x"])
    assert [len(parts[rank].pieces) for rank in holding] == [4] * 16


# -- real ranks ------------------------------------------------------------------------------------


def _replicated(*, filled: bool) -> dict[str, Any]:
    """Nothing but what every rank holds whole: large tensors, small ones, odd ones, objects."""
    generator = torch.Generator().manual_seed(5)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) if filled else torch.zeros(*shape)

    return {
        "large": make(700, 1500),
        "larger": make(2_000_001),
        "turned": make(300, 500).t(),
        "scalar": make(1)[0],
        "empty": make(0, 3),
        **{f"small{number}": make(17 + number, 3) for number in range(60)},
        "step": 7 if filled else 0,
        "text": "what was saved" if filled else "",
    }


def _save_replicated(job: Job) -> None:
    with job.writer() as writer:
        dcp_mem.save(_replicated(filled=True), checkpoint_id="step-1", storage_writer=writer)
        writer.wait("step-1", timeout=60)


class _Asked:
    """Counts the bytes of segments that this process reads from storage."""

    def __init__(self, job: Job) -> None:
        self.nbytes = 0
        self._root = str(job.url)

    @contextmanager
    def counting(self) -> Iterator[None]:
        preadv = os.preadv

        def counted(descriptor: int, *given: Any) -> int:
            count = preadv(descriptor, *given)
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if file.startswith(self._root) and file.endswith(".distcp"):
                self.nbytes += count
            return count

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", counted)
            yield


def _load_counted(jobs: Sequence[Job], road: str, broadcast: bool) -> int:
    """Load everything on this rank; how many bytes of segments it asked storage for."""
    job = jobs[dist.get_rank() if dist.is_initialized() else 0]
    state, asked = _replicated(filled=False), _Asked(job)
    with pytest.MonkeyPatch.context() as patch:
        for module in (pieces, sharing):
            patch.setattr(module, "PIECE", 1 << 20)
        _load_and_compare(job, state, asked, road, broadcast)
    return asked.nbytes


def _load_and_compare(
    job: Job, state: dict[str, Any], asked: _Asked, road: str, broadcast: bool
) -> None:
    with asked.counting(), job.reader(broadcast=broadcast) as reader:
        LOADS[road](state, storage_reader=reader)
        assert reader.report().source == "storage"
    for name, expected in _replicated(filled=True).items():
        if isinstance(expected, torch.Tensor):
            assert torch.equal(state[name], expected), name
        else:
            assert state[name] == expected


@pytest.fixture
def stored(tmp_path: Path, memory_root: Path) -> Callable[..., list[Job]]:
    """Save a checkpoint to storage; return a function that makes jobs with empty memory roots."""
    saver = Job(str(tmp_path / "storage"), str(memory_root / "saver"))
    forked(_save_replicated, saver)

    def on_nodes(*nodes: int) -> list[Job]:
        return [Job(saver.url, str(memory_root / f"node{node}")) for node in nodes]

    return on_nodes


def _stored_nbytes(job: Job) -> int:
    assert job.url is not None
    return sum(path.stat().st_size for path in Path(job.url).rglob("*.distcp"))


@pytest.mark.parametrize("road", ["dcp.load", "torch's planner"])
@pytest.mark.parametrize(
    ("nodes", "broadcast", "times"),
    [
        pytest.param((0, 0), False, 1, id="2 ranks on a node"),
        pytest.param((0, 1), False, 2, id="2 nodes"),
        pytest.param((0, 1), True, 1, id="2 nodes that pass on"),
        pytest.param((0, 1, 0, 1), True, 1, id="2 nodes of 2 ranks that pass on"),
        pytest.param((0, 1, 1), False, 2, id="uneven nodes"),
        pytest.param((0, 1, 1, 2, 2, 2), True, 1, id="uneven nodes that pass on"),
    ],
)
def test_storage_gives_each_byte_once_for_each_node_or_in_all(
    stored: Callable[..., list[Job]], road: str, nodes: tuple[int, ...], broadcast: bool, times: int
) -> None:
    jobs = stored(*nodes)
    asked = forked_ranks(_load_counted, len(nodes), jobs, road, broadcast)
    assert sum(asked) <= times * _stored_nbytes(jobs[0])
    assert sum(asked) > 0.98 * times * _stored_nbytes(jobs[0])


def _load_without_neighbours(jobs: Sequence[Job]) -> int:
    listen = socket.socket.listen

    def no_door(one: socket.socket, *backlog: int) -> None:
        if one.family == socket.AF_UNIX:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        listen(one, *backlog)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", no_door)
        return _load_counted(jobs, "dcp_mem.load", False)


def test_a_rank_that_neighbours_cannot_reach_reads_for_itself(
    stored: Callable[..., list[Job]],
) -> None:
    jobs = stored(0, 0)
    asked = forked_ranks(_load_without_neighbours, 2, jobs)
    assert min(asked) > 0.98 * _stored_nbytes(jobs[0])


def _load_among_strangers(jobs: Sequence[Job]) -> int:
    """Load while others try what a rank gives: none of them is served."""
    served, greeted, may_end = list[bytes](), list[str](), threading.Event()

    def knock() -> None:
        while not may_end.is_set():
            for line in Path("/proc/net/unix").read_text().splitlines():
                name = line.rpartition("@")[2]
                if not name.startswith("dcp_mem-") or name in greeted:
                    continue
                greeted.append(name)
                with socket.socket(socket.AF_UNIX) as stranger, suppress(OSError):
                    stranger.connect(f"\0{name}")
                    stranger.settimeout(SOON)
                    stranger.sendall(b"x" * 100)
                    served.append(stranger.recv(1))

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        asked = _load_counted(jobs, "dcp_mem.load", False)
    finally:
        may_end.set()
        thread.join()
    assert greeted
    assert b"".join(served) == b""
    return asked


def test_strangers_are_turned_away_and_the_neighbours_behind_them_are_served(
    stored: Callable[..., list[Job]],
) -> None:
    jobs = stored(0, 0)
    assert sum(forked_ranks(_load_among_strangers, 2, jobs)) <= _stored_nbytes(jobs[0])


def _load_with_few_threads(jobs: Sequence[Job]) -> tuple[str, float, int]:
    """Rank 0 can't start its second thread; what is raised, when, and which threads are left."""
    start, started = threading.Thread.start, list[str]()

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "dcp_mem-pass":
            started.append(thread.name)
            if dist.get_rank() == 0 and len(started) == 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        error = raised_by(lambda: _load_counted(jobs, "dcp_mem.load", True))
    seconds = time.monotonic() - began
    left = sum(thread.name == "dcp_mem-pass" for thread in threading.enumerate())
    dist.barrier()
    return str(error), seconds, left


def test_a_thread_that_cannot_be_started_leaves_none_at_work_and_no_peer_waiting(
    stored: Callable[..., list[Job]],
) -> None:
    own, *others = forked_ranks(_load_with_few_threads, 4, stored(0, 1, 0, 1))
    assert own[0] == "can't start new thread"
    assert all("rank 0" in text for text, _, _ in others), others
    for _, seconds, left in (own, *others):
        assert seconds < SOON
        assert not left


def _load_and_be_killed(jobs: Sequence[Job], broadcast: bool) -> str:
    if dist.get_rank() == 1:
        faults.arm("load.batch:kill:2")  # in the middle of what it reads for the others
    return str(raised_by(lambda: _load_counted(jobs, "dcp_mem.load", broadcast)))


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_rank_that_is_killed_while_others_take_from_it_fails_them_at_once(
    stored: Callable[..., list[Job]], broadcast: bool
) -> None:
    jobs = stored(0, 0, 1) if broadcast else stored(0, 0, 0)
    outcomes = kill_targets.forked(_load_and_be_killed, 3, jobs, broadcast).join(killed={1})
    assert all("rank 1" in str(outcomes[rank]) for rank in (0, 2)), outcomes
    forked_ranks(_load_counted, 3, jobs, "dcp_mem.load", broadcast)


def _load_damaged(jobs: Sequence[Job], broadcast: bool) -> Exception | None:
    return raised_by(lambda: _load_counted(jobs, "dcp_mem.load", broadcast))


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_damaged_byte_that_one_rank_finds_fails_all_ranks(
    stored: Callable[..., list[Job]], broadcast: bool
) -> None:
    jobs = stored(0, 1, 0, 1) if broadcast else stored(0, 0)
    assert jobs[0].url is not None
    (segment,) = Path(jobs[0].url).rglob("*.distcp")
    data = bytearray(segment.read_bytes())
    data[random.Random(1).randrange(len(data) // 2)] ^= 1
    segment.write_bytes(data)
    for error in forked_ranks(_load_damaged, len(jobs), jobs, broadcast):
        assert isinstance(error, NoRecoverableCheckpoint)
        assert "CRC32C" in str(error)


def _load_where_a_step_fails(jobs: Sequence[Job], step: str) -> str:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(f"{step} failed")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # the leader of its node
            patch.setattr(f"dcp_mem.loading.shared_fetch.{step}", fail)
        return str(raised_by(lambda: _load_counted(jobs, "dcp_mem.load", True)))


@pytest.mark.parametrize(
    "step",
    [
        "requests",
        "joint",
        "dealt",
        "share_out_on_node",
        "_joined",
    ],
)
def test_a_step_of_sharing_out_that_fails_on_one_rank_is_told_by_all(
    stored: Callable[..., list[Job]], step: str
) -> None:
    others = forked_ranks(_load_where_a_step_fails, 4, stored(0, 1, 0, 1), step)
    own = others.pop(1)
    assert own == f"{step} failed"
    assert all(f"rank 1: ValueError: {step} failed" in other for other in others), others


# -- resharded loads -------------------------------------------------------------------------------


def _save_in_rows(job: Job) -> None:
    values = torch.arange(4096 * 2048.0).view(4096, 2048)
    with job.writer() as writer:
        dcp_mem.save({"w": values}, checkpoint_id="step-1", storage_writer=writer)
        writer.wait("step-1", timeout=60)


def _load_a_part(job: Job, dim: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w = DTensor.from_local(
        torch.zeros(4096 // (4 if dim == 0 else 1), 2048 // (4 if dim == 1 else 1)),
        mesh,
        [Shard(dim)],
    )
    asked = _Asked(job)
    with asked.counting(), job.reader() as reader:
        dcp_mem.load({"w": w}, storage_reader=reader)
    expected = torch.arange(4096 * 2048.0).view(4096, 2048).chunk(4, dim)[dist.get_rank()]
    assert torch.equal(w.to_local(), expected)
    return asked.nbytes, expected.nbytes


def test_a_rank_that_needs_a_quarter_reads_a_quarter(tmp_path: Path, memory_root: Path) -> None:
    saver = Job(str(tmp_path / "storage"), str(memory_root / "saver"))
    forked(_save_in_rows, saver)
    job = Job(saver.url, str(memory_root / "loader"))
    rows = forked_ranks(_load_a_part, 4, job, 0)
    assert all(asked <= nbytes + 2 * (1 << 20) for asked, nbytes in rows), (
        "more than its rows, rounded to blocks"
    )
    columns = forked_ranks(_load_a_part, 4, job, 1)
    assert sum(asked for asked, _ in columns) <= 1.1 * sum(nbytes for _, nbytes in columns), (
        "columns aren't shared"
    )
