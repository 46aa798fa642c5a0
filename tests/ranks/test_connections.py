"""Connections between ranks: few of them, made when needed, and errors that name who is lost."""

import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import RankFailed
from dcp_mem.comm import Ranks, ranks_of
from dcp_mem.comm.addresses import (
    SOCKETS_OF_A_RANK,
    check_open_files,
    listening_on_node,
    listening_socket,
)
from dcp_mem.comm.greetings import MOST_GREETINGS, Door, accepted
from dcp_mem.comm.peers import PeerLost, Peers, TcpWire
from dcp_mem.comm.relay import tree_of
from dcp_mem.comm.timed_store import TimedStore
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.replicating.plan import copies_of, stripes_of
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked_ranks, raised_by
from tests.support.processes.kill_targets import forked, wait_for
from tests.support.variants import with_variants

MANY = 48
SOON = 30.0
"""Seconds; the time-out of the ranks is 600 where a test says nothing."""


def _sockets() -> int:
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    # One of them was the listing's own, and is gone.
    return sum(os.readlink(link).startswith("socket:") for link in links if link.is_symlink())


# -- many ranks ------------------------------------------------------------------------------------


def _saves_and_loads_among_many(job: Job) -> tuple[int, int]:
    """Return the sockets that this has opened, and those that the ranks' first call has."""
    rank, before = dist.get_rank(), _sockets()
    ranks_of(None, "many").exchange(rank)
    first = _sockets() - before
    state = {"w": torch.full((8,), float(rank)), "step": 3, f"own.{rank}": rank}
    with job.writer(agent="thread", persist=False) as writer:
        for step in range(3):
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    loaded = {"step": 0, f"own.{rank}": -1}
    dcp_mem.load(loaded, storage_reader=job.reader())
    assert loaded == {"step": 3, f"own.{rank}": rank}
    return _sockets() - before, first


def test_many_ranks_save_and_load_over_few_connections(memory_job: Job) -> None:
    found = forked_ranks(
        _saves_and_loads_among_many, MANY, memory_job, env={"FORK_BACKEND": "none"}, timeout=240
    )
    assert max(sockets for sockets, _ in found) <= SOCKETS_OF_A_RANK
    # A parent, eight children, a listener; and a thread's own connection to the store.
    assert max(first for _, first in found) <= 1 + 8 + 1 + 1


def _opens_channels() -> tuple[int, int]:
    """Return the sockets that two channels have opened, and that are left when they are closed."""
    ranks = ranks_of(None, "channels")
    ranks.all_reduce(1, int.__add__)
    before = _sockets()
    channels = [ranks.channel(0, 1, once) for once in ("first", "second")]
    byte = bytearray(1)
    for channel in channels:
        (channel.send if dist.get_rank() == 0 else channel.receive)(byte).wait()
    ranks.all_reduce(1, int.__add__)
    opened = _sockets() - before
    for channel in channels:
        channel.close()
    del channel
    channels.clear()
    ranks.all_reduce(1, int.__add__)
    return opened, _sockets() - before


def test_a_channel_keeps_no_connection_to_the_store() -> None:
    """Else the store's host would have two for each pair of ranks with copies."""
    env = {"FORK_BACKEND": "none", "DCP_MEM_TRANSPORT": "tcp"}
    for opened, left in forked_ranks(_opens_channels, 2, env=env):
        assert opened == 2
        assert left == 0


def _awaits_one_that_is_killed(act: Callable[[Ranks], object]) -> str:
    ranks = ranks_of(None, "awaits")
    ranks.all_reduce(1, int.__add__)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return str(raised_by(lambda: act(ranks)))


def _sends(ranks: Ranks) -> None:
    ranks.channel(0, 1)


def _receives(ranks: Ranks) -> None:
    ranks.channel(1, 0)


def _gives_to_a_neighbour(ranks: Ranks) -> None:
    accepted(Door(listening_on_node()), time.monotonic() + 600, ranks.look)


@pytest.mark.parametrize("act", [_sends, _receives, _gives_to_a_neighbour])
def test_nobody_waits_for_a_dead_rank_to_connect(act: Callable[[Ranks], object]) -> None:
    survivor, _ = forked(_awaits_one_that_is_killed, 2, act).join(killed={1})
    assert str(survivor).startswith("rank 1: its connection has closed")


_RANKS_PER_NODE = 8


