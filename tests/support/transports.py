"""The promises of `dcp_mem.comm.collectives.Channel` as tests.

Subclass `TransportConformance` for each transport. A test's two ranks are a fresh process and one
that it forks before either of them connects.
"""

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch.distributed as dist

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.timed_store import MeetingPlace, TimedStore
from dcp_mem.comm.transports import Pair, transport
from tests.support.processes.forks import forked

SIZES = (0, 1, 100, 64 << 10, (64 << 10) + 1, (1 << 20) + 3, 16 << 20, (64 << 20) + 1)
_LARGE = 4 << 20
_LONG, _SHORT = 60.0, 4.0
"""Seconds that a message may wait: so long that a test would fail, and so short that it's done."""
_AT_ONCE = 20.0
"""Seconds within which a test that doesn't wait for the time-out is through, on a busy machine."""


class Ends:
    """Where two ranks of a test meet, and how long their messages wait."""

    def __init__(self, transport: str, seconds: float, directory: str) -> None:
        self.transport, self.seconds, self._directory = transport, seconds, directory
        self.silences = 0

    def connect(self, is_sender: bool, time_: int = 0) -> Channel:
        """Connect for the nth time."""
        store = TimedStore(dist.FileStore(f"{self._directory}/meeting", -1), self.seconds)
        pair = Pair(
            store=MeetingPlace(store, f"{time_}/"),
            is_sender=is_sender,
            seconds=self.seconds,
            on_silence=self._note_silence,
        )
        return transport(self.transport)(pair)

    def _note_silence(self) -> None:
        self.silences += 1


Rank = Callable[..., Any]


def in_pair(transport: str, seconds: float, own: Rank, peers: Rank, args: Sequence[Any]) -> Any:
    """Return what one rank's function returns, and how the other rank has ended."""
    with tempfile.TemporaryDirectory() as directory:
        ends = Ends(transport, seconds, directory)
        peer = os.fork()
        if peer == 0:
            code = 1
            try:
                peers(ends, *args)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        try:
            result = own(ends, peer, *args)
            os.kill(peer, signal.SIGCONT)
            return result, os.waitstatus_to_exitcode(os.waitpid(peer, 0)[1])
        finally:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(peer, signal.SIGKILL)
                os.waitpid(peer, 0)


def _data(number: int, nbytes: int) -> bytearray:
    """Bytes that tell a message from others, and its parts from each other."""
    data = np.arange(nbytes, dtype=np.uint32) * 2654435761 + number * 97
    return bytearray((data >> 13).astype(np.uint8).tobytes())


def _meet(channel: Channel) -> None:
    """Return once the peer has come here, too."""
    received, sent = channel.receive(bytearray(1)), channel.send(bytearray(1))
    received.wait()
    sent.wait()


