"""A flush meets every fault at each step: its checkpoint ends durable and whole, or absent."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_mem import CheckpointStatus, State
from tests.support.checkpoints.jobs import Job, wait_until
from tests.support.checkpoints.roundtrip import through_fsspec
from tests.support.processes.forks import forked
from tests.support.storage import ways
from tests.support.storage.proxy import Delay, Fault, Hang, LoseAnswer, Reset, ResetInBody, Truncate
from tests.support.storage.servers import S3Server, StorageRoot
from tests.support.storage.ways import (
    LARGE,
    NAME,
    Way,
    assert_absent,
    assert_whole,
    load_state,
    put_into,
    save_unflushed,
    saved_in,
    start,
    status_of,
    without_memory,
    writing,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("flush_quickly")]

ALWAYS = 1_000_000
SMALL_STEPS = ["listing", "look", "segment", "node manifest", "catalog", "manifest", "commit"]
LARGE_STEPS = ["begin", "part", "completion"]
ANSWERED_STEPS = ["listing", "look", "begin"]
"""Steps whose answers have a body, on both kinds of storage."""

PASSING: dict[str, Callable[[Way], Sequence[Fault]]] = {
    "refused": lambda way: [
        way.error(500, "InternalError"),
        way.error(503, "SlowDown" if way.is_s3 else "ServerBusy", retry_after="1"),
        way.error(429, "TooManyRequests"),
    ],
    "reset": lambda way: [Reset(), ResetInBody(100)],
    "slow": lambda way: [Hang(), Delay(0.2)],
    "lost answer": lambda way: [LoseAnswer()],
    "truncated": lambda way: [Truncate(50)],
}
"""Faults that the requests of one step meet, each in turn."""


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same name, saved anew with the second state."""
    return saved_in(tmp_path_factory.mktemp("second"), 2, 0)


def _flushed(
    way: Way, memory_root: Path, held: Path, root: StorageRoot | None = None, **options: Any
) -> CheckpointStatus:
    """Flush what a job has left in memory; the status once it is durable."""
    put_into(memory_root, held)
    with writing(way.job(memory_root, root or way.root), **options) as writer:
        writer.wait(timeout=30)
        return status_of(writer)


# -- a fault that passes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        pytest.param(step, fault, id=f"{fault}-{step}".replace(" ", "_"))
        for step in [*SMALL_STEPS, *LARGE_STEPS]
        for fault in PASSING
        if fault != "truncated" or step in ANSWERED_STEPS
    ],
)
def test_faults_that_pass_leave_the_checkpoint_durable_and_whole(
    way: Way, memory_root: Path, small: Path, large: Path, step: str, fault: str
) -> None:
    nbytes = LARGE if step in LARGE_STEPS else 0
    faults = _let_fail(way, step, fault)
    root = way.impatient if fault == "slow" else way.root
    status = _flushed(way, memory_root, large if nbytes else small, root)
    assert [one.fault for one in way.asked(step) if one.fault is not None] == faults
    assert (status.state, status.error) == (State.DURABLE, "")
    assert_whole(way, memory_root, 1, nbytes)


def _let_fail(way: Way, step: str, fault: str) -> list[Fault]:
    """Have the next requests of a step meet faults that pass."""
    faults = list(PASSING[fault](way))
    for one in faults:
        way.proxy.fail(way.steps[step], one)
    return faults


def test_torchs_own_reader_loads_what_came_through_faults(
    way: Way, memory_root: Path, large: Path
) -> None:
    for step in ("begin", "part", "completion", "commit"):
        way.proxy.fail(way.steps[step], LoseAnswer())
        way.proxy.fail(way.steps[step], ResetInBody(100))
    _flushed(way, memory_root, large)
    load_state(
        through_fsspec(FsspecReader, f"{way.root.url}/run/{NAME}", way.root.storage_options),
        1,
        LARGE,
        name=None,
    )


@pytest.mark.parametrize("step", ["look", "part", "completion", "commit"])
def test_faults_that_pass_at_radosgw(
    radosgw: S3Server, memory_root: Path, large: Path, step: str
) -> None:
    with ways.s3_way(radosgw) as way:
        faults = [
            one
            for fault in ("reset", "refused", "lost answer")
            for one in _let_fail(way, step, fault)
        ]
        _flushed(way, memory_root, large)
        assert [one.fault for one in way.asked(step) if one.fault is not None] == faults
        assert_whole(way, memory_root, 1, LARGE)


