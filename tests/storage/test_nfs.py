"""Checkpoints on a real NFSv4.2 mount: `bash .ci/nfs` installs what these tests need and runs them.

Elsewhere they are skipped, unless DCP_MEM_NFS=1 is set; then a missing tool is a failure. See
`tests.support.storage.nfs`.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints.jobs import Job, load_anew
from tests.support.processes.forks import forked
from tests.support.storage import nfs_guest
from tests.support.storage.nfs import MOUNT, Guest, NfsServer, running_nfs
from tests.support.storage.servers import StorageRoot
from tests.support.storage.soundness import assert_kept, committed, is_taken

pytestmark = [
    pytest.mark.nfs,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("DCP_MEM_NFS") != "1", reason="asked for by DCP_MEM_NFS=1: `bash .ci/nfs`"
    ),
]

_LARGE = 64 << 20
_RACES = 20
_MEETINGS = int(os.environ.get("DCP_MEM_NFS_MEETINGS", "3"))
_MEETING_SECONDS = 2.0
_DOWN_SECONDS = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NfsServer]:
    with running_nfs(tmp_path_factory.mktemp("nfs")) as server:
        yield server


@pytest.fixture(scope="module")
def guest(server: NfsServer) -> Iterator[Guest]:
    with server.guest() as guest:
        yield guest


def test_the_guest_has_a_hard_nfs_4_2_mount(guest: Guest) -> None:
    (line,) = (line for line in guest.run(nfs_guest.mounts).splitlines() if f" {MOUNT} " in line)
    assert " nfs4 " in line
    assert "vers=4.2" in line
    assert ",hard," in line


def test_the_conformance_suite_passes_on_the_mount(guest: Guest) -> None:
    outcomes = guest.start(nfs_guest.conformance).result()
    # A directory's listing has one level, and the server's file system clones no parts.
    assert outcomes.keys() == {"passed", "skipped"}
    assert outcomes["skipped"] == 2
    assert outcomes["passed"] >= 42


@pytest.mark.parametrize("agent", ["thread", "process"])
def test_a_save_comes_back_bit_exact_from_the_mount(guest: Guest, agent: str) -> None:
    account = guest.start(nfs_guest.save_and_load, f"full-{agent}", agent).result()
    assert (account["number"], account["source"], account["stock"]) == (7, "storage", 7)
    assert ".metadata" in account["files"]


# -- another client's files ------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["", "step-1"], ids=["no directory", "a directory"])
@pytest.mark.parametrize(
    ("operation", "expected"),
    [("get", b"committed"), ("read_into", b"committed"), ("ls", [".metadata"]), ("delete", None)],
    ids=["get", "read_into", "ls", "delete"],
)
def test_a_file_that_was_missed_once_is_found_as_soon_as_it_is_there(
    server: NfsServer, guest: Guest, operation: str, expected: object, there: str
) -> None:
    root = f"close-to-open-{operation}-{there or 'nothing'}"
    (server.export / root / there).mkdir(parents=True)
    call = guest.start(nfs_guest.miss_and_find, operation, root, "step-1/.metadata")
    call.wait_for(f"missed {root}")
    committed = StorageRoot(str(server.export / root)).storage()
    committed.put("step-1/.metadata", b"committed", create=True)
    guest.tell(f"stored {root}")
    found_by_open, answer = call.result()
    assert not found_by_open, (
        "this mount hides nothing from a plain open, so this test shows nothing"
    )
    assert answer == expected
    assert (server.export / root / "step-1/.metadata").exists() == (operation != "delete")


def test_a_checkpoint_that_was_missed_once_is_loaded_as_soon_as_it_is_committed(
    server: NfsServer, guest: Guest
) -> None:
    guest.start(nfs_guest.save_and_load, "elsewhere", "thread").result()
    (server.export / "missed").mkdir()
    call = guest.start(nfs_guest.miss_and_load, "missed")
    call.wait_for("missed missed")
    shutil.copytree(server.export / "elsewhere" / "step-7", server.export / "missed" / "step-7")
    guest.tell("stored missed")
    assert call.result() == 7


def test_a_race_to_create_a_file_has_one_winner(server: NfsServer, guest: Guest) -> None:
    root = server.export / "races"
    root.mkdir()
    ours, won_here = StorageRoot(str(root)).storage(), []
    call = guest.start(nfs_guest.create_each, "races", _RACES)
    for number in range(_RACES):
        _wait_for_any(root, f"step-{number}/*")  # the guest is about to create it
        won_here.append(nfs_guest.creates(ours, f"step-{number}/.metadata", b"host"))
    won_there = call.result()
    assert [here != there for here, there in zip(won_here, won_there, strict=True)] == [
        True
    ] * _RACES
    stored = [(root / f"step-{number}" / ".metadata").read_bytes() for number in range(_RACES)]
    assert stored == [b"host" if here else b"guest" for here in won_here]
    assert guest.run(nfs_guest.read_each, "races", _RACES) == stored
    assert {path.name for path in root.glob("*/*")} == {".metadata"}


@pytest.mark.parametrize("meeting", range(_MEETINGS))
def test_two_runs_at_one_root_leave_only_whole_checkpoints(
    server: NfsServer, guest: Guest, memory_root: Path, meeting: int
) -> None:
    """One saves on the mount, one on the server; each has a memory of its own."""
    name = f"meeting-{meeting}"
    there = guest.start(
        nfs_guest.save_beside, f"{MOUNT}/{name}", f"/dev/shm/{name}", 1, _MEETING_SECONDS
    )
    url = str(server.export / name)
    here = forked(nfs_guest.save_beside, url, str(memory_root / "host"), 2, _MEETING_SECONDS)
    ends = [there.result(), here]
    assert all(not refused or is_taken(refused) for _, refused in ends), ends
    assert any(not refused for _, refused in ends), ends
    stored = committed(url, {})
    assert stored.keys() == {"step-1", "step-2", "step-3"}
    for claims, _ in ends:
        assert_kept(stored, claims, has_retention=False)
    for step in stored:
        number = load_anew(Job(url, str(memory_root / "loaded")), step).number
        assert number // 10 == int(step.removeprefix("step-"))


def _wait_for_any(root: Path, pattern: str) -> None:
    deadline = time.monotonic() + 60
    while not any(root.glob(pattern)):
        assert time.monotonic() < deadline, pattern
        time.sleep(0.0005)


# -- a server that dies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loses_the_file", [False, True], ids=["that loses nothing", "that loses the file"]
)
def test_a_flush_outlives_a_kill_of_the_server_and_shows_nothing_before_it_is_whole(
    server: NfsServer, guest: Guest, loses_the_file: bool
) -> None:
    name = f"killed-{loses_the_file}"
    root = server.export / name
    root.mkdir()
    call = guest.start(nfs_guest.save_much, name, _LARGE)
    part = _half_written(root)
    with part.open("rb") as begun:
        server.kill()
        try:
            assert 0 < part.stat().st_blocks * 512 < _LARGE  # parts come in any order
            time.sleep(_DOWN_SECONDS)
            assert not call.has_ended
            assert [path.name for path in (root / "step-1").iterdir()] == [part.name]
            if loses_the_file:
                part.unlink()  # its handle is stale from now on
        finally:
            server.start()
        with _watching(root) as torn:
            status = call.result()
        went_on = os.path.samestat(
            os.fstat(begun.fileno()), part.with_suffix("").with_suffix("").stat()
        )
    assert torn == []
    assert went_on != loses_the_file
    assert status.flush_attempts > loses_the_file
    assert guest.start(nfs_guest.loads_much, name, _LARGE).result()


def _half_written(root: Path) -> Path:
    """The segment that is being written, as soon as some of it has arrived at the server."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for part in root.glob("step-1/*.part"):
            if part.stat().st_blocks:
                return part
        time.sleep(0.0005)
    raise AssertionError(f"no segment is written in {root}")


@contextlib.contextmanager
def _watching(root: Path) -> Iterator[list[str]]:
    """Collects what is wrong about the checkpoint whenever its .metadata can be seen."""
    wrong: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            if (root / "step-1" / ".metadata").exists() and not _is_whole(root / "step-1"):
                wrong.append(str(sorted(root.rglob("*"))))
            stop.wait(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield wrong
    finally:
        stop.set()
        watcher.join()


def _is_whole(checkpoint: Path) -> bool:
    segments = list(checkpoint.glob("*.distcp"))
    return (
        len(segments) == 1
        and segments[0].stat().st_size >= _LARGE
        and any(checkpoint.glob(".dcp_mem/*.json"))
    )
