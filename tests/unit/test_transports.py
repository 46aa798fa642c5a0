"""Every transport keeps the promises of `Channel`; ranks settle which one they take."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from dcp_mem import ConfigError
from dcp_mem.cli.main import main
from dcp_mem.comm import ranks_of
from dcp_mem.comm.addresses import listening_socket, rdma_devices
from dcp_mem.comm.greetings import Door, accepted, dialled
from dcp_mem.common.log import log
from dcp_mem.nixl import agents, pairing
from dcp_mem.options import settings
from tests.support.processes.forks import forked, forked_ranks, on_ranks, raised_by
from tests.support.transports import Ends, Rank, TransportConformance, in_pair

needs_nixl = pytest.mark.skipif(
    bool(why := agents.import_trouble()), reason=f"NIXL can't be imported: {why}"
)


class TestTcp(TransportConformance):
    name = "tcp"


@needs_nixl
class TestNixlByMemory(TransportConformance):
    name = "nixl"
    reads_stopped_peers = True


@needs_nixl
class TestNixlByTcp(TransportConformance):
    name = "nixl"
    env: ClassVar[dict[str, str]] = {"UCX_TLS": "tcp"}


# -- which one is taken ----------------------------------------------------------------------------

Change = Callable[[pytest.MonkeyPatch, int], None]


def _taken(choice: str, change: Change) -> tuple[str, str, bool]:
    """What two ranks take, what the log says of it, and whether a message comes by it."""
    lines: list[str] = []
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "warning", lambda text, *args: lines.append(text % args))
        change(patch, rank)
        ranks = ranks_of(None, "taken")
        channels = [ranks.channel(0, 1, once, choice) for once in ("first", "second")]
    came = bytearray(100_000)
    for channel in channels:
        if rank == 0:
            channel.send(bytearray(b"x" * len(came))).wait()
            channel.receive(bytearray(1)).wait()
        else:
            channel.receive(came).wait()
            channel.send(bytearray(b"e")).wait()
    names = {type(channel).__name__ for channel in channels}
    return "/".join(names), "\n".join(lines), rank == 0 or came == b"x" * len(came)


def _nothing(_: pytest.MonkeyPatch, rank: int) -> None:
    return


def _second_has_no_nixl(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        patch.setattr(pairing, "import_trouble", lambda: "ModuleNotFoundError: nixl")


def _other_machines(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(pairing, "_machine", lambda: f"machine {rank}")


def _one_card() -> tuple[str, ...]:
    return ("mlx5_0",)


def _first_has_a_card(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 0:
        patch.setattr(pairing, "rdma_devices", _one_card)


def _both_have_cards(patch: pytest.MonkeyPatch, rank: int) -> None:
    _other_machines(patch, rank)
    patch.setattr(pairing, "rdma_devices", _one_card)


def _second_may_not_read(patch: pytest.MonkeyPatch, rank: int) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("process_vm_readv: Operation not permitted")

    if rank == 1:
        patch.setattr(agents.Sink, "read", refused)


@pytest.mark.parametrize(
    ("choice", "change", "taken", "said"),
    [
        ("tcp", _both_have_cards, "TcpChannel", ["", ""]),
        ("auto", _nothing, "TcpChannel", ["", ""]),
    ],
)
def test_tcp_is_taken_where_there_is_nothing_better(
    choice: str, change: Change, taken: str, said: list[str]
) -> None:
    _assert_taken(choice, change, taken, said)


@needs_nixl
@pytest.mark.parametrize(
    ("choice", "change", "taken", "said"),
    [
        ("nixl", _nothing, "NixlChannel", ["", ""]),
        ("auto", _both_have_cards, "NixlChannel", ["", ""]),
        ("auto", _first_has_a_card, "TcpChannel", ["this machine has no card that does RDMA", ""]),
        ("nixl", _second_has_no_nixl, "TcpChannel", ["ModuleNotFoundError"] * 2),
        ("nixl", _other_machines, "TcpChannel", ["over TCP, UCX aborts"] * 2),
        ("nixl", _second_may_not_read, "TcpChannel", ["a test of NIXL between", "not permitted"]),
    ],
)
def test_both_ranks_take_nixl_or_both_say_once_why_not(
    choice: str, change: Change, taken: str, said: list[str]
) -> None:
    _assert_taken(choice, change, taken, said)


def _assert_taken(choice: str, change: Change, taken: str, said: list[str]) -> None:
    for (name, lines, came), wanted in zip(
        forked_ranks(_taken, 2, choice, change, timeout=100), said, strict=True
    ):
        assert (name, came) == (taken, True)
        assert wanted in lines
        assert len(lines.splitlines()) == bool(wanted)


def test_only_cards_with_a_link_count(tmp_path: Path) -> None:
    for card, port, state in (
        ("mlx5_0", "1", "4: ACTIVE\n"),
        ("mlx5_0", "2", "4: ACTIVE\n"),
        ("mlx5_1", "1", "1: DOWN\n"),
        ("rdmap0s6", "1", "4: ACTIVE\n"),
    ):
        directory = tmp_path / card / "ports" / port
        directory.mkdir(parents=True)
        (directory / "state").write_text(state)
    assert rdma_devices(str(tmp_path)) == ("mlx5_0", "rdmap0s6")
    assert rdma_devices(str(tmp_path / "absent")) == ()


def test_the_choice_comes_from_the_argument_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DCP_MEM_TRANSPORT", raising=False)
    assert settings(None, job="job").transport == "tcp"
    monkeypatch.setenv("DCP_MEM_TRANSPORT", "nixl")
    assert settings(None, job="job").transport == "nixl"
    assert settings(None, job="job", transport="tcp").transport == "tcp"
    assert settings(None, job="job", transport="gloo").transport == "tcp"
    for wrong in ("NIXL", "", "udp"):
        with pytest.raises(ConfigError, match="choose 'auto', 'nixl' or 'tcp'"):
            settings(None, job="job", transport=wrong)


# -- another package's transport ------------------------------------------------------------------

FAST_WIRE = """
from dcp_mem.comm.transports import TcpChannel
from dcp_mem.comm.transports import TransportUnusable