def _sockets_in_tree(nodes: Sequence[str], rank: int) -> int:
    tree = tree_of(nodes, rank)
    return len(tree.children) + (tree.parent is not None) + bool(tree.children)


@pytest.mark.parametrize(
    "redundancy",
    [Redundancy(copies=1), Redundancy(copies=4), Redundancy(parity=2), Redundancy(parity=4)],
    ids=str,
)
@pytest.mark.parametrize("world", [80, 1024, 4096])
def test_no_rank_of_a_large_job_has_more_sockets(redundancy: Redundancy, world: int) -> None:
    """By the same rules that ranks connect by: saves, loads, copies, channels, and the store."""
    nodes = tuple(str(rank // _RANKS_PER_NODE) for rank in range(world))
    sizes = tuple((1 << 29) + rank * 12345 for rank in range(world))
    copies = copies_of(nodes, nodes, sizes, redundancy.copies)
    pairs = {(copy.sender, copy.receiver) for copy in copies}
    if redundancy.parity:
        pairs |= {
            (share.rank, stripe.keeper)
            for stripe in stripes_of(nodes, nodes, sizes, redundancy.parity)
            for share in stripe.shares
            if share.rank != stripe.keeper
        }
    channels = [0] * world
    for pair in pairs:
        for rank in pair:
            channels[rank] += 1
    alone = [str(rank) for rank in range(world)]
    most = max(
        2 * _sockets_in_tree(nodes, rank) + _sockets_in_tree(alone, rank) + channels[rank] + 2
        for rank in range(min(world, 24 * _RANKS_PER_NODE))  # those further down have fewer
    )
    assert most <= SOCKETS_OF_A_RANK


# -- lost ranks have names -------------------------------------------------------------------------


class _Lost(NamedTuple):
    failures: Sequence[tuple[int, str]]
    seconds: float


def _loses(victim: int, how: int) -> _Lost:
    """Agree once; then the victim gets a signal, and the others agree in vain."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = ranks_of(None, "lost")
    ranks.set_nodes([str(other // 2) for other in range(world)])
    assert ranks.all_reduce(1, int.__add__) == world
    if rank == victim:
        os.kill(os.getpid(), how)
    started = time.monotonic()
    try:
        ranks.all_reduce(1, int.__add__)
    except RankFailed as error:
        return _Lost(error.failures, time.monotonic() - started)
    raise AssertionError("the ranks have agreed without one of them")


@pytest.mark.parametrize("victim", with_variants([0, 1, 2, 5], gate=[0, 5]))
def test_all_ranks_name_the_rank_that_was_killed(victim: int) -> None:
    killed = forked(_loses, 6, victim, signal.SIGKILL)
    for rank, lost in enumerate(killed.join(timeout=90, killed={victim})):
        if rank != victim:
            assert [failed for failed, _ in lost.failures] == [victim]
            assert "its connection has closed" in lost.failures[0][1]
            assert lost.seconds < SOON


@pytest.mark.parametrize("victim", [0, 5])
def test_all_ranks_name_the_rank_that_is_silent(victim: int) -> None:
    seconds = 10.0
    stopped = forked(_loses, 6, victim, signal.SIGSTOP, env={"DCP_MEM_TIMEOUT": str(seconds)})
    stopped.wait_until_stopped(victim)
    others = [rank for rank in range(6) if rank != victim]
    wait_for(lambda: all(not stopped.is_running(rank) for rank in others), "the others to end", 60)
    stopped.send(victim, signal.SIGKILL)
    outcomes = stopped.join(timeout=30, killed={victim})
    for rank in others:
        (failure,) = outcomes[rank].failures
        assert failure[0] == victim
        assert "it was silent for" in failure[1]
        assert outcomes[rank].seconds < 1.5 * seconds


def _begins_late() -> _Lost:
    """A rank is gone; the others begin their next call one after the other."""
    ranks_of(None, "late").all_reduce(1, int.__add__)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3.0 * dist.get_rank())
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks_of(None, "late").all_reduce(1, int.__add__)
    return _Lost(caught.value.failures, time.monotonic() - started)


def test_a_rank_that_begins_a_call_when_others_have_given_it_up_fails_at_once() -> None:
    first, second, _ = forked(_begins_late, 3).join(timeout=90, killed={2})
    for lost in (first, second):
        assert [rank for rank, _ in lost.failures] == [2]
        assert lost.seconds < SOON


def _fails_before_it_knows_the_nodes() -> int:
    ranks = ranks_of(None, "out of step")
    assert ranks.all_reduce(1, int.__add__) == 2
    if dist.get_rank() == 0:
        ranks.set_nodes(["a", "b"])
    else:
        ranks.leave("it has had enough")
    with pytest.raises(RankFailed, match="it has had enough"):
        ranks.all_reduce(1, int.__add__)
    dist.barrier()
    ranks = ranks_of(None, "out of step")
    ranks.set_nodes(["a", "b"])
    return ranks.all_reduce(1, int.__add__)


def test_ranks_meet_again_where_one_had_failed_before_it_knew_the_nodes() -> None:
    env = {"DCP_MEM_TIMEOUT": "20"}
    assert forked_ranks(_fails_before_it_knows_the_nodes, 2, env=env) == [2, 2]


# -- greetings -------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return dist.HashStore()


def _peers(store: dist.Store, rank: int, *, given_up: bool = False) -> Peers:
    return Peers("two", rank, TimedStore(store, 10.0), lambda: given_up)


@pytest.fixture
def pair(store: dist.Store) -> Iterator[tuple[Peers, Peers]]:
    """Two ranks of a job, in this process."""
    with closing(_peers(store, 0)) as first, closing(_peers(store, 1)) as second:
        yield first, second


def _listens(peers: Peers) -> tuple[str, int]:
    """Have a rank listen; return where."""
    peers._listen()
    assert peers._door is not None
    return peers._door.address


def _meet(first: Peers, second: Peers) -> list[list[bytes]]:
    """Let both ranks send and receive, each in a thread; return what came."""
    came: list[list[bytes]] = [[], []]

    def talk(rank: int, peers: Peers) -> None:
        wire = TcpWire(peers, rank, time.monotonic() + 10)
        wire.send([1 - rank], b"from %d" % rank)
        came[rank] = [bytes(data) for data in wire.receive([1 - rank])]

    threads = [threading.Thread(target=talk, args=one) for one in ((0, first), (1, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


def _strangers(stack: ExitStack, address: tuple[str, int], count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


def test_a_strangers_connection_is_closed_and_disturbs_nobody(pair: tuple[Peers, Peers]) -> None:
    with ExitStack() as stack:
        strangers = _strangers(stack, _listens(pair[0]), 3)
        strangers[0].sendall(b"x" * 52)  # a greeting without a proof
        strangers[1].sendall(b"GET /")  # shorter than a greeting
        strangers[2].close()
        assert _meet(*pair) == [[b"from 1"], [b"from 0"]]
        strangers[0].settimeout(SOON)
        assert strangers[0].recv(1) == b""
        for peers in pair:
            peers.close()
        strangers[1].settimeout(SOON)
        with suppress(ConnectionResetError):  # it had sent what nobody read
            assert strangers[1].recv(1) == b""


def test_silent_strangers_do_not_use_up_this_process_s_descriptors(
    pair: tuple[Peers, Peers],
) -> None:
    with ExitStack() as stack:
        _strangers(stack, _listens(pair[0]), 2 * MOST_GREETINGS)
        before = _sockets()
        assert _meet(*pair) == [[b"from 1"], [b"from 0"]]
        assert _sockets() - before <= MOST_GREETINGS + 2


def test_a_stranger_that_speaks_at_last_where_many_are_silent_disturbs_nobody(
    pair: tuple[Peers, Peers],
) -> None:
    """The oldest of as many as are heard sends something while a new one arrives."""
    with ExitStack() as stack:
        address = _listens(pair[0])
        strangers = _strangers(stack, address, MOST_GREETINGS)
        assert pair[0]._door is not None
        for _ in strangers:
            pair[0]._door.welcome(SOON)
        strangers[0].sendall(b"x")
        _strangers(stack, address, 1)
        assert _meet(*pair) == [[b"from 1"], [b"from 0"]]


def test_a_rank_that_does_not_come_is_named(pair: tuple[Peers, Peers]) -> None:
    for peers, other in zip(pair, (1, 0), strict=True):
        with pytest.raises(PeerLost) as caught:
            peers.connected([other], time.monotonic() + 0.3)
        assert caught.value.rank == other


def test_a_rank_that_is_gone_is_named(pair: tuple[Peers, Peers]) -> None:
    """Its address is still in the store."""
    _listens(pair[0])
    pair[0].close()
    with pytest.raises(PeerLost, match=r"rank 0: can't be reached at 127\.0\.0\.1"):
        pair[1].connected([0], time.monotonic() + SOON)


def test_an_address_of_before_a_restart_is_replaced(
    store: dist.Store, pair: tuple[Peers, Peers]
) -> None:
    """The store outlives the ranks, as torchrun's does."""
    before = _peers(store, 0)
    _listens(before)
    before.close()
    first, second = pair
    late = threading.Timer(1.0, lambda: first.connected([1], time.monotonic() + SOON))
    late.start()
    connection = second.connected([0], time.monotonic() + SOON)[0]
    late.join()
    assert first._door is not None
    assert connection._connection.getpeername() == first._door.address


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_ends_when_the_others_have_given_up(store: dist.Store, rank: int) -> None:
    with (
        closing(_peers(store, rank, given_up=True)) as peers,
        pytest.raises(RuntimeError, match="other ranks have given up"),
    ):
        peers.connected([1 - rank], time.monotonic() + 600)


# -- interruptions ---------------------------------------------------------------------------------


def _is_interrupted(patience: float) -> tuple[str, float, int]:
    """A signal's handler raises while rank 1 waits; then both agree again."""
    ranks = ranks_of(None, "interrupted")
    ranks.all_reduce(1, int.__add__)
    if dist.get_rank() == 0:
        time.sleep(patience)
    else:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, patience / 4)
    started, found = time.monotonic(), ""
    try:
        ranks.all_reduce(1, int.__add__)
    except (KeyboardInterrupt, RankFailed) as error:
        found = str(error) or type(error).__name__
    seconds = time.monotonic() - started
    dist.barrier()
    return found, seconds, ranks_of(None, "interrupted").all_reduce(1, int.__add__)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_who_is_interrupted_in_the_middle_leaves_and_the_next_call_is_well() -> None:
    first, second = forked_ranks(_is_interrupted, 2, 2.0)
    # Rank 1 had sent its number, so rank 0 may be done before it learns of the rest.
    assert not first[0] or "rank 1: KeyboardInterrupt" in first[0]
    assert second[0] == "KeyboardInterrupt"
    assert first[1] < SOON
    assert [first[2], second[2]] == [2, 2]


# -- descriptors -----------------------------------------------------------------------------------


def _leaves_a_child_behind(told: str) -> float:
    """Rank 1 forks a child, as data loaders do, and is killed; how long did rank 0 wait?"""
    ranks = ranks_of(None, "forking")
    assert ranks.all_reduce(1, int.__add__) == 2
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            os.setsid()  # else it is ended with the rank's group
            Path(told).write_text(str(os.getpid()))
            time.sleep(SOON * 2)
            os._exit(0)
        while not Path(told).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankFailed):
        ranks.all_reduce(1, int.__add__)
    return time.monotonic() - started


