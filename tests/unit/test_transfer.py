"""Chunks of bytes over a channel of two ranks: checked, sent again if they changed, or refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from dcp_mem.comm import ranks_of
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.tcp_channel import TcpChannel
from dcp_mem.comm.transfer import (
    IncomingChunk,
    OutgoingChunk,
    receive,
    refuse,
    send,
)
from dcp_mem.format.checksums import checksum
from tests.support.processes.forks import forked_ranks, raised_by

_NBYTES = 1000
_COUNT = 9


def _data(number: int) -> bytearray:
    return bytearray((number + each) % 251 for each in range(_NBYTES))


def _outgoing(count: int) -> Iterator[OutgoingChunk]:
    for number in range(count):
        data = _data(number)
        yield OutgoingChunk(data, partial(checksum, memoryview(data)))


def _incoming(came: list[bytearray], accepted: list[int]) -> Iterator[IncomingChunk]:
    for number, data in enumerate(came):
        yield IncomingChunk(
            data, partial(checksum, memoryview(data)), partial(accepted.append, number)
        )


@contextmanager
def _channel_that_errs(times: int) -> Iterator[None]:
    """Of the first chunks that are sent, so many have a bit that is wrong."""
    original, left = TcpChannel.send, [times]

    def send_badly(channel: TcpChannel, data: Any) -> Any:
        if len(data) == _NBYTES and left[0]:
            left[0] -= 1
            data = bytearray(data)
            data[500] ^= 1
        return original(channel, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TcpChannel, "send", send_badly)
        yield


def _with_channel(act: Callable[[Channel], object]) -> str:
    """The type and text of what is raised; the channel is closed, as its users do then."""
    channel = ranks_of(None, "transfer").channel(0, 1)
    error = raised_by(lambda: act(channel))
    channel.close()
    dist.barrier()  # the error is kept until the other rank has ended, too
    return "" if error is None else f"{type(error).__name__}: {error}".split("\n")[0]


def _transfer(count: int, errors: int) -> tuple[str, bool, list[int]]:
    came, accepted = [bytearray(_NBYTES) for _ in range(count)], list[int]()
    if dist.get_rank() == 0:
        with _channel_that_errs(errors):
            return _with_channel(lambda channel: send(channel, _outgoing(count))), True, []
    error = _with_channel(lambda channel: receive(channel, _incoming(came, accepted)))
    return error, came == [_data(number) for number in range(count)], accepted


@pytest.mark.parametrize("count", [0, 1, 4, _COUNT])
def test_chunks_come_as_they_were_sent(count: int) -> None:
    sent, received = forked_ranks(_transfer, 2, count, 0)
    assert (sent[0], received[0]) == ("", "")
    assert received[1:] == (True, list(range(count)))


@pytest.mark.parametrize("errors", [1, 3])
def test_a_chunk_that_changed_is_sent_again(errors: int) -> None:
    sent, received = forked_ranks(_transfer, 2, _COUNT, errors)
    assert (sent[0], received[0]) == ("", "")
    assert received[1]
    assert sorted(received[2]) == list(range(_COUNT))


def test_a_chunk_that_changes_each_time_fails_both_ranks() -> None:
    sent, received = forked_ranks(_transfer, 2, _COUNT, 10**6, timeout=30)
    assert received[0] == (
        f"DcpMemError: a piece of {_NBYTES} bytes came otherwise than it was sent, 3 times"
    )
    assert received[2] == []
    assert sent[0].startswith("RuntimeError")


def _listens_late() -> bool:
    """Rank 0 sends a chunk by hand, and is ready for the answer when rank 1 is done with it."""
    channel, data = ranks_of(None, "transfer").channel(0, 1), _data(0)
    if dist.get_rank() == 1:
        receive(channel, _incoming([bytearray(_NBYTES)], []))
        return True
    channel.receive(bytearray(512)).wait()  # the greeting
    crc = checksum(memoryview(data)).to_bytes(4, "little")
    messages = [channel.send(data), channel.send(bytearray(crc))]
    for message in messages:
        message.wait()
    time.sleep(0.5)
    answer = bytearray(b"?")
    channel.receive(answer).wait()
    return answer == b"\0"


def test_a_sender_hears_the_last_answer_however_late_it_listens() -> None:
    """As where the answer goes by another line than the chunk."""
    assert forked_ranks(_listens_late, 2, timeout=30) == [True, True]


def _refuse() -> str:
    if dist.get_rank() == 0:
        return _with_channel(lambda channel: send(channel, _outgoing(_COUNT)))
    return _with_channel(lambda channel: refuse(channel, "there is no room"))


def test_the_sender_hears_why_the_receiver_refuses() -> None:
    assert forked_ranks(_refuse, 2) == ["DcpMemError: there is no room", ""]


def _stop_after(count: int) -> tuple[str, list[int]]:
    """Either rank may find, before a chunk, that the rest isn't wanted."""
    asked, accepted = list[int](), list[int]()

    def go_on() -> None:
        asked.append(1)
        if len(asked) > count:
            raise ValueError("enough")

    if dist.get_rank() == 0:
        return _with_channel(lambda channel: send(channel, _outgoing(_COUNT))), []
    came = [bytearray(_NBYTES) for _ in range(_COUNT)]
    error = _with_channel(lambda channel: receive(channel, _incoming(came, accepted), go_on))
    return error, accepted


def test_a_receiver_that_stops_fails_the_sender() -> None:
    (sent, _), (received, accepted) = forked_ranks(_stop_after, 2, 6, timeout=30)
    assert received == "ValueError: enough"
    assert accepted == list(range(len(accepted)))
    assert sent.startswith("RuntimeError")
