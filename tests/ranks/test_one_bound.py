"""A call waits for a lost rank once: connecting and exchanging share one time-out."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch.distributed as dist

from dcp_mem.comm import Ranks, ranks_of
from dcp_mem.comm.gloo import GlooRanks
from dcp_mem.errors import RankFailed
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
        assert isinstance(ranks, GlooRanks)
        time.sleep(0.7 * _SECONDS)
        ranks._group = ranks._build()
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
