"""How ranks talk: their tree, the messages along it, real connections, lost ranks, and costs."""

import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import dcp_mem
from dcp_mem import RankFailed
from dcp_mem.comm import Ranks, job_ranks, ranks_of, relay
from dcp_mem.comm.link import LENGTH_NBYTES
from dcp_mem.comm.peers import TcpWire
from dcp_mem.comm.relay import _FAN_OUT, Tree, tree_of
from tests.support.checkpoints.jobs import Job, wait_for_spare_slots
from tests.support.checkpoints.plans import SAVES
from tests.support.processes.forks import forked_ranks, on_ranks, raised_by
from tests.support.processes.kill_targets import forked
from tests.support.seeds import SEED
from tests.support.variants import with_variants

T = TypeVar("T")
Nodes = list[str]
"""Of every rank, its node."""

# -- trees -----------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, most: int = 200) -> Nodes:
    """Nodes of 1 to `most` ranks: one after the other, dealt out in turn, or in any order."""
    size = draw(st.integers(1, most))
    per_node = draw(st.integers(1, size))
    nodes = [f"node{rank // per_node}" for rank in range(size)]
    order = draw(st.sampled_from(["blocks", "in turn", "any"]))
    if order == "in turn":
        count = -(-size // per_node)
        nodes = [f"node{rank % count}" for rank in range(size)]
    elif order == "any":
        nodes = draw(st.permutations(nodes))
    return nodes


def _trees(nodes: Nodes) -> list[Tree]:
    return [tree_of(nodes, rank) for rank in range(len(nodes))]


def _descendants(trees: Sequence[Tree]) -> list[set[int]]:
    """Of each rank, all ranks below it, going by what each says of its parent."""
    found: list[set[int]] = [set() for _ in trees]
    for tree in trees:
        parent, passed = tree.parent, 0
        while parent is not None:
            found[parent].add(tree.rank)
            parent, passed = trees[parent].parent, passed + 1
            assert passed <= len(trees), "the tree goes round in a circle"
    return found


@given(layouts())
def test_every_rank_but_the_root_has_one_parent_which_knows_it(nodes: Nodes) -> None:
    trees = _trees(nodes)
    assert [tree.rank for tree in trees] == list(range(len(nodes)))
    assert [tree.rank for tree in trees if tree.parent is None] == [0]
    known = Counter((tree.rank, child) for tree in trees for child in tree.children)
    assert known == Counter((tree.parent, tree.rank) for tree in trees if tree.parent is not None)


@given(layouts())
def test_what_is_below_a_rank_is_divided_among_its_children(nodes: Nodes) -> None:
    trees = _trees(nodes)
    below = _descendants(trees)
    assert below[0] == set(range(1, len(nodes)))
    for tree in trees:
        told = [rank for ranks in tree.below for rank in ranks]
        assert len(told) == len(set(told))
        for ranks in tree.below:
            assert set(ranks) == {ranks[0]} | below[ranks[0]]
        assert set(told) == below[tree.rank]


@given(layouts())
def test_a_node_is_entered_once_by_its_first_rank(nodes: Nodes) -> None:
    for tree in _trees(nodes):
        first = nodes.index(nodes[tree.rank])
        assert tree.is_leader == (tree.rank == first)
        if not tree.is_leader:
            assert tree.parent is not None
            assert {nodes[rank] for rank in (tree.parent, *tree.children)} == {nodes[tree.rank]}
        elif tree.parent is not None:
            assert nodes.index(nodes[tree.parent]) == tree.parent, (
                "a leader hangs on no other leader"
            )
        leaders = [child for child in tree.children if nodes[child] != nodes[tree.rank]]
        assert tree.leaders == leaders


@given(layouts())
def test_a_rank_has_few_children_with_higher_numbers_and_few_steps_to_the_root(
    nodes: Nodes,
) -> None:
    trees = _trees(nodes)
    for tree in trees:
        assert len(tree.leaders) <= _FAN_OUT
        assert len(tree.children) - len(tree.leaders) <= _FAN_OUT
        assert all(child > tree.rank for child in tree.children), "a rank connects to lower ones"
    most = _steps(len(set(nodes))) + _steps(max(Counter(nodes).values()))
    for tree in trees:
        passed, parent = 0, tree.parent
        while parent is not None:
            passed, parent = passed + 1, trees[parent].parent
        assert passed == tree.depth <= most


def _steps(count: int) -> int:
    """Steps from a root within which there are so many."""
    steps = 0
    while sum(_FAN_OUT**step for step in range(steps + 1)) < count:
        steps += 1
    return steps


# -- what goes along a tree ------------------------------------------------------------------------


class _Wire:
    """Queues between ranks that are threads; notes the bytes that it sends to each."""

    def __init__(
        self, rank: int, queues: Mapping[tuple[int, int], "queue.SimpleQueue[bytes]"]
    ) -> None:
        self._rank, self._queues = rank, queues
        self.sent: list[tuple[int, int]] = []

    def send(self, ranks: Sequence[int], data: Any) -> None:
        for rank in ranks:
            self.sent.append((rank, len(bytes(data))))
            self._queues[self._rank, rank].put(bytes(data))

    def receive(self, ranks: Sequence[int]) -> list[bytes]:
        return [self._queues[rank, self._rank].get(timeout=10) for rank in ranks]


def _together(nodes: Nodes, act: Callable[[_Wire, Tree], T]) -> list[T]:
    """What `act` returns on every rank; nothing that was sent may be left over."""
    ranks = range(len(nodes))
    queues: dict[tuple[int, int], queue.SimpleQueue[bytes]] = {
        (one, other): queue.SimpleQueue() for one in ranks for other in ranks
    }
    trees = _trees(nodes)
    with ThreadPoolExecutor(len(nodes)) as pool:
        found = list(pool.map(lambda rank: act(_Wire(rank, queues), trees[rank]), ranks))
    assert all(one.empty() for one in queues.values())
    return found


@pytest.mark.parametrize("nodes", [[f"{rank % 20}" for rank in range(100)], ["one"] * 90])
def test_each_message_arrives_once_in_deep_trees(nodes: Nodes) -> None:
    world = len(nodes)

    def act(wire: _Wire, tree: Tree) -> list[Any]:
        rank, is_root = tree.rank, tree.rank == 0
        told = relay.tell_leaders(wire, tree, b"told" if is_root else b"another's")
        return [
            relay.all_reduce(wire, tree, Counter([rank]), lambda one, other: one + other),
            relay.gather(wire, tree, rank, list),
            relay.reduce(wire, tree, Counter([rank]), lambda parts: sum(parts, Counter())),
            relay.broadcast(wire, tree, "first" if is_root else None),
            None if told is None else bytes(told),
            relay.scatter(wire, tree, [f"for {one}" for one in range(world * is_root)]),
            relay.route(wire, tree, {(rank + 1) % world: rank, 0: -rank}),
        ]

    to_root = [(rank, -rank) for rank in range(world)]  # in the order of the senders
    for rank, found in enumerate(_together(nodes, act)):
        leads = nodes.index(nodes[rank]) == rank
        joined = Counter(range(world))
        assert found[:3] == [joined, *(([], None) if rank else (list(range(world)), joined))]
        assert found[3:6] == ["first", b"told" if leads else None, f"for {rank}"]
        assert found[6] == ([(rank - 1, rank - 1)] if rank else to_root)


def test_what_is_routed_within_a_node_does_not_leave_it() -> None:
    """Ranks of eight nodes each send their leader a lot: the leaders' messages stay small."""
    nodes = [f"node{rank // 4}" for rank in range(32)]

    def act(wire: _Wire, tree: Tree) -> tuple[int, list[int]]:
        arrived = relay.route(wire, tree, {tree.rank // 4 * 4: bytes(4096)})
        between = [nbytes for rank, nbytes in wire.sent if nodes[rank] != nodes[tree.rank]]
        return len(arrived), between

    found = _together(nodes, act)
    assert [arrived for arrived, _ in found] == [4, 0, 0, 0] * 8
    assert 0 < max(nbytes for _, between in found for nbytes in between) < 64


def test_what_is_gathered_is_shared_before_it_is_sent_on() -> None:
    """Twenty ranks of four nodes hold the same incompressible data: each node sends it once."""
    nodes, data = [f"node{rank // 5}" for rank in range(20)], bytes(range(256)) * 40

    def act(wire: _Wire, tree: Tree) -> tuple[list[bytes], int]:
        gathered = relay.gather(wire, tree, bytes(data), _share)
        return gathered, sum(nbytes for _, nbytes in wire.sent)

    found = _together(nodes, act)
    assert found[0][0] == [data] * 20
    assert len({id(one) for one in found[0][0]}) == 1
    # Each rank sends to its leader (16), and each other leader once to the root (3).
    assert sum(sent for _, sent in found) < (16 + 3 + 1) * len(data)


def _share(values: Sequence[bytes]) -> list[bytes]:
    known: dict[bytes, bytes] = {}
    return [known.setdefault(value, value) for value in values]


# -- real connections ------------------------------------------------------------------------------

LENGTHS = [1, 8, 4096, 3_000_000]


def _layouts_of(world: int) -> list[Nodes]:
    random = Random(SEED)  # the same on each rank
    drawn = [[str(random.randrange(world)) for _ in range(world)] for _ in range(6)]
    return [
        *drawn,
        ["one"] * world,
        [str(rank) for rank in range(world)],
        [str(rank // 2) for rank in range(world)],
        [str(rank % 2) for rank in range(world)],
    ]


def _talks() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = ranks_of(None, "talks")
    assert not ranks.is_connected
    for nodes in [None, *_layouts_of(world)]:
        if nodes is not None:
            ranks.set_nodes(nodes)
        for length in LENGTHS:
            _talk(
                ranks,
                rank,
                world,
                [bytes([other]) * (length + other) for other in range(world)],
                nodes,
            )
    assert ranks.is_connected


def _talk(ranks: Ranks, rank: int, world: int, of_ranks: list[bytes], nodes: Nodes | None) -> None:
    mine = of_ranks[rank]
    assert ranks.all_reduce({mine}, lambda one, other: one | other) == set(of_ranks)
    assert ranks.gather(mine) == (of_ranks if rank == 0 else [])
    reduced = ranks.reduce({mine}, lambda parts: set().union(*parts))
    assert reduced == (set(of_ranks) if rank == 0 else None)
    assert ranks.broadcast(mine) == of_ranks[0]
    assert ranks.scatter(of_ranks if rank == 0 else []) == mine
    assert ranks.exchange(mine) == of_ranks
    following, before = (rank + 1) % world, (rank - 1) % world
    assert ranks.route({following: mine}) == [(before, of_ranks[before])]
    told = ranks.tell_leaders(of_ranks[0] if rank == 0 else b"")
    leads = nodes is None or nodes.index(nodes[rank]) == rank
    assert (None if told is None else bytes(told)) == (of_ranks[0] if leads else None)


@pytest.mark.parametrize("world", with_variants([2, 4, 6], gate=[4]))
def test_messages_of_any_length_arrive_in_any_layout(world: int) -> None:
    forked_ranks(_talks, world)


def _lets_one_stay_behind() -> tuple[float, float]:
    """Exchange while rank 1 is late; return when this rank began, and when it was done."""
    ranks = ranks_of(None, "late")
    ranks.exchange(None)
    if dist.get_rank() == 1:
        time.sleep(1)
    started = time.monotonic()
    assert ranks.all_reduce(1, int.__add__) == 3
    return started, time.monotonic()


def test_ranks_wait_for_one_that_is_late() -> None:
    first, late, third = forked_ranks(_lets_one_stay_behind, 3)
    assert min(first[1], third[1]) > late[0]


# -- lines of two ----------------------------------------------------------------------------------


def _talks_over_lines() -> tuple[list[int], int]:
    """Send along a ring of channels in a thread while the ranks agree; return what came."""
    ranks = ranks_of(None, "ring").dedicated("lines", 30.0, "DCP_MEM_TIMEOUT")
    before, after = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    came = [bytearray(9), bytearray(4)]

    def send() -> None:
        line = ranks.channel(ranks.rank, after)
        for passing_on in [
            line.send(bytearray([ranks.rank] * 9)),
            line.send(bytearray([100 + ranks.rank] * 4)),
        ]:
            passing_on.wait()

    thread = threading.Thread(target=send)
    thread.start()
    line = ranks.channel(before, ranks.rank)
    for message in [line.receive(data) for data in came]:
        message.wait()
    thread.join()
    return [*came[0], *came[1]], ranks.all_reduce(1, int.__add__)


def test_lines_carry_bytes_in_order_each_by_itself() -> None:
    for rank, (came, size) in enumerate(forked_ranks(_talks_over_lines, 3)):
        before = (rank - 1) % 3
        assert came == [before] * 9 + [100 + before] * 4
        assert size == 3


def _waits_on_a_line_that_is_closed() -> tuple[float, int]:
    """How long the other end waited, and what comes over the line that both make anew."""
    save_ranks = ranks_of(None, "ring")
    ranks = save_ranks.dedicated("lines", 60.0, "DCP_MEM_TIMEOUT")
    line = ranks.channel(0, 1)
    # Both ends are connected now: an end that still connects would learn of the close elsewhere.
    save_ranks.all_reduce(1, int.__add__)
    started = time.monotonic()
    if ranks.rank == 0:
        line.close()
        del line
    else:
        assert isinstance(raised_by(lambda: line.receive(bytearray(9)).wait()), RuntimeError)
    seconds = time.monotonic() - started
    ranks.leave("the line is closed")
    save_ranks.all_reduce(1, int.__add__)
    again = save_ranks.dedicated("lines", 60.0, "DCP_MEM_TIMEOUT")
    message = bytearray([7 if ranks.rank == 0 else 0])
    line = again.channel(0, 1)
    (line.send if ranks.rank == 0 else line.receive)(message).wait()
    return seconds, message[0]


def test_who_waits_on_a_line_hears_at_once_that_it_is_closed_and_the_next_set_has_another() -> None:
    for seconds, came in forked_ranks(_waits_on_a_line_that_is_closed, 2):
        assert seconds < SOON
        assert came == 7


# -- ranks that die --------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Ranks], object]] = {
    "exchange": lambda ranks: ranks.exchange(b"x" * 5000),
    "all_reduce": lambda ranks: ranks.all_reduce(1, int.__add__),
    "gather": lambda ranks: ranks.gather(b"x" * 5000),
    "reduce": lambda ranks: ranks.reduce(b"x" * 5000, max),
    "broadcast": lambda ranks: ranks.broadcast(b"x" * 5000),
    "scatter": lambda ranks: ranks.scatter([b"x" * 5000] * ranks.size),
    "tell_leaders": lambda ranks: ranks.tell_leaders(b"x" * 5000),
}
SOON = 30.0
"""Seconds; the time-out of the ranks is 600."""


def _die_on_the_wire(*, within: bool) -> None:
    """Let this process be killed in front of its next message, or within the next one it sends."""
    receive = TcpWire.receive

    def send_half(wire: TcpWire, ranks: Sequence[int], data: Any) -> None:
        if within:
            half = len(data).to_bytes(LENGTH_NBYTES, "little") + bytes(data)[: len(data) // 2]
            for link in wire._peers.connected(ranks, time.monotonic() + SOON):
                link._connection.send(half)
        os.kill(os.getpid(), signal.SIGKILL)

    def receive_or_die(wire: TcpWire, ranks: Sequence[int]) -> list[Any]:
        if not within:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(wire, ranks)

    patch = pytest.MonkeyPatch()  # never undone: the process dies
    patch.setattr(TcpWire, "send", send_half)
    patch.setattr(TcpWire, "receive", receive_or_die)


def _loses_a_rank(operation: str, victim: int, within: bool, store: str) -> tuple[str, float, int]:
    """Return which call failed ("at once" or "later"), the seconds, and the survivors' next sum."""
    world, rank = dist.get_world_size(), dist.get_rank()
    nodes = [str(other // 2) for other in range(world)]
    ranks = ranks_of(None, "dying")
    ranks.set_nodes(nodes)
    assert ranks.all_reduce(1, int.__add__) == world
    if rank == victim:
        _die_on_the_wire(within=within)
    started = time.monotonic()
    failed = "at once" if _fails(OPERATIONS[operation], ranks) else ""
    failed = failed or ("later" if _fails(OPERATIONS["all_reduce"], ranks) else "")
    seconds = time.monotonic() - started
    dist.destroy_process_group()
    number, size = rank - (rank > victim), world - 1
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=number, world_size=size)
    return failed, seconds, ranks_of(None, "dying").all_reduce(1, int.__add__)


def _fails(act: Callable[[Ranks], object], ranks: Ranks) -> bool:
    try:
        act(ranks)
    except RankFailed:
        return True
    return False


@pytest.mark.parametrize(
    ("operation", "victim", "within"),
    [
        (operation, victim, within)
        for operation in OPERATIONS
        for victim in (0, 1, 2)  # the root, a rank beside it, and another node's leader
        for within in ((False, True) if operation in ("exchange", "all_reduce") else (False,))
        if (operation, victim) != ("tell_leaders", 1)  # which has no part in it
    ],
)
def test_a_rank_that_is_killed_fails_the_others_soon_and_they_talk_on_without_it(
    operation: str, victim: int, within: bool, tmp_path: Path
) -> None:
    killed = forked(_loses_a_rank, 4, operation, victim, within, str(tmp_path / "store"))
    outcomes = [
        one for rank, one in enumerate(killed.join(timeout=90, killed={victim})) if rank != victim
    ]
    for failed, seconds, together in outcomes:
        assert failed, "a rank noticed nothing"
        assert seconds < SOON
        assert together == 3
    # No rank has a result that needs all ranks.
    if operation in ("exchange", "all_reduce"):
        assert {failed for failed, _, _ in outcomes} == {"at once"}


# -- what it costs ---------------------------------------------------------------------------------


class _Counting:
    """Counts the bytes that leave this rank."""

    def __init__(self) -> None:
        self.sent, self._send = 0, TcpWire.send

    def send(self, wire: TcpWire, ranks: Sequence[int], data: Any) -> None:
        self.sent += (len(data) + LENGTH_NBYTES) * len(ranks)
        self._send(wire, ranks, data)


def _settle() -> None:
    """Wait until all slots are prepared, those that the leader freed and the background ones."""
    dist.barrier()
    wait_for_spare_slots()
    time.sleep(0.1)
    dist.barrier()


def _count_steady_saves(job: Job, tensors: int) -> list[int]:
    """Count the bytes that this rank sends in three equal saves, and in the first of all."""
    counting = _Counting()

    def counted(wire: TcpWire, ranks: Sequence[int], data: Any) -> None:
        counting.send(wire, ranks, data)

    pytest.MonkeyPatch().setattr(TcpWire, "send", counted)
    state = {f"layer.{number}": torch.full((4,), float(number)) for number in range(tensors)}
    counts = []
    with job.writer(keep_memory=1) as writer:
        for step in range(6):
            before = counting.sent
            dcp_mem.save(
                {**state, "step": step}, checkpoint_id=f"step-{step}", storage_writer=writer
            )
            counts.append(counting.sent - before)
            _settle()
    return [*counts[3:], counts[0]]


@pytest.mark.parametrize("world", with_variants([2, 4, 8], gate=[4]))
def test_a_steady_save_sends_less_than_a_kilobyte_a_rank_however_many_tensors_there_are(
    memory_job: Job, world: int
) -> None:
    found = {
        tensors: forked_ranks(_count_steady_saves, world, memory_job, tensors, timeout=100)
        for tensors in (10, 2000)
    }
    totals = {
        tensors: [sum(of_ranks) for of_ranks in zip(*counts, strict=True)]
        for tensors, counts in found.items()
    }
    for few, many in zip(totals[10][:3], totals[2000][:3], strict=True):
        assert abs(many - few) < 10 * world, "numbers have other digits, and no more"
        assert 0 < many <= 1024 * world
    assert totals[2000][3] > 50 * 2000, "the first save's columns weren't counted"


# -- what is exchanged, and when -------------------------------------------------------------------


def _exchanges(saves: Callable[[], object]) -> tuple[int, str]:
    """How often all ranks wrote to all others within, and what it raised."""
    with pytest.MonkeyPatch.context() as patch:
        counted: list[object] = []
        exchange = job_ranks.JobRanks.exchange

        def counting(ranks: job_ranks.JobRanks, value: T) -> list[T]:
            counted.append(value)
            return exchange(ranks, value)

        patch.setattr(job_ranks.JobRanks, "exchange", counting)
        error = raised_by(saves)
    _settle()
    return len(counted), "" if error is None else f"{type(error).__name__}: {error}"


def _state(step: int) -> dict[str, Any]:
    """Byte items become longer with every step, and rank 1 has more of them."""
    rank = dist.get_rank()
    return {
        "w": torch.full((300,), float(step)),
        f"own.{rank}": "x" * step * (rank + 1),
        "step": step,
    }


def _saves_steadily(job: Job, road: str) -> list[tuple[int, str]]:
    with job.writer(keep_memory=2) as writer:
        found = [
            _exchanges(
                partial(SAVES[road], _state(step), checkpoint_id=f"{step}", storage_writer=writer)
            )
            for step in range(9)
        ]
        state = _state(0)
        dcp_mem.load(state, storage_reader=job.reader())
        assert state["step"] == 8
        assert torch.equal(state["w"], torch.full((300,), 8.0))
        assert state[f"own.{dist.get_rank()}"] == "x" * 8 * (dist.get_rank() + 1)
    with job.writer(keep_memory=2, memory_limit=256 << 20) as writer:  # room is agreed on
        arguments = {"checkpoint_id": "limited", "storage_writer": writer}
        return [*found, _exchanges(partial(SAVES[road], _state(9), **arguments))]


@pytest.mark.parametrize("road", SAVES)
def test_a_save_like_the_one_before_needs_no_exchange_of_all_with_all(
    memory_job: Job, road: str
) -> None:
    for found in forked_ranks(_saves_steadily, 3, memory_job, road):
        assert found[4:9] == [(0, "")] * 5
        assert found[9][0] > 0, "the exchanges of a save that agrees on its room weren't counted"


@pytest.mark.parametrize("road", ["dcp.save", "dcp_mem.save"])
@on_ranks(2)
def test_whatever_is_out_of_the_ordinary_on_one_rank_is_settled_by_all_and_the_next_save_is_as_usual(  # noqa: E501
    memory_job: Job, road: str
) -> None:
    rank = dist.get_rank()
    found: dict[str, tuple[int, str]] = {}
    with memory_job.writer(
        keep_memory=1, overwrite=False, memory_limit="64MiB", on_full="skip"
    ) as writer:
        step = 0

        def save(name: str, state: dict[str, Any]) -> object:
            return SAVES[road](state, checkpoint_id=name, storage_writer=writer)

        def note(what: str, name: str, state: dict[str, Any]) -> None:
            nonlocal step
            for _ in range(3):
                step += 1
                usual = _exchanges(partial(save, f"usual-{step}", _state(1)))
                assert not usual[1]
            found[f"before {what}"] = usual
            found[what] = _exchanges(partial(save, name, state))

        note("other names", f"rank-{rank}", _state(1))
        note(
            "another structure on rank 1",
            "other",
            {**_state(1), **({"more": torch.ones(2)} if rank else {})},
        )
        note("one that is there", f"usual-{step + 3}", _state(1))
        note("too large for memory", "large", {"large": torch.zeros(32 << 20)})
        step += 1
        found["after all"] = _exchanges(partial(save, f"usual-{step}", _state(1)))
        names = [status.name for status in writer.status() if status.in_memory]
        assert names[0] == f"usual-{step}"
        dist.barrier()
    for what in (
        "other names",
        "another structure on rank 1",
        "one that is there",
        "too large for memory",
    ):
        assert found[f"before {what}"] == (0, ""), what
        # Another structure needs no exchange of all with all: the ballot tells all of it.
        assert (found[what][0] > 0) == (what != "another structure on rank 1"), what
    assert "different checkpoint ids: rank-0, rank-1" in found["other names"][1]
    assert found["another structure on rank 1"][1] == ""
    assert found["one that is there"][1].startswith("CheckpointExists")
    assert found["too large for memory"][1] == ""  # it is skipped
    assert found["after all"][1] == ""