def test_a_forked_child_does_not_hold_its_dead_parents_connections(tmp_path: Path) -> None:
    told = tmp_path / "child"
    killed = forked(_leaves_a_child_behind, 2, str(told))
    try:
        seconds, *_ = killed.join(timeout=90, killed={1})
        assert seconds < SOON
        os.kill(int(told.read_text()), 0)  # the child lives
    finally:
        os.kill(int(told.read_text()), signal.SIGKILL)


def _has_few_descriptors() -> str:
    ranks = ranks_of(None, "few")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    dist.barrier()  # rank 0 has its `ranks` too, before rank 1 fails
    if dist.get_rank() == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks.all_reduce(1, int.__add__)
    assert time.monotonic() - started < SOON
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return str(caught.value)


def test_too_few_open_files_are_an_error_at_the_start_that_says_what_to_do() -> None:
    for text in forked_ranks(_has_few_descriptors, 2):
        assert "rank 1: this process has" in text
        used, needed, limit = map(int, re.findall(r"(?:has|to|limit is) (\d+)", text)[:3])
        assert used + needed > limit == used + 10
        assert f"ulimit -n {max(4096, used + needed)}" in text


def test_an_unlimited_process_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda what: (unlimited, unlimited))
    check_open_files(1 << 14)


# -- addresses -------------------------------------------------------------------------------------


def test_the_interface_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
    with listening_socket() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_interface_that_does_not_exist_is_an_error_that_names_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(RuntimeError, match=r"'nosuch0'.*there are .*lo"):
        listening_socket()


@pytest.mark.parametrize("name", ["no-such-machine.invalid", "192.0.2.1", "localhost"])
def test_a_machine_whose_name_is_no_address_of_its_own_takes_loopback(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    with listening_socket() as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
