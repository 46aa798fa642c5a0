"""A job told to end gets its newest checkpoint onto storage first, and then ends as usual."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dcp_mem import CheckpointManager
from tests.support.checkpoints.jobs import wait_until

pytestmark = pytest.mark.slow

_LOOP = """
    import logging, os, signal, sys, time
    from pathlib import Path
    from dcp_mem import CheckpointManager

    logging.basicConfig(level=logging.WARNING)
    {before}
    manager = CheckpointManager({url!r}, memory_root={root!r}, job="job", persist=False, \
preemption={signals}, preemption_deadline={deadline})
    for step in range(5):
        manager.save(step, {{"n": step}})
    {after}
"""
_SLEEPS = """
    Path({ready!r}).touch()
    time.sleep(60)
"""


def _start(
    root: Path,
    tmp_path: Path,
    *,
    signals: str = "'SIGTERM'",
    before: str = "",
    deadline: float = 30,
    after: str = _SLEEPS,
) -> "subprocess.Popen[str]":
    url, ready = str(tmp_path / "storage"), tmp_path / "ready"
    text = _LOOP.format(
        url=url,
        root=str(root),
        signals=signals,
        before=before,
        deadline=deadline,
        after=after.format(ready=str(ready)).strip(),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(ready.exists, "the loop runs", timeout=150)
    return process


def _end(process: "subprocess.Popen[str]", number: int) -> str:
    process.send_signal(number)
    return process.communicate(timeout=60)[0]


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.variant)])
def test_the_newest_checkpoint_is_durable_when_the_process_has_ended(
    memory_root: Path, tmp_path: Path, name: str
) -> None:
    process = _start(memory_root, tmp_path, signals="['SIGTERM', 'SIGUSR1']")
    said = _end(process, signal.Signals[name])
    assert process.returncode == -signal.Signals[name]
    assert f"{name}: step-4 is durable" in said
    assert (tmp_path / "storage" / "step-4" / ".metadata").exists()
    state = {"n": 0}
    assert (
        CheckpointManager(
            tmp_path / "storage", memory_root=tmp_path / "elsewhere", job="job"
        ).restore(state)
        == 4
        == state["n"]
    )


_BLOCKED = """
    import datetime, torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    Path({ready!r}).touch()
    try:
        store.wait(["what never comes"], datetime.timedelta(seconds=60))  # as long as it waits, Python calls no handler
    finally:
        Path({ready!r}).unlink()
"""  # noqa: E501


def test_a_process_whose_main_thread_waits_for_a_peer_hears_of_it_too(
    memory_root: Path, tmp_path: Path
) -> None:
    process = _start(memory_root, tmp_path, after=_BLOCKED)
    time.sleep(1)  # it waits by now, or else this proves less
    said = _end(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert "SIGTERM: step-4 is durable" in said
    assert (tmp_path / "ready").exists()  # the wait has never come back


_FORKS = """
    Path({ready!r}).touch()
    for _ in range(20):
        child = os.fork()
        if not child:
            time.sleep(60)
        os.kill(child, signal.SIGTERM)  # in its first moments, in which Python may lose it
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    near, far = os.pipe()
    child = os.fork()
    if not child:
        os.write(far, b"x")
        time.sleep(60)
    os.read(near, 1)
    os.kill(child, signal.SIGTERM)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    time.sleep(1)
    print("parent lives", flush=True)
    os._exit(3)
"""


def test_what_a_forked_child_is_told_is_not_meant_for_the_trainer(
    memory_root: Path, tmp_path: Path
) -> None:
    process = _start(memory_root, tmp_path, after=_FORKS)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 3, said
    assert f"child {-signal.SIGTERM}" in said
    assert "parent lives" in said
    assert "durable" not in said


def test_the_users_own_handler_comes_after(memory_root: Path, tmp_path: Path) -> None:
    before = (
        "signal.signal(signal.SIGTERM,"
        " lambda number, frame: (print('mine', number, flush=True), os._exit(7)))"
    )
    process = _start(memory_root, tmp_path, before=before)
    said = _end(process, signal.SIGTERM)
    assert process.returncode == 7
    assert said.index("step-4 is durable") < said.index(f"mine {signal.SIGTERM.value}")


def test_an_ignored_signal_stays_ignored_once_the_checkpoint_is_durable(
    memory_root: Path, tmp_path: Path
) -> None:
    process = _start(memory_root, tmp_path, before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    process.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "storage" / "step-4" / ".metadata").exists, "it is durable")
    time.sleep(0.5)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_storage_that_does_not_answer_is_waited_for_until_the_deadline(
    memory_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "storage").write_text("in the way")
    process = _start(memory_root, tmp_path, deadline=2)
    said = _end(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert "step-4 is not durable after 2 s" in said


def test_it_is_not_asked_for_by_default_and_is_over_with_close(
    memory_root: Path, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path / "storage", memory_root=memory_root):
        assert signal.getsignal(signal.SIGTERM) == before
    with CheckpointManager(tmp_path / "storage", memory_root=memory_root, preemption="SIGTERM"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_manager_that_is_entered_again_listens_again(memory_root: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    manager = CheckpointManager(
        tmp_path / "storage", memory_root=memory_root, job="job", preemption="SIGUSR1"
    )
    for _ in range(2):
        with manager:
            assert signal.getsignal(signal.SIGUSR1) != before
        assert signal.getsignal(signal.SIGUSR1) == before


_HOLDS = """
    import fcntl
    {hold}
    Path({ready!r}).touch()
    while not hit:
        time.sleep(0.01)
    time.sleep(1)  # the flush would have begun by now
    {release}
    while True:
        time.sleep(1)