def _seconds_until_it_raises(act: Callable[[], object]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        act()
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


# -- what is sent ----------------------------------------------------------------------------------


def _sends_each_size(ends: Ends, *_: object) -> None:
    channel = ends.connect(is_sender=True)
    for number, nbytes in enumerate(SIZES):
        channel.send(_data(number, nbytes)).wait()
    channel.receive(bytearray(1)).wait()


def _receives_each_size(ends: Ends, *_: object) -> list[bool]:
    channel, found = ends.connect(is_sender=False), []
    for number, nbytes in enumerate(SIZES):
        came = bytearray(nbytes)
        channel.receive(came).wait()
        found.append(came == _data(number, nbytes))
    channel.send(bytearray(1)).wait()
    return found


def _exchanges(ends: Ends, _: object, is_sender: bool, counts: tuple[int, int]) -> bool:
    """Have messages of all sizes pending in both directions before any is waited for."""
    channel = ends.connect(is_sender)
    rng = np.random.default_rng(7)
    sizes = [int(each) for each in rng.choice([1, 1000, 70_000, 300_000], sum(counts))]
    own, peers = (0, 1) if is_sender else (1, 0)
    came = [bytearray(nbytes) for nbytes in sizes]
    received = [channel.receive(each) for each in came]
    sent_data = [_data(number * 2 + own, nbytes) for number, nbytes in enumerate(sizes)]
    sent = [channel.send(each) for each in sent_data]
    for message in (*reversed(received), *sent):
        message.wait()
    _meet(channel)
    return came == [_data(number * 2 + peers, nbytes) for number, nbytes in enumerate(sizes)]


def _exchanges_as_peer(ends: Ends, counts: tuple[int, int]) -> None:
    assert _exchanges(ends, 0, False, counts)


def _sends_one_buffer_again(ends: Ends, *_: object) -> None:
    channel = ends.connect(is_sender=True)
    data = bytearray(_LARGE)
    with channel.registered(data):
        for number in range(8):
            data[:] = _data(number, _LARGE)
            channel.send(data).wait()
    channel.receive(bytearray(1)).wait()


def _receives_into_one_buffer_again(ends: Ends, *_: object) -> list[bool]:
    channel, found = ends.connect(is_sender=False), []
    came = bytearray(_LARGE)
    with channel.registered(came):
        for number in range(8):
            channel.receive(came).wait()
            found.append(came == _data(number, _LARGE))
    channel.send(bytearray(1)).wait()
    return found


def _sends_registered_again(ends: Ends, *_: object) -> None:
    """Register parts of the same memory again and again, as a slot is for each save."""
    channel, data = ends.connect(is_sender=True), memoryview(_data(0, 4 * _LARGE))
    for number in range(8):
        part = data[number % 2 * 100 : (number % 3 + 2) * _LARGE // 2]
        with channel.registered(part):
            channel.send(part[: 1 << 20]).wait()
            channel.send(part[-(1 << 20) :]).wait()
    channel.receive(bytearray(1)).wait()


def _receives_registered_again(ends: Ends, *_: object) -> list[bool]:
    channel, data = ends.connect(is_sender=False), memoryview(_data(0, 4 * _LARGE))
    found = []
    for number in range(8):
        part = data[number % 2 * 100 : (number % 3 + 2) * _LARGE // 2]
        for wanted in (part[: 1 << 20], part[-(1 << 20) :]):
            came = bytearray(1 << 20)
            with channel.registered(came):
                channel.receive(came).wait()
            found.append(came == wanted)
    channel.send(bytearray(1)).wait()
    return found


# -- a peer that goes away -------------------------------------------------------------------------


def _end_by(how: str, channel: Channel) -> None:
    if how == "closed":
        channel.close()
        time.sleep(_LONG)
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def _ends(ends: Ends, how: str, when: str) -> None:
    channel = ends.connect(is_sender=False)
    message = channel.send(_data(1, 16 * _LARGE)) if when == "it sends" else None
    if when == "it has sent half":
        channel.send(_data(1, _LARGE)).wait()
    channel.receive(bytearray(1)).wait()
    _end_by(how, channel)
    del message


def _waits(ends: Ends, peer: int, how: str, when: str) -> tuple[str, float, int, list[bool]]:
    """What a wait raises, when, and whether memory is written to after the channel is closed."""
    channel, came = ends.connect(is_sender=True), bytearray(16 * _LARGE)
    first = bytearray(_LARGE)
    if when == "it has sent half":
        channel.receive(first).wait()
    waited: list[Any] = [channel.receive(came)] if when != "it is sent to" else []
    channel.send(bytearray(b"g")).wait()
    if when == "it is sent to":
        data = _data(2, 16 * _LARGE)
        waited = [channel.send(data), channel.receive(came)]

    def wait() -> None:
        for message in waited:
            message.wait()

    error, seconds = _seconds_until_it_raises(wait)
    channel.close()
    after = bytes(came)
    os.kill(peer, signal.SIGCONT)
    time.sleep(0.3)
    again, _ = _seconds_until_it_raises(lambda: channel.receive(bytearray(1)).wait())
    os.kill(peer, signal.SIGKILL)
    return error, seconds, ends.silences, [bytes(came) == after, bool(again)]


def _sends_late(ends: Ends, *_: object) -> None:
    channel = ends.connect(is_sender=True)
    channel.receive(bytearray(1)).wait()
    time.sleep(0.2)
    with suppress(RuntimeError):
        channel.send(_data(1, _LARGE)).wait()


def _closes_before_it_comes(ends: Ends, *_: object) -> bool:
    channel, came = ends.connect(is_sender=False), bytearray(_LARGE)
    channel.receive(came)
    channel.send(bytearray(b"g")).wait()
    channel.close()
    channel.close()
    time.sleep(0.5)
    return came == bytearray(_LARGE)


def _sends_and_stops(ends: Ends, *_: object) -> None:
    """Stand still while the peer reads, and go on once the peer has given up."""
    channel = ends.connect(is_sender=True)
    _meet(channel)
    messages = [channel.send(bytearray(16 * _LARGE)), channel.send(bytearray(b"g"))]
    os.kill(os.getpid(), signal.SIGSTOP)
    for message in messages:
        with suppress(RuntimeError):
            message.wait()
    channel.close()


def _gives_up(ends: Ends, *_: object) -> str:
    channel = ends.connect(is_sender=False)
    _meet(channel)
    time.sleep(0.3)  # until the sender stands still: before, all might come
    error, _seconds = _seconds_until_it_raises(channel.receive(bytearray(16 * _LARGE)).wait)
    channel.close()
    time.sleep(0.2)
    return error


def _nothing_comes(ends: Ends, *_: object) -> tuple[str, float]:
    return _seconds_until_it_raises(lambda: ends.connect(is_sender=True))


def _stays_away(ends: Ends, *_: object) -> None:
    return


# -- again and again -------------------------------------------------------------------------------

_TIMES = 6


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _connects_again(ends: Ends, _: object, is_sender: bool) -> list[tuple[bool, int, int]]:
    """Every second channel breaks, since one of the ranks closes it in the middle."""
    found = []
    for number in range(_TIMES):
        channel, came = ends.connect(is_sender, number), bytearray(_LARGE)
        _meet(channel)  # else the peer may still be connecting
        if number % 2:
            if is_sender:
                channel.close()
            is_right = bool(_seconds_until_it_raises(lambda c=channel: _receive_one(c))[0])  # type: ignore[misc]
        else:
            received, sent = channel.receive(came), channel.send(_data(number, _LARGE))
            received.wait()
            sent.wait()
            is_right = came == _data(number, _LARGE)
            _meet(channel)
            del received, sent
        channel.close()
        del channel
        found.append((is_right, *_settled_resources()))
    return found


def _receive_one(channel: Channel) -> None:
    channel.receive(bytearray(1)).wait()


def _settled_resources() -> tuple[int, int]:
    """What is open once threads that end have ended."""
    found = _resources()
    for _ in range(20):
        time.sleep(0.05)
        found, before = _resources(), found
        if found == before:
            break
    return found


def _connects_again_as_peer(ends: Ends) -> None:
    _connects_again(ends, 0, False)


def _forks(ends: Ends, _: object, how: str) -> list[bool]:
    """Transfer, fork a child that ends in this way, and transfer on."""
    channel, found = ends.connect(is_sender=False), []
    for number in range(4):
        if number == 2:
            child = os.fork()
            if child == 0:
                if how == "closes":
                    channel.close()
                os._exit(0)
            os.waitpid(child, 0)
        came = bytearray(_LARGE)
        channel.receive(came).wait()
        found.append(came == _data(number, _LARGE))
    channel.send(bytearray(b"e")).wait()
    return found


def _sends_four(ends: Ends, *_: object) -> None:
    channel = ends.connect(is_sender=True)
    for number in range(4):
        channel.send(_data(number, _LARGE)).wait()
        time.sleep(0.1)
    channel.receive(bytearray(1)).wait()


class TransportConformance:
    """Tests of one transport, by its name as `transport=`."""

    name: ClassVar[str]
    env: ClassVar[Mapping[str, str]] = {}
    reads_stopped_peers: ClassVar[bool] = False
    """Whether a message of a peer that stands still comes nevertheless."""

    def pair(self, own: Rank, peers: Rank, *args: Any, seconds: float = _LONG) -> Any:
        """What `own` returns, beside `peers` in another process, and how that one has ended."""
        return forked(in_pair, self.name, seconds, own, peers, args, timeout=100, env=self.env)

    def test_messages_of_any_size_come_in_order_and_whole(self) -> None:
        found, code = self.pair(_receives_each_size, _sends_each_size)
        assert (found, code) == ([True] * len(SIZES), 0)

    def test_many_messages_are_in_flight_in_both_directions(self) -> None:
        found, code = self.pair(
            partial(_exchanges, is_sender=True, counts=(60, 60)),
            partial(_exchanges_as_peer, counts=(60, 60)),
        )
        assert (found, code) == (True, 0)

    def test_memory_is_free_once_its_message_has_been_waited_for(self) -> None:
        found, code = self.pair(_receives_into_one_buffer_again, _sends_one_buffer_again)
        assert (found, code) == ([True] * 8, 0)

    def test_memory_is_registered_again_and_again(self) -> None:
        found, code = self.pair(_receives_registered_again, _sends_registered_again)
        assert (found, code) == ([True] * 16, 0)

    @pytest.mark.parametrize("when", ["it is idle", "it sends", "it has sent half"])
    @pytest.mark.parametrize("how", ["killed", "closed"])
    def test_a_peer_that_goes_away_is_an_error_at_once(self, how: str, when: str) -> None:
        (error, seconds, silences, after), _ = self.pair(_waits, _ends, how, when)
        # What it had sent before may have come, where the kernel had it.
        assert error or when == "it sends"
        assert seconds < _AT_ONCE
        assert silences == 0
        assert after == [True, True]

    @pytest.mark.parametrize("when", ["it is idle", "it is sent to"])
    def test_a_stopped_peer_is_an_error_after_the_time_out(self, when: str) -> None:
        (error, seconds, silences, after), _ = self.pair(
            _waits, _ends, "stopped", when, seconds=_SHORT
        )
        assert error
        assert 0.9 * _SHORT <= seconds < _AT_ONCE
        assert silences == 1
        assert after == [True, True]

    def test_a_sender_that_was_stopped_lives_on_when_its_peer_has_given_up(self) -> None:
        error, code = self.pair(_gives_up, _sends_and_stops, seconds=_SHORT)
        # What is read without the sender's help comes, if it said in time that it is there.
        assert error or self.reads_stopped_peers
        assert code == 0

    def test_nothing_is_written_once_a_channel_is_closed(self) -> None:
        assert self.pair(_closes_before_it_comes, _sends_late) == (True, 0)

    def test_a_peer_that_does_not_come_is_an_error_after_the_time_out(self) -> None:
        (error, seconds), _ = self.pair(_nothing_comes, _stays_away, seconds=_SHORT)
        assert error
        assert 0.9 * _SHORT <= seconds < _AT_ONCE

    def test_channels_are_made_again_after_failures_and_leave_nothing_open(self) -> None:
        found, code = self.pair(partial(_connects_again, is_sender=True), _connects_again_as_peer)
        assert code == 0
        assert all(is_right for is_right, *_ in found)
        # The first one may open what all others share.
        assert {tuple(rest) for _, *rest in found[2:]} == {tuple(found[1][1:])}

    @pytest.mark.parametrize("how", ["ends", "closes"])
    def test_a_forked_child_does_not_disturb_its_parent(self, how: str) -> None:
        found, code = self.pair(_forks, _sends_four, how)
        assert (found, code) == ([True] * 4, 0)
