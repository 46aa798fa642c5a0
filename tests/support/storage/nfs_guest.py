"""What runs in the guest of `nfs.py`: a server of calls, and the functions for `test_nfs.py`.

As a pytest file (`pytest tests/support/storage/nfs_guest.py`, in the guest only) it holds the
conformance suite on the mount.
"""

import contextlib
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from dcp_mem.common.values import CheckpointStatus
from dcp_mem.errors import CheckpointExists, FlushFailed, StorageKeyMissing
from dcp_mem.storage import Storage
from dcp_mem.storage.posix import PosixStorage
from tests.support.checkpoints.jobs import Job, load, load_anew, save
from tests.support.storage.conformance import StorageConformance
from tests.support.storage.nfs import EXCHANGE, MOUNT
from tests.support.storage.soundness import Claim, claims_of

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 240.0
_DURABLE_SECONDS = 300.0

# -- calls -----------------------------------------------------------------------------------------


def tell(word: str) -> None:
    """Let the host go on, which waits for this word."""
    Path(EXCHANGE, f"{word}.word").touch()


def wait_for(word: str) -> None:
    """Wait until the host has told this word."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not Path(EXCHANGE, f"{word}.word").exists():
        assert time.monotonic() < deadline, f"the host has not told {word!r}"
        time.sleep(_POLL_SECONDS)


def _serve() -> None:
    exchange = Path(EXCHANGE)
    running: dict[int, str] = {}
    seen: set[str] = set()
    (exchange / "ready").touch()
    while True:
        for path in exchange.glob("*.call"):
            if path.stem not in seen:
                seen.add(path.stem)
                running[_fork(path)] = path.stem
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:  # and none that was orphaned: this process is no init, its shell is
                name = running.pop(pid)
                _publish(
                    exchange / f"{name}.status", str(os.waitstatus_to_exitcode(status)).encode()
                )
        time.sleep(_POLL_SECONDS)


def _fork(call: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(call.with_suffix(".output"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        function, args, kwargs = pickle.loads(call.read_bytes())
        _publish(call.with_suffix(".returned"), pickle.dumps(function(*args, **kwargs)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _publish(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


# -- what is called --------------------------------------------------------------------------------


class TestMountedDirectory(StorageConformance):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Callable[[], Storage]:
        assert str(tmp_path).startswith(f"{MOUNT}/")
        return lambda: PosixStorage(str(tmp_path / "absent" / "root"))


class _Counter:
    """A pytest plugin that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


def conformance() -> dict[str, int]:
    """How many tests of the conformance suite passed on the mount, failed and were skipped."""
    counter = _Counter()
    # Without those that move much memory: each page of a guest is a mapping of its
    # host's, which has a limit.
    options = [
        "-q",
        "-x",
        "-k",
        "not at_the_same_time and not can_no_longer_be_copied",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:cacheprovider",
        "--color=no",
        "--basetemp",
        f"{MOUNT}/conformance",
    ]
    pytest.main([*options, f"{__file__}::{TestMountedDirectory.__name__}"], plugins=[counter])
    return counter.outcomes


def mounts() -> str:
    return Path("/proc/mounts").read_text()


def save_and_load(root: str, agent: str) -> dict[str, Any]:
    """Save until durable on the mount, lose memory, and load with our reader and torch's."""
    job = _job(root)
    writer = job.writer(agent=agent)
    save(writer, 7)
    writer.wait("step-7", timeout=_DURABLE_SECONDS)
    writer.close()
    shutil.rmtree(job.directory)
    loaded = load_anew(job, "step-7")
    return {
        "number": loaded.number,
        "source": loaded.report.source,
        "stock": load(FileSystemReader(f"{job.url}/step-7")),
        "files": sorted(os.listdir(f"{job.url}/step-7")),
    }