"""


def _start_holding(root: Path, tmp_path: Path, hold: str, release: str) -> "subprocess.Popen[str]":
    """Start a loop whose main thread holds something when the signal comes."""
    # A handler of the user's that is called at once: what Python calls by then is known.
    after = _HOLDS.replace("{hold}", hold).replace("{release}", release)
    hit = (
        "hit = []; import dcp_mem.manager.preemption as p; handle = p._SignalListener._handle\n"
        "    def noting(self, number, frame):\n"
        "        hit.append(number)\n"
        "        handle(self, number, frame)\n"
        "    p._SignalListener._handle = noting"
    )
    return _start(root, tmp_path, before=hit, after=after, deadline=20)


@pytest.mark.parametrize("what", ["a lease", "the logger"])
def test_a_signal_does_not_wait_for_what_the_main_thread_holds(
    memory_root: Path, tmp_path: Path, what: str
) -> None:
    if what == "a lease":
        hold = (
            "from dcp_mem.runtime.session import _sessions; [session] = _sessions.values(); "
            "[held] = [one for one in session.slots._open.values() if 'step-4' in one.path]; "
            "fcntl.flock(held.descriptor, fcntl.LOCK_EX)"
        )
        release = "fcntl.flock(held.descriptor, fcntl.LOCK_SH)"
    else:
        hold = "logging.getLogger().handlers[0].acquire()"
        release = "logging.getLogger().handlers[0].release()"
    process = _start_holding(memory_root, tmp_path, hold, release)
    signalled = time.monotonic()
    said = _end(process, signal.SIGTERM)
    assert "SIGTERM: step-4 is durable" in said
    assert "is gone" not in said
    assert time.monotonic() - signalled < 19  # the deadline is 20 s


_SAVES = """
    Path({ready!r}).touch()
    for step in range(5, 500):
        manager.save(step, {{"n": step}})
        time.sleep(0.05)
"""


def test_no_save_overtakes_the_flush(memory_root: Path, tmp_path: Path) -> None:
    process = _start(memory_root, tmp_path, after=_SAVES)
    said = _end(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert "is durable" in said


def test_the_users_own_handler_is_called_once_for_each_signal(
    memory_root: Path, tmp_path: Path
) -> None:
    before = (
        "import collections; calls = collections.Counter()\n"
        "    signal.signal(signal.SIGTERM, lambda number, frame: calls.update([number]))"
    )
    after = """
    Path({ready!r}).touch()
    for expected in (1, 2):
        while sum(calls.values()) < expected:
            time.sleep(0.01)
        time.sleep(0.5)
        print("calls", sum(calls.values()), flush=True)
        if expected == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(5)
"""
    process = _start(memory_root, tmp_path, before=before, after=after)
    said = _end(process, signal.SIGTERM)
    assert process.returncode == 5
    assert "calls 1" in said
    assert "calls 2" in said


_TWO = """
    first = CheckpointManager({url!r}, memory_root={root!r}, job="first", preemption="SIGTERM")
"""
_FIRST_IS_CLOSED = """
    first.close()
    manager.save(5, {{"n": 5}})
    Path({ready!r}).touch()
    time.sleep(60)
"""


def test_a_manager_that_is_closed_first_leaves_the_other_one_its_signals(
    memory_root: Path, tmp_path: Path
) -> None:
    before = _TWO.format(url=str(tmp_path / "first"), root=str(memory_root)).strip()
    process = _start(memory_root, tmp_path, before=before, after=_FIRST_IS_CLOSED)
    said = _end(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert "SIGTERM: step-5 is durable" in said


_OTHERS_LISTEN = """
    import socket
    near, far = socket.socketpair()
    far.setblocking(False)
    signal.set_wakeup_fd(far.fileno())
    Path({ready!r}).touch()
    time.sleep(60)
"""


def test_a_signal_is_heard_although_a_library_has_taken_the_wakeup_descriptor(
    memory_root: Path, tmp_path: Path
) -> None:
    process = _start(memory_root, tmp_path, after=_OTHERS_LISTEN)
    said = _end(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert "SIGTERM: step-4 is durable" in said
