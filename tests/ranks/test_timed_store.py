"""A store that falls silent is given up in time, and costs whoever asks again no time at all."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist

from dcp_mem import RankFailed
from dcp_mem.comm.job_ranks import JobRanks, run_token
from dcp_mem.comm.timed_store import MeetingPlace, TimedStore, own_connection
from dcp_mem.comm.transports import Pair, TcpChannel
from tests.support.checkpoints.jobs import wait_until
from tests.support.processes.forks import forking
from tests.support.processes.stops import stop


class _Store:
    """A store that answers while `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.answers.wait(60)
        return keys == ["there"]

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        raise dist.DistNetworkError("Broken pipe")


def _prompt(store: _Store, seconds: float) -> TimedStore:
    return TimedStore(cast("dist.Store", store), seconds)


def test_a_silent_store_is_given_up_and_not_asked_again_until_it_has_answered() -> None:
    store = _Store()
    prompt = _prompt(store, 2)
    with pytest.raises(RuntimeError, match="did not answer within 2 s"):
        prompt.check("there")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="still doesn't answer"):
        prompt.check("there")
    assert time.monotonic() - started < 1.5
    assert store.asked == 1
    store.answers.set()
    deadline = time.monotonic() + 10
    while True:  # as soon as the first answer has come
        try:
            assert prompt.check("there")
            break
        except RuntimeError:
            assert time.monotonic() < deadline
    assert not prompt.check("elsewhere")


def test_a_store_that_answers_is_asked_by_one_thread() -> None:
    threads: list[int] = []

    class Store(_Store):
        def check(self, keys: list[str]) -> bool:
            threads.append(threading.get_ident())
            return True

    prompt = _prompt(Store(), 10)
    for _ in range(5):
        assert prompt.check("there")
    assert len(threads) == 5
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_a_store_is_asked_again_once_a_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _Store()
    store.answers.set()
    prompt = _prompt(store, 10)

    def failing(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            prompt.check("there")
    assert prompt.check("there")


def test_an_error_of_the_store_reaches_whoever_asks() -> None:
    with pytest.raises(dist.DistNetworkError, match="Broken pipe"):
        _prompt(_Store(), 10).compare_set("key", "", "value")


def test_connecting_through_a_silent_store_ends_in_time() -> None:
    class Silent(dist.Store):
        def set(self, key: str, value: str) -> None:
            time.sleep(20)

    place, started = MeetingPlace(TimedStore(Silent(), 0.5), ""), time.monotonic()
    with pytest.raises(RuntimeError, match=r"did not answer within \d s"):
        TcpChannel(Pair(store=place, is_sender=True, seconds=0.5))
    assert time.monotonic() - started < 15


def _serve(port: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.with_suffix(".part").write_text(str(store.port))
    port.with_suffix(".part").rename(port)
    time.sleep(1000)


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[dist.Store]:
    """A store whose host takes connections and says nothing any more."""
    port = tmp_path / "port"
    with forking(_serve, None, port) as host:
        wait_until(port.exists)
        store = dist.TCPStore(
            "127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False
        )
        stop(host.pid())
        yield dist.PrefixStore("run", store)


def test_another_connection_to_a_silent_store_is_given_up_in_time(stopped: dist.Store) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not answer within 1 s"):
        own_connection(stopped, 1)
    assert time.monotonic() - started < 15


def test_a_run_whose_store_is_silent_says_so(
    stopped: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_TIMEOUT", "1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: stopped)
    with pytest.raises(RankFailed, match=r"rank 3.*did not answer within 1 s"):
        run_token()


@pytest.mark.parametrize("served", [True, False])
def test_ranks_whose_torchruns_count_restarts_differently_meet_where_the_store_is_a_new_one(
    monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(served))
    keys = set()
    for restarts in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        keys.add(JobRanks(0, (0, 1), "save", dist.HashStore(), 5).key)
    assert len(keys) == (2 if served else 1)