def test_storage_is_left_alone_for_as_long_as_it_asks(
    way: Way, memory_root: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways.flush_quickly(monkeypatch, retries=replace(ways.QUICK, longest_asked_seconds=60.0))
    way.proxy.fail(way.steps["node manifest"], _busy(way))
    started = time.monotonic()
    status = _flushed(way, memory_root, small)
    assert time.monotonic() - started >= 1
    assert (status.flush_attempts, status.transfer.retries) == (1, 1)


# -- a commit whose answer is lost, where nothing may be overwritten -------------------------------


@pytest.mark.parametrize("fault", [fault for fault in PASSING if fault != "truncated"])
def test_without_overwrite_our_own_commit_is_known_for_ours(
    way: Way, memory_root: Path, small: Path, fault: str
) -> None:
    _let_fail(way, "commit", fault)
    root = way.impatient if fault == "slow" else way.root
    status = _flushed(way, memory_root, small, root, overwrite=False)
    assert (status.state, status.error) == (State.DURABLE, "")
    assert_whole(way, memory_root, 1)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_commit_of_which_no_answer_comes_is_read_back(
    way: Way, memory_root: Path, small: Path, overwrite: bool
) -> None:
    way.proxy.fail(way.steps["commit"], LoseAnswer(), times=ALWAYS)
    assert _flushed(way, memory_root, small, overwrite=overwrite).flush_attempts == 1
    assert_whole(way, memory_root, 1)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_commit_that_can_not_be_read_back_is_known_by_the_next_attempt(
    way: Way, memory_root: Path, small: Path, overwrite: bool
) -> None:
    way.proxy.fail(way.steps["commit"], LoseAnswer(), times=ways.QUICK.tries)
    way.proxy.fail(way.steps["look"], Reset(), times=ways.QUICK.tries, after=1)
    assert _flushed(way, memory_root, small, overwrite=overwrite).flush_attempts == 2
    assert way.asked("commit")[0].status in (200, 201)
    assert_whole(way, memory_root, 1)


def test_without_overwrite_what_another_has_committed_meanwhile_is_left_alone(
    way: Way, memory_root: Path, small: Path
) -> None:
    put_into(memory_root, small)
    way.proxy.fail(way.steps["commit"], Delay(3.0))
    with writing(way.job(memory_root), overwrite=False) as writer:
        start(writer)
        wait_until(lambda: way.asked("commit"))
        way.direct.write(f"run/{NAME}/.metadata", b"another's")
        wait_until(lambda: status_of(writer).error)
        status = status_of(writer)
    assert (status.state, status.in_memory) == (State.FAILED, True)
    assert f"'{NAME}' exists already in {way.root.url}/run and overwrite=False" in status.error
    assert way.direct.read(f"run/{NAME}/.metadata") == b"another's"


# -- a fault that stays ----------------------------------------------------------------------------


def _busy(way: Way) -> Fault:
    return way.error(503, "SlowDown" if way.is_s3 else "ServerBusy", retry_after="1")


STAYING: dict[str, tuple[Callable[[Way], Fault], str]] = {
    "busy": (_busy, "SlowDown|ServerBusy"),
    "reset": (lambda way: Reset(), "(?i:connection)"),
    "lost answer": (lambda way: LoseAnswer(), "(?i:connection)"),
}
"""Faults, and what a status says of them."""
UNANSWERED_STEPS = ["listing", "look", "catalog", "manifest"]
"""Steps that need an answer. Of other steps the next attempt sees whether they are done."""


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        pytest.param(step, fault, id=f"{fault}-{step}".replace(" ", "_"))
        for step in [*SMALL_STEPS, *LARGE_STEPS]
        for fault in STAYING
        if fault != "lost answer" or step in UNANSWERED_STEPS
    ],
)
def test_while_a_fault_stays_nothing_is_durable_and_afterwards_it_becomes_so_by_itself(
    way: Way, memory_root: Path, small: Path, large: Path, step: str, fault: str
) -> None:
    nbytes = LARGE if step in LARGE_STEPS else 0
    put_into(memory_root, large if nbytes else small)
    make, words = STAYING[fault]
    way.proxy.fail(way.steps[step], make(way), times=ALWAYS)
    with writing(way.job(memory_root)) as writer:
        start(writer)
        wait_until(lambda: status_of(writer).flush_attempts >= 2, "two attempts")
        status = status_of(writer)
        assert (status.state, status.in_memory) == (State.FAILED, True)
        assert re.match(f"storage {way.root.url}/run is unavailable: .*({words})", status.error), (
            status.error
        )
        assert_absent(way, memory_root)
        way.proxy.reset()
        wait_until(
            lambda: status_of(writer).state is State.DURABLE, "the flush, once the fault is over"
        )
        load_state(Job(None, str(memory_root)).reader(), 1, nbytes)
    assert_whole(way, memory_root, 1, nbytes)


