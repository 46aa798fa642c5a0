"""A call waits for a lost rank once, whatever it waits in."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
import torch.distributed as dist

from dcp_mem import RankFailed
from dcp_mem.comm import Ranks, ranks_of
from dcp_mem.comm.job_ranks import JobRanks
from tests.support.processes.forks import forked_ranks

_SECONDS = 8.0


class _Waits(NamedTuple):
    """Seconds of the first exchange, which fails, and of the one behind it."""

    first: float
    second: float


def _fails_after(ranks: Ranks) -> float:
    started = time.monotonic()
    try:
        ranks.all_reduce(1, int.__add__)
    except RankFailed:
        return time.monotonic() - started
    raise AssertionError("the exchange has succeeded")


def _meets_a_rank_that_connects_late_and_is_silent_then() -> _Waits | None:
    store = dist.distributed_c10d._get_default_store()
    ranks = ranks_of(None, "one bound")
    if dist.get_rank() == 1:
        assert isinstance(ranks, JobRanks)
        time.sleep(0.7 * _SECONDS)
        ranks._wire(time.monotonic() + _SECONDS)._peers.connected([0], time.monotonic() + _SECONDS)
        store.wait(["the other has given up"])
        return None
    waits = _Waits(_fails_after(ranks), _fails_after(ranks))
    store.set("the other has given up", "")
    return waits


def test_connecting_and_the_exchange_behind_it_share_one_time_out() -> None:
    waits, _ = forked_ranks(
        _meets_a_rank_that_connects_late_and_is_silent_then,
        2,
        env={"DCP_MEM_TIMEOUT": str(_SECONDS)},
        timeout=100,
    )
    assert waits is not None
    assert waits.first < 1.4 * _SECONDS
    assert waits.second < 0.5 * _SECONDS


def _meets_a_rank_that_is_silent_on_a_channel_and_elsewhere() -> _Waits | None:
    store = dist.distributed_c10d._get_default_store()
    ranks = ranks_of(None, "a silent channel")
    ranks.all_reduce(1, int.__add__)
    channel = ranks.channel(1, 0, "once")
    if dist.get_rank() == 1:
        store.wait(["the other has given up"])
        return None
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        channel.receive(bytearray(8)).wait()
    waits = _Waits(time.monotonic() - started, _fails_after(ranks))
    store.set("the other has given up", "")
    return waits


def test_the_exchange_behind_a_silent_channel_waits_half_as_long() -> None:
    waits, _ = forked_ranks(
        _meets_a_rank_that_is_silent_on_a_channel_and_elsewhere,
        2,
        env={"DCP_MEM_TIMEOUT": str(_SECONDS)},
        timeout=100,
    )
    assert waits is not None
    assert waits.first > 0.9 * _SECONDS
    assert waits.second < 0.8 * _SECONDS


def _meets_again_after_a_silent_channel() -> int:
    ranks = ranks_of(None, "a silent channel")
    ranks.all_reduce(1, int.__add__)
    if dist.get_rank() == 0:
        assert isinstance(ranks, JobRanks)
        ranks._note_silence()
    # The other rank comes, if late: it was the channel that was bad.
    time.sleep(0.3 * _SECONDS * dist.get_rank())
    return ranks.all_reduce(1, int.__add__)


def test_ranks_go_on_without_a_channel_that_was_silent() -> None:
    found = forked_ranks(
        _meets_again_after_a_silent_channel, 2, env={"DCP_MEM_TIMEOUT": str(_SECONDS)}, timeout=100
    )
    assert found == [2, 2]
