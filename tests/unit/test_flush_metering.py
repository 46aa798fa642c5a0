"""What a flush is counted and slowed down by, and what a waiting user is shown of it."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dcp_mem import CheckpointStatus, State, Transfer
from dcp_mem.common.progress_bar import state_text, transfer_text
from dcp_mem.flushing import metering
from dcp_mem.flushing.metering import Meter, Throttle


def test_attempts_add_up_and_what_is_stored_is_counted_anew() -> None:
    retries = 5
    meter = Meter(
        Transfer(
            nbytes=30,
            stored_nbytes=20,
            sent_nbytes=20,
            parts=3,
            sent_parts=2,
            retries=4,
            segments_seconds=1.0,
            commit_seconds=0.5,
            waiting_seconds=2.0,
        ),
        retries=lambda: retries,
    )
    meter.expect(30, 3)
    with meter.stage("segments"):
        meter.count(10, is_sent=False)
        meter.count(10, is_sent=False)
        meter.count(10, is_sent=True)
    retries += 2
    found = meter.transfer()
    assert (found.nbytes, found.stored_nbytes, found.sent_nbytes) == (30, 30, 30)
    assert (found.parts, found.sent_parts, found.retries) == (3, 3, 6)
    assert 1.0 < found.segments_seconds < 10
    assert (found.commit_seconds, found.waiting_seconds) == (0.5, 2.0)


def test_what_an_attempt_takes_on_besides_is_added() -> None:
    meter = Meter(Transfer(nbytes=30, stored_nbytes=20, sent_nbytes=20, parts=3, sent_parts=2))
    meter.find_stored(30)
    meter.expect(10, 2)
    meter.count(10, is_sent=True)
    found = meter.transfer()
    assert (found.nbytes, found.stored_nbytes, found.sent_nbytes) == (40, 40, 30)
    meter.expect(5, 1)
    assert (meter.transfer().nbytes, meter.transfer().stored_nbytes) == (45, 40)


def test_a_meter_tells_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, Transfer]] = []
    meter = Meter(report=lambda stage, transfer: heard.append((stage, transfer)))
    meter.expect(100, 100)
    with meter.stage("segments"):
        for _ in range(50):
            meter.count(1, is_sent=True)
        assert heard == []
        monkeypatch.setattr(metering, "_REPORT_EVERY", 0.0)
        meter.count(1, is_sent=True)
    ((stage, transfer),) = heard
    assert (stage, transfer.stored_nbytes, transfer.nbytes) == ("segments", 51, 100)
    assert transfer.segments_seconds > 0


def _seconds_of(act: Callable[[], object]) -> float:
    started = time.monotonic()
    act()
    return time.monotonic() - started


def test_a_failed_flush_waits_for_no_turn_and_takes_none() -> None:
    throttle, stop = Throttle(1.0), threading.Event()
    throttle.wait(3600, threading.Event())
    waiting = [threading.Thread(target=throttle.wait, args=(3600, stop)) for _ in range(3)]
    for thread in waiting:
        thread.start()
    stop.set()
    for thread in waiting:
        thread.join(10)
    assert not any(thread.is_alive() for thread in waiting)
    throttle.give_back(3600)
    assert _seconds_of(lambda: throttle.wait(1, threading.Event())) < 10


def _status(state: State = State.COMPLETE, **fields: Any) -> CheckpointStatus:
    return CheckpointStatus(
        name="step-1",
        save_id="aa",
        state=state,
        in_memory=True,
        persist=True,
        nbytes=100,
        created=1.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (_status(), "starting"),
        (_status(flush_stage="segments", transfer=Transfer(nbytes=100, stored_nbytes=50)), ""),
        (
            _status(flush_stage="waiting", transfer=Transfer(nbytes=100, stored_nbytes=100)),
            "waiting for other nodes",
        ),
        (
            _status(State.FAILED, flush_again=112.4, error="no route"),
            "failed, trying again in 12 s: no route",
        ),
        (_status(State.FAILED, error="no route"), "failed, trying again: no route"),
        (
            _status(
                State.FAILED,
                error="no route",
                flush_stage="segments",
                transfer=Transfer(nbytes=100, stored_nbytes=50),
            ),
            "",
        ),
        (_status(State.DURABLE, transfer=Transfer(nbytes=100, stored_nbytes=100)), "durable"),
        (_status(State.SKIPPED, error="memory was full"), "skipped: memory was full"),
    ],
)
def test_a_bar_tells_where_a_checkpoint_stands(status: CheckpointStatus, expected: str) -> None:
    assert state_text(status, now=100.0) == expected


@pytest.mark.parametrize(
    ("done", "total", "speed", "expected"),
    [
        (0, None, None, ""),
        (0, 1000, None, "0/1000 bytes"),
        (0, 1024, None, "0.0/1.0 KiB"),
        (512 << 20, 3 << 30, None, "0.5/3.0 GiB"),
        (1 << 30, 3 << 30, 16 << 20, "1.0/3.0 GiB, 16.0 MiB/s, 2:08 left"),
    ],
)
def test_a_bar_tells_how_far_the_bytes_are(
    done: float, total: float | None, speed: float | None, expected: str
) -> None:
    assert transfer_text(done, total, speed) == expected