@pytest.mark.parametrize("step", ["segment", "manifest", "commit"])
def test_while_a_fault_stays_readers_see_the_checkpoint_that_is_to_be_replaced(
    way: Way, memory_root: Path, small: Path, second: Path, step: str
) -> None:
    (memory_root / "first").mkdir(mode=0o700)
    put_into(memory_root / "first", small)
    with writing(way.job(memory_root / "first")) as writer:
        writer.wait(timeout=30)
    (memory_root / "second").mkdir(mode=0o700)
    put_into(memory_root / "second", second)
    way.proxy.fail(way.steps[step], _busy(way), times=ALWAYS)
    with writing(way.job(memory_root / "second")) as writer:
        start(writer)
        wait_until(lambda: status_of(writer).flush_attempts >= 1)
        load_state(without_memory(way.job(memory_root, way.direct)), 1)
        load_state(
            through_fsspec(
                FsspecReader, f"{way.direct.url}/run/{NAME}", way.direct.storage_options
            ),
            1,
            name=None,
        )
        way.proxy.reset()
        wait_until(lambda: status_of(writer).state is State.DURABLE)
    assert_whole(way, memory_root, 2)


def test_while_storage_hangs_nothing_is_durable_and_the_status_says_for_how_long(
    way: Way, memory_root: Path, small: Path
) -> None:
    put_into(memory_root, small)
    way.proxy.fail(lambda request: True, Hang(), times=ALWAYS)
    with writing(way.job(memory_root, way.impatient)) as writer:
        start(writer)
        wait_until(lambda: status_of(writer).error)
        assert re.search(
            r"(?i)time.*\(4 requests in a row have failed, for [2-9]\.\d s\)",
            status_of(writer).error,
        )
        way.proxy.reset()
        writer.wait(timeout=30)
    assert_whole(way, memory_root, 1)


@pytest.mark.parametrize("step", ["node manifest", "commit", "part", "completion"])
def test_what_is_done_without_an_answer_is_seen_by_the_next_attempt(
    way: Way, memory_root: Path, small: Path, large: Path, step: str
) -> None:
    nbytes = LARGE if step in LARGE_STEPS else 0
    way.proxy.fail(way.steps[step], LoseAnswer(), times=ALWAYS)
    _flushed(way, memory_root, large if nbytes else small)
    if step == "completion":
        parts = [one for one in way.asked("part") if one.status in (200, 201)]
        assert len(parts) == 3, "parts were sent twice"
    assert_whole(way, memory_root, 1, nbytes)


def test_an_upload_that_began_without_an_answer_is_found_by_the_next_request(
    s3_way: Way, memory_root: Path, large: Path
) -> None:
    s3_way.proxy.fail(s3_way.steps["begin"], LoseAnswer(), times=ALWAYS)
    _flushed(s3_way, memory_root, large)
    assert len(s3_way.asked("begin")) == 1
    assert_whole(s3_way, memory_root, 1, LARGE)


def test_a_completion_that_is_answered_with_ok_and_an_error_is_repeated(
    s3_way: Way, memory_root: Path, large: Path
) -> None:
    error = replace(s3_way.error(200, "InternalError"), status=200)
    s3_way.proxy.fail(s3_way.steps["completion"], error)
    _flushed(s3_way, memory_root, large)
    assert len(s3_way.asked("completion")) == 2
    assert_whole(s3_way, memory_root, 1, LARGE)


# -- a storage that is down ------------------------------------------------------------------------

_PARTS = 30


def test_a_storage_that_goes_down_fails_thirty_parts_no_later_than_one(
    abfs_way: Way, memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways.flush_quickly(monkeypatch, retries=ways.PATIENT)
    nbytes = (_PARTS - 1) * ways.PART
    forked(save_unflushed, str(memory_root), 1, nbytes)
    abfs_way.proxy.fail(abfs_way.steps["part"], Delay(0.3), times=ALWAYS, after=4)
    with writing(abfs_way.job(memory_root)) as writer:
        start(writer)
        wait_until(lambda: len(abfs_way.asked("part")) > 6, "the upload to be under way")
        abfs_way.proxy.down()
        down = time.monotonic()
        wait_until(lambda: status_of(writer).error, timeout=60)
        seconds, error = time.monotonic() - down, status_of(writer).error
        at_once = min(32, max(4, 2 * (os.cpu_count() or 1)))  # parts in flight
        facts = re.search(r"\((\d+) requests in a row have failed, for (\d+\.\d) s\)$", error)
        assert facts is not None, error
        assert int(facts[1]) <= ways.PATIENT.tries * at_once, error
        assert float(facts[2]) <= seconds + 0.1 < 30  # it is rounded
        assert_absent(abfs_way, memory_root)
        sent = {one.target for one in abfs_way.asked("part") if one.status == 201}
        abfs_way.proxy.reset()
        abfs_way.proxy.up()
        writer.wait(timeout=60)
    assert sent
    assert not sent & {one.target for one in abfs_way.asked("part")}, (
        "parts that were up were sent again"
    )
    assert_whole(abfs_way, memory_root, 1, nbytes)