def miss_and_find(operation: str, root: str, key: str) -> tuple[bool, Any]:
    """Look for a key before and after the host stores it.

    Returns whether a plain open finds it then, and what storage says.
    """
    storage, path = PosixStorage(f"{MOUNT}/{root}"), f"{MOUNT}/{root}/{key}"
    with pytest.raises(StorageKeyMissing):
        storage.get(key)
    assert not os.path.exists(path)
    tell(f"missed {root}")
    wait_for(f"stored {root}")
    return _can_be_opened(path), _OPERATIONS[operation](storage, key)


def _can_be_opened(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True


def _read_into(storage: Storage, key: str) -> bytes:
    buffer = bytearray(100)
    return bytes(buffer[: storage.read_into(key, 0, [memoryview(buffer)])])


_OPERATIONS: dict[str, Callable[[Storage, str], Any]] = {
    "get": lambda storage, key: storage.get(key),
    "read_into": _read_into,
    "ls": lambda storage, key: [entry.name for entry in storage.ls(os.path.dirname(key))],
    "delete": lambda storage, key: storage.delete(key),
}


def miss_and_load(root: str) -> int:
    """Ask for a checkpoint before the host commits it, and again at once when it has."""
    job = _job(root)
    with pytest.raises(CheckpointException, match="no step-7 in "):
        load_anew(job, "step-7")
    tell(f"missed {root}")
    wait_for(f"stored {root}")
    return load_anew(job, "step-7").number


def create_each(root: str, count: int) -> list[bool]:
    """Create keys one after the other: which of them were won."""
    storage = PosixStorage(f"{MOUNT}/{root}")
    return [creates(storage, f"step-{number}/.metadata", b"guest") for number in range(count)]


def creates(storage: Storage, key: str, data: bytes) -> bool:
    """Whether this put is the one that creates the key."""
    try:
        storage.put(key, data, create=True)
    except CheckpointExists:
        return False
    return True


def read_each(root: str, count: int) -> list[bytes]:
    storage = PosixStorage(f"{MOUNT}/{root}")
    return [storage.get(f"step-{number}/.metadata") for number in range(count)]


def save_beside(url: str, memory: str, number: int, seconds: float) -> tuple[list[Claim], str]:
    """Save names that another run saves as well, for that long.

    Returns what was durable at some time, and why storage refused the last one, "" if it didn't.
    """
    writer = Job(url, memory).writer(agent="thread")
    claims, refused = [], ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for step in range(1, 4):
            save(writer, 10 * step + number, f"step-{step}")
            try:
                writer.wait(f"step-{step}", timeout=_DURABLE_SECONDS)
                refused = ""
            except FlushFailed as error:
                refused = str(error)
            claims += claims_of(writer)
    writer.close(flush=False)
    return claims, refused


def save_much(root: str, nbytes: int) -> CheckpointStatus:
    """Save a large state and wait until it is durable."""
    writer = _job(root).writer(keep_memory=1)
    dcp.save(_large(nbytes), checkpoint_id="step-1", storage_writer=writer)
    writer.wait("step-1", timeout=_DURABLE_SECONDS)
    (status,) = writer.status()
    writer.close()
    print(Path(f"/dev/shm/memory-{root}/.agent/agent.log").read_text())
    return status


def loads_much(root: str, nbytes: int) -> bool:
    """Whether, once memory is lost, every element of the large state comes back from the mount."""
    job, expected = _job(root), _large(nbytes)
    shutil.rmtree(job.directory, ignore_errors=True)
    state = {"large": torch.full_like(expected["large"], -1)}
    with job.reader() as reader:
        dcp.load(state, checkpoint_id="step-1", storage_reader=reader)
        assert reader.report().source == "storage"
    return torch.equal(state["large"], expected["large"])


def _large(nbytes: int) -> dict[str, torch.Tensor]:
    return {"large": torch.arange(nbytes // 4, dtype=torch.int32)}


def _job(root: str) -> Job:
    return Job(f"{MOUNT}/{root}", f"/dev/shm/memory-{root}")


if __name__ == "__main__":
    from tests.support.storage import nfs_guest  # noqa: PLW0406 (pickles name this module, not __main__)

    nfs_guest._serve()