class FastChannel(TcpChannel):
    pass

def unplugged(pair):
    raise TransportUnusable("its cable is unplugged")
"""
FAST_WIRE_POINTS = """
[dcp_mem.transports]
fast = fast_wire:FastChannel
unplugged = fast_wire:unplugged
torn = fast_wire:nothing
"""


@pytest.fixture
def fast_wire(tmp_path: Path) -> Path:
    """Where a package is installed that has transports."""
    metadata = tmp_path / "fast_wire-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fast_wire\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(FAST_WIRE_POINTS)
    (tmp_path / "fast_wire.py").write_text(FAST_WIRE)
    return tmp_path


def _installed(site: Path, patch: pytest.MonkeyPatch, _: int) -> None:
    patch.syspath_prepend(site)


@pytest.mark.parametrize(
    ("choice", "taken", "said"),
    [("fast", "FastChannel", ""), ("unplugged", "TcpChannel", "its cable is unplugged")],
)
def test_a_transport_of_another_package_is_taken_or_both_ranks_say_why_not(
    choice: str, taken: str, said: str, fast_wire: Path
) -> None:
    _assert_taken(choice, partial(_installed, fast_wire), taken, [said, said])


@on_ranks(2)
def test_a_transport_that_cannot_be_imported_is_named_with_its_package(fast_wire: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(fast_wire)
        error = str(raised_by(lambda: ranks_of(None, "torn").channel(0, 1, "", "torn")))
    assert error.startswith("transport='torn' is fast_wire:nothing, which can't be imported: ")


def test_names_of_other_packages_are_choices_beside_ours(
    fast_wire: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError):
        settings(None, job="job", transport="fast")
    monkeypatch.syspath_prepend(fast_wire)
    assert settings(None, job="job", transport="fast").transport == "fast"
    choices = "choose 'auto', 'fast', 'nixl', 'tcp', 'torn' or 'unplugged'"
    with pytest.raises(ConfigError, match=choices):
        settings(None, job="job", transport="slow")
    told = CliRunner().invoke(main, ["doctor", "--peers", "--transport", "slow"])
    assert (told.exit_code, choices in told.output) == (2, True)


# -- what only NIXL's channels do ------------------------------------------------------------------


def _waits_until_closed(ends: Ends, *_: object) -> tuple[str, bool]:
    channel = ends.connect(is_sender=True)
    message = channel.receive(bytearray(1))
    closing = threading.Timer(0.3, channel.close)
    closing.start()
    began = time.monotonic()
    error = raised_by(message.wait)
    closing.join()
    return str(error), time.monotonic() - began < 10


def _stays(ends: Ends, *_: object) -> None:
    channel = ends.connect(is_sender=False)
    raised_by(channel.receive(bytearray(1)).wait)


def _sends_too_much(ends: Ends, *_: object) -> str:
    channel = ends.connect(is_sender=True)
    message = channel.send(bytearray(300_000))
    return str(raised_by(message.wait))


def _expects_less(ends: Ends, *_: object) -> None:
    channel = ends.connect(is_sender=False)
    error = raised_by(channel.receive(bytearray(200_000)).wait)
    assert str(error) == "a message of 300000 bytes came where 200000 bytes were to come"


def _lives_on_in_a_child(ends: Ends, *_: object) -> None:
    ends.connect(is_sender=False).send(bytearray(b"c")).wait()
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _hears_of_the_death(ends: Ends, *_: object) -> tuple[str, bool]:
    channel = ends.connect(is_sender=True)
    channel.receive(bytearray(1)).wait()
    began = time.monotonic()
    error = raised_by(channel.receive(bytearray(1)).wait)
    return str(error), time.monotonic() - began < 4


def _does_not_reach_a_new_source(ends: Ends, *_: object) -> tuple[str, float, int]:
    """NIXL connects to a peer whose cable has been pulled, and waits for ever."""
    channel = ends.connect(is_sender=True)
    hangs = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agents._api().nixl_agent, "add_remote_agent", lambda *_: hangs.wait())
        channel.send(bytearray(b"g")).wait()
        began = time.monotonic()
        error = raised_by(channel.receive(bytearray(300_000)).wait)
        seconds = time.monotonic() - began
        channel.close()
        hangs.set()
    return str(error), seconds, ends.silences


def _offers_from_a_new_source(ends: Ends, *_: object) -> None:
    channel, data = ends.connect(is_sender=False), bytearray(300_000)
    channel.receive(bytearray(1)).wait()
    with channel.registered(data):
        pass  # the source that the two ranks have tried is ended with this
    raised_by(channel.send(data).wait)


@needs_nixl
def test_a_peer_that_nixl_connects_to_in_vain_is_an_error_after_the_time_out() -> None:
    arguments = ("nixl", 4.0, _does_not_reach_a_new_source, _offers_from_a_new_source, ())
    (error, seconds, silences), code = forked(in_pair, *arguments, timeout=100)
    assert error == "the peer was silent for 4 s"
    assert 3.5 <= seconds < 20
    assert (silences, code) == (1, 0)


def _pair(own: Rank, peers: Rank) -> tuple[Any, int]:
    found: tuple[Any, int] = forked(in_pair, "nixl", 60.0, own, peers, (), timeout=100)
    return found


@needs_nixl
def test_closing_a_channel_ends_a_wait_in_another_thread() -> None:
    assert _pair(_waits_until_closed, _stays) == (("the channel is closed", True), 0)


@needs_nixl
def test_lengths_that_differ_are_an_error_on_both_ranks() -> None:
    error, code = _pair(_sends_too_much, _expects_less)
    assert code == 0
    assert error == "the peer has closed its end, or is gone"


@needs_nixl
def test_a_dead_peer_is_noticed_though_a_child_of_it_lives() -> None:
    (error, is_at_once), _ = _pair(_hears_of_the_death, _lives_on_in_a_child)
    assert (error, is_at_once) == ("the peer has closed its end, or is gone", True)


def test_a_listener_that_may_open_no_more_files_is_an_error_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Door(listening_socket())) as door, socket.create_connection(door.address) as peer:
        resource.setrlimit(resource.RLIMIT_NOFILE, (peer.fileno(), hard))
        try:
            with pytest.raises(RuntimeError, match="Too many open files"):
                accepted(door, time.monotonic() + 600)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_that_say_nothing_hold_up_no_peer() -> None:
    with ExitStack() as stack:
        door = stack.enter_context(closing(Door(listening_socket())))
        for _ in range(200):
            stack.enter_context(socket.create_connection(door.address))
        with ThreadPoolExecutor(1) as pool:
            dialling = pool.submit(dialled, door.address, door.token, time.monotonic() + 600)
            with accepted(door, time.monotonic() + 600)[1] as came, dialling.result() as gone:
                gone.sendall(b"hello")
                assert came.recv(5, socket.MSG_WAITALL) == b"hello"
