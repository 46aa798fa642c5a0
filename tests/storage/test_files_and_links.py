"""A directory with links, FIFOs and unreadable files in it: each of them spoils only itself."""

import ctypes
import errno
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import dcp_mem
import dcp_mem.flushing.flusher
import dcp_mem.reader
from dcp_mem import CheckpointNotFound, FlushFailed, NoRecoverableCheckpoint, StorageRefused
from dcp_mem.cli.main import main
from dcp_mem.flushing.parts import FlushJob, stored_sizes
from dcp_mem.memory.job import JobMemory
from dcp_mem.operations.housekeeping import reject_in_memory, reject_on_storage
from dcp_mem.options import settings
from dcp_mem.storage import Source
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.routes import storage_of
from tests.support.checkpoints.jobs import Job, Loaded, load_anew, make_state, save, wait_until
from tests.support.private import private_directory
from tests.support.processes.forks import forked, forked_ranks, in_process, raised_by
from tests.support.storage.conformance import upload
from tests.support.storage.file_systems import needs_root
from tests.support.storage.ways import QUICK

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root with step-1 and step-2."""
    root = tmp_path_factory.mktemp("saved") / "run"
    with private_directory("links") as memory:
        with Job(str(root), str(memory)).writer(agent="thread") as writer:
            for number in (1, 2):
                save(writer, number)
                writer.wait(f"step-{number}", timeout=30)
        yield root


@pytest.fixture
def root(saved: Path, job: Job) -> Path:
    """The job's root, with step-1 and step-2; the memory is lost."""
    assert job.url is not None
    shutil.copytree(saved, job.url, symlinks=True)
    return Path(job.url)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    return directory


def _files(directory: Path) -> list[str]:
    return sorted(os.path.relpath(path, directory) for path in directory.rglob("*"))


# -- links -----------------------------------------------------------------------------------------


def test_deleting_a_link_leaves_what_it_leads_to(job: Job, root: Path) -> None:
    (root / "latest").symlink_to("step-2")
    before = _files(root / "step-2")
    assert dcp_mem.delete(root, "latest") == 0
    assert not (root / "latest").is_symlink()
    assert _files(root / "step-2") == before
    assert load_anew(job).number == 2


def test_deleting_a_checkpoint_leaves_what_links_in_it_lead_to(root: Path, outside: Path) -> None:
    (outside / "precious").write_bytes(b"1")
    (root / "step-1" / "directory").symlink_to(outside)
    (root / "step-1" / "file").symlink_to(outside / "precious")
    (root / "step-1" / "nowhere").symlink_to(outside / "gone")
    dcp_mem.delete(root, "step-1")
    assert not (root / "step-1").exists()
    assert _files(outside) == ["precious"]


@pytest.mark.parametrize("link", ["step-9", "step-9/.dcp_mem"])
def test_orphans_are_not_looked_for_behind_links(
    root: Path, saved: Path, outside: Path, link: str
) -> None:
    shutil.copytree(saved / "step-2", outside / "step-2")
    (outside / "step-2" / ".metadata").unlink()
    for path in (outside / "step-2").rglob("*"):
        os.utime(path, (1.0, 1.0))
    before = _files(outside)
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(outside / link.replace("step-9", "step-2"))
    assert dcp_mem.collect_orphans(root, older_than=0) == []
    assert _files(outside) == before


@pytest.mark.parametrize("link", ["step-3", "step-3/.dcp_mem", ".dcp_mem"])
def test_nothing_is_saved_through_a_link(job: Job, root: Path, outside: Path, link: str) -> None:
    if link == ".dcp_mem":
        shutil.rmtree(root / link)
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(outside)
    with pytest.raises(FlushFailed, match=r"\.?\w+ is a symbolic link, and links below the root"):
        _save_durably(job)
    assert _files(outside) == []
    (root / link).unlink()


def _save_served(job: Job) -> None:
    served = dcp_mem.serve(str(job.url), memory_root=job.memory, agent="thread")
    dcp.save(make_state(3), checkpoint_id=f"{job.url}/step-3")
    served.stop(flush=False)


def test_no_directory_is_made_through_a_link(job: Job, root: Path, outside: Path) -> None:
    (root / "step-3").symlink_to(outside)
    forked(_save_served, job)
    assert _files(outside) == []


def test_a_link_beside_a_checkpoint_is_a_name_to_load_it_by(job: Job, root: Path) -> None:
    (root / "best").symlink_to("step-1")
    (root / "absolute").symlink_to(root / "step-1")
    found = [load_anew(job, name) for name in ("best", "absolute")]
    assert [(one.number, one.report.checkpoint_id) for one in found] == [(1, "step-1")] * 2
    assert load_anew(job).number == 2
    shown = CliRunner().invoke(main, ["show", str(root), "best", "--json"])
    assert '"step-1"' in shown.output


def test_a_link_that_leads_elsewhere_is_refused_by_name(
    job: Job, root: Path, outside: Path
) -> None:
    (root / "step-2").rename(outside / "step-2")
    (root / "step-2").symlink_to(outside / "step-2")
    (root / "data").symlink_to(outside)
    error = raised_by(lambda: load_anew(job, "step-2"))
    assert "step-2 is a symbolic link, and links below the root aren't followed" in str(error)
    loaded = load_anew(job)
    assert loaded.number == 1
    (why,) = loaded.report.passed_over
    assert "step-2 is a symbolic link" in why


def test_a_link_that_leads_nowhere_in_the_place_of_a_checkpoint_is_named(
    job: Job, root: Path, outside: Path
) -> None:
    shutil.rmtree(root / "step-2")
    (root / "step-2").symlink_to(outside / "step-2")
    (root / "data").symlink_to(outside / "data")
    (root / "latest").symlink_to("step-9")
    loaded = load_anew(job)
    assert loaded.number == 1
    (why,) = loaded.report.passed_over
    assert "step-2 is a symbolic link" in why
    listed = CliRunner().invoke(main, ["ls", str(root)]).output
    assert "step-2 is a symbolic link" in listed
    assert "latest" not in listed


def test_training_does_not_begin_anew_where_its_checkpoints_are_moved_behind_links(
    job: Job, root: Path, outside: Path
) -> None:
    for name in ("step-1", "step-2"):
        (root / name).rename(outside / name)
        (root / name).symlink_to(outside / name)
    manager = dcp_mem.CheckpointManager(str(root), memory_root=job.memory, job=job.name)
    with pytest.raises(NoRecoverableCheckpoint, match="step-2 is a symbolic link"), manager:
        manager.restore(make_state(0))
    listed = CliRunner().invoke(main, ["ls", str(root), "--json"])
    assert "step-1 is a symbolic link" in listed.output


@pytest.mark.parametrize("target", ["..", "."])
def test_a_link_to_the_root_or_above_it_is_no_name_of_a_checkpoint(root: Path, target: str) -> None:
    (root / "evil").symlink_to(target)
    for above in (root, root.parent):
        shutil.copytree(root / "step-2", above, dirs_exist_ok=True)
    before = _files(root.parent)
    with pytest.raises(StorageRefused, match="evil is a symbolic link"):
        reject_on_storage(settings(root), "evil", "the loss is NaN")
    assert _files(root.parent) == before


@pytest.mark.parametrize("key", ["..", "../step", "step-1/../..", "step-1/./a", "a//b"])
def test_no_key_leads_above_the_root(root: Path, key: str) -> None:
    storage, before = PosixStorage(str(root)), _files(root.parent)
    acts: list[Callable[[], object]] = [
        lambda: storage.ls(key),
        lambda: storage.get(f"{key}/file"),
        lambda: storage.put(f"{key}/file", b"1"),
        lambda: storage.delete(f"{key}/file"),
        lambda: storage.upload(f"{key}/file", 1),
    ]
    for act in acts:
        with pytest.raises(StorageRefused, match="names nothing below the root"):
            act()
    assert _files(root.parent) == before


def test_the_root_itself_may_be_a_link(job: Job, root: Path, tmp_path: Path) -> None:
    (tmp_path / "by-link").symlink_to(root)
    job = replace(job, url=str(tmp_path / "by-link"))
    _save_durably(job)
    assert load_anew(replace(job, name="elsewhere")).number == 3
    dcp_mem.delete(tmp_path / "by-link", "step-3")
    assert not (root / "step-3").exists()


def _save_durably(job: Job) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.flushing.flusher, "RETRIES_OF_A_FLUSH", QUICK)
        with job.writer(agent="thread") as writer:
            save(writer, 3)
            try:
                writer.wait("step-3", timeout=30)
            except FlushFailed:
                writer.close(flush=False)
                raise


# -- what is no file -------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_DIRECTORY)
    try:  # a path to bind to may have 107 bytes
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 200 << 30)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "a FIFO"),
    "a socket": (_socket, "a socket"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
    "a directory": (lambda path: path.mkdir(), "a directory"),
    "200 GB": (_large, "214748364800"),
}
FILES = {
    ".metadata": ".metadata",
    "manifest": ".dcp_mem/manifest-*",
    "catalog": ".dcp_mem/catalog-*",
    "node manifest": ".dcp_mem/node-*",
    "segment": "*.distcp",
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_file = pytest.mark.parametrize("file", FILES)


def _put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    KINDS[kind][0](path)


def _file(root: Path, file: str) -> Path:
    (path,) = (root / "step-2").glob(FILES[file])
    return path


@each_file
@each_kind
def test_what_is_no_file_spoils_its_checkpoint_alone(
    job: Job, root: Path, file: str, kind: str
) -> None:
    path = _file(root, file)
    _put(kind, path)
    loaded = load_anew(job)
    assert loaded.number == 1
    (why,) = loaded.report.passed_over
    assert why.startswith("step-2")
    assert KINDS[kind][1] in why or (file, kind) == ("segment", "a directory")
    assert path.name in why or file == "segment"


@pytest.mark.parametrize("file", [".metadata", "manifest", "segment"])
@each_kind
def test_listings_name_what_is_no_file(root: Path, file: str, kind: str) -> None:
    _put(kind, _file(root, file))
    listed = CliRunner().invoke(main, ["ls", str(root), "--json"])
    assert listed.exit_code in (0, 1)
    assert '"step-1"' in listed.output
    assert KINDS[kind][1] in listed.output or (file, kind) == ("segment", "a directory")


@pytest.mark.parametrize("file", ["checkpointHistories.csv", "recoveries.jsonl"])
@each_kind
def test_a_history_that_is_no_file_is_named_and_hinders_nothing(
    job: Job, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, kind: str
) -> None:
    _put(kind, root / ".dcp_mem" / file)
    page = ["--output", str(tmp_path / "report.html")]
    report = CliRunner().invoke(main, ["report", str(root), "--json", *page])
    assert KINDS[kind][1] in report.output
    _save_durably(job)
    assert load_anew(replace(job, name="elsewhere")).number == 3
    assert KINDS[kind][1] in caplog.text


@pytest.mark.parametrize("file", [".metadata", "generation"])
@each_kind
def test_a_flush_that_meets_what_is_no_file_says_so_and_goes_on_once_it_is_gone(
    job: Job, root: Path, file: str, kind: str
) -> None:
    path = {
        ".metadata": root / "step-3" / ".metadata",
        "generation": root / ".dcp_mem" / "generation-0000000001.json",
    }[file]
    path.parent.mkdir(exist_ok=True)
    _put(kind, path)
    with pytest.raises(FlushFailed, match=KINDS[kind][1]) as raised:
        _save_durably(job)
    assert path.name in str(raised.value)
    path.rmdir() if path.is_dir() else path.unlink()
    with job.writer(agent="thread") as writer:
        writer.wait("step-3", timeout=30)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "200 GB"])
def test_a_lock_that_is_no_file_is_named(root: Path, kind: str) -> None:
    (root / ".dcp_mem" / "lock").unlink(missing_ok=True)
    _put(kind, root / ".dcp_mem" / "lock")
    with pytest.raises(StorageRefused, match=rf"it is {KINDS[kind][1]}, not a file \(.*lock\)"):
        PosixStorage(str(root)).has_conditions()


# -- what can't be read ----------------------------------------------------------------------------


def _failing(patch: pytest.MonkeyPatch, call: str, number: int, names: str) -> None:
    """Have a system call fail for what lies under a path that ends so."""
    original = getattr(os, call)

    def fail(path: Any, *given: Any, **options: Any) -> Any:
        where = os.path.realpath(f"/proc/self/fd/{path}" if isinstance(path, int) else path)
        if where.endswith(names):
            raise OSError(number, os.strerror(number), path)
        return original(path, *given, **options)

    patch.setattr(os, call, fail)


def _load_where(job: Job, calls: str, number: int, names: str) -> Loaded | Exception:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.reader, "storage_of", partial(storage_of, retry_policy=QUICK))
        for call in calls.split():
            _failing(patch, call, number, names)
        loaded = list[Loaded]()
        return raised_by(lambda: loaded.append(load_anew(job))) or loaded[0]


@each_file
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EUCLEAN])
def test_an_error_of_one_file_is_that_files(
    job: Job, root: Path, caplog: pytest.LogCaptureFixture, file: str, number: int
) -> None:
    path = str(_file(root, file))
    loaded = forked(_load_where, job, "open", number, path)
    assert isinstance(loaded, Loaded), loaded
    assert loaded.number == 1
    (why,) = loaded.report.passed_over
    assert f"{os.strerror(number)} ({path})" in why


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_segment_that_fails_while_it_is_read_leaves_the_older_checkpoint(
    job: Job, root: Path, number: int
) -> None:
    loaded = forked(_load_where, job, "preadv", number, str(_file(root, "segment")))
    assert isinstance(loaded, Loaded), loaded
    assert loaded.number == 1
    assert os.strerror(number) in loaded.report.passed_over[0]


def _load_where_one_rank_fails(job: Job, names: str) -> Loaded | Exception:
    return _load_where(job, "preadv", errno.EIO, names if dist.get_rank() == 0 else "nowhere")


def test_what_one_rank_cannot_read_all_ranks_pass_over(job: Job, root: Path) -> None:
    found = forked_ranks(_load_where_one_rank_fails, 2, job, str(_file(root, "segment")))
    reports = [one.report.passed_over for one in found if isinstance(one, Loaded)]
    assert len(reports) == 2, found
    assert reports[0] == reports[1]
    assert os.strerror(errno.EIO) in reports[0][0]


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN])
def test_a_server_that_goes_away_meanwhile_is_no_reason_for_an_older_checkpoint(
    job: Job, root: Path, number: int
) -> None:
    error = forked(_load_where, job, "preadv", number, str(_file(root, "segment")))
    assert isinstance(error, Exception), error
    assert f"is unavailable: {os.strerror(number)}" in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_the_root_says_as_well_is_no_files_error(job: Job, root: Path, number: int) -> None:
    error = forked(_load_where, job, "preadv statvfs", number, "")
    assert isinstance(error, Exception), error
    assert f"is unavailable: {os.strerror(number)}" in str(error)


def _load_unprivileged(job: Job) -> Loaded:
    _give_up_capabilities()
    return load_anew(job)


def _give_up_capabilities() -> None:
    """Become one whom modes keep out, as they don't the superuser."""
    capabilities = (ctypes.c_uint32 * 6)()  # none
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None).capset(header, capabilities) == 0


@pytest.mark.parametrize("closed", [".", ".metadata", ".dcp_mem", ".dcp_mem/manifest-*"])
def test_what_modes_keep_a_reader_out_of_is_passed_over(job: Job, root: Path, closed: str) -> None:
    (path,) = [root / "step-2"] if closed == "." else (root / "step-2").glob(closed)
    path.chmod(0)
    try:
        loaded = forked(_load_unprivileged, job)
    finally:
        path.chmod(0o700)
    assert loaded.number == 1
    (why,) = loaded.report.passed_over
    assert "Permission denied" in why
    assert str(path) in why


def test_training_does_not_begin_anew_over_checkpoints_that_cannot_be_read(
    job: Job, root: Path
) -> None:
    error = forked(_load_where, job, "open", errno.EACCES, ".metadata")
    assert isinstance(error, NoRecoverableCheckpoint)
    assert not isinstance(error, CheckpointNotFound)
    assert [why.partition(":")[0] for why in error.reasons] == ["step-2", "step-1"]


@needs_root
@in_process
def test_without_proc_storage_is_not_taken_for_empty(job: Job, root: Path) -> None:
    libc = ctypes.CDLL(None)
    private, lazily = 1 << 18 | 1 << 14, 2  # MS_PRIVATE | MS_REC, MNT_DETACH
    assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
    assert libc.mount(None, b"/", None, private, None) == 0
    assert libc.umount2(b"/proc", lazily) == 0
    error = raised_by(lambda: load_anew(job))
    assert not isinstance(error, CheckpointNotFound)
    assert "/proc isn't mounted" in str(error)


class _Stale:
    """An entry of a directory that can't be looked at, for its handle is stale."""

    def __init__(self, entry: os.DirEntry[str], *, is_kind_known: bool) -> None:
        self.name, self._entry, self._is_kind_known = entry.name, entry, is_kind_known

    def stat(self, **_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.name)

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        if not self._is_kind_known:
            self.stat()
        return self._entry.is_dir(follow_symlinks=follow_symlinks)


@pytest.mark.parametrize("is_kind_known", [True, False])
@pytest.mark.parametrize("stale", ["step-2", "step-2/.metadata"])
def test_a_stale_handle_drops_no_name_from_a_listing(
    job: Job,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    stale: str,
    is_kind_known: bool,
) -> None:
    original = os.scandir

    @contextmanager
    def scandir(path: str) -> Iterator[Any]:
        directory = Path(path).resolve()
        with original(path) as entries:
            yield (
                _Stale(one, is_kind_known=is_kind_known)
                if directory / one.name == root / stale
                else one
                for one in entries
            )

    monkeypatch.setattr(os, "scandir", scandir)
    assert load_anew(job).number == 2


# -- modes, and copies -----------------------------------------------------------------------------


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_file_that_others_may_read_is_no_link_to_one_that_they_may_not(tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path))
    for umask in (0o077, 0o022):
        with _umask(0o077):
            stored = Source("step-1", 5, upload(storage, "step-1", b"12345"))
        with _umask(umask), closing(storage.upload("step-2", 5, stored)) as going:
            assert going.copy_whole() == (umask == 0o077)


def test_the_lock_is_for_all_who_may_write_beside_it(tmp_path: Path) -> None:
    (tmp_path / ".dcp_mem").mkdir()
    (tmp_path / ".dcp_mem").chmod(0o775)
    with _umask(0o022):
        assert PosixStorage(str(tmp_path)).has_conditions()
    assert stat.S_IMODE((tmp_path / ".dcp_mem" / "lock").stat().st_mode) == 0o664


def _lock_unprivileged(url: str) -> bool:
    _give_up_capabilities()
    return PosixStorage(url).has_conditions()


def test_a_lock_that_may_only_be_read_is_taken_all_the_same(tmp_path: Path) -> None:
    assert PosixStorage(str(tmp_path)).has_conditions()
    (tmp_path / ".dcp_mem" / "lock").chmod(0o444)
    assert forked(_lock_unprivileged, str(tmp_path))


def _save_served_privately(job: Job) -> None:
    os.umask(0o077)
    served = dcp_mem.serve(str(job.url), memory_root=job.memory, storage_mode=0o640)
    dcp.save(make_state(3), checkpoint_id=f"{job.url}/step-3")
    served.stop()


def test_directories_that_a_save_makes_have_the_storage_mode(job: Job) -> None:
    forked(_save_served_privately, job)
    root = Path(str(job.url))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))}
    assert modes == {0o750, 0o640}


def test_a_save_goes_before_the_copy_that_somebody_has_made_of_it(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        save(writer, 5)
        writer.wait("step-5", timeout=30)
        root = Path(str(job.url))
        shutil.copytree(root / "step-5", root / "step-5-backup")
        report = load_anew(job).report
    assert (report.checkpoint_id, report.source) == ("step-5", "memory")


def test_a_rejection_in_memory_marks_what_a_link_stands_for(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        save(writer, 3)
        writer.wait("step-3", timeout=30)
        root = Path(str(job.url))
        (root / "step-3").rename(root / "kept")
        (root / "step-3").symlink_to("kept")
        assert reject_in_memory(writer.settings, "step-3", "the loss is NaN")
        wait_until(lambda: list(root.glob("kept/.dcp_mem/rejected-*")), "the mark", timeout=20)


def test_what_lies_in_a_segments_place_and_is_no_file_is_not_taken_for_it(job: Job) -> None:
    _save_durably(job)
    (checkpoint,) = JobMemory(job.memory, "job").find("step-3")
    (segment,) = Path(str(job.url), "step-3").glob("*.distcp")
    storage = PosixStorage(str(job.url))
    flush = FlushJob(checkpoint=checkpoint, node="", storage=storage, overwrite=False)
    assert stored_sizes(flush)[segment.name] == segment.stat().st_size
    _put("a FIFO", segment)
    assert segment.name not in stored_sizes(flush)


def test_what_fails_leaves_no_descriptor_open(root: Path, outside: Path) -> None:
    def begin_upload(key: str) -> None:
        storage.upload(key, 1).close()

    def act_everywhere() -> None:
        for key in ("step-2/.metadata", "link/key", "fifo", "step-2/.metadata/key", "gone/key"):
            for act in (storage.get, storage.ls, storage.delete, storage.drop_unfinished):
                if key != "step-2/.metadata":
                    raised_by(partial(act, key))
            raised_by(partial(storage.read_into, key, 0, [memoryview(bytearray(1))]))
            raised_by(partial(storage.swap, key, b"old", b"new"))
            raised_by(partial(storage.remove, key, b"old"))
            raised_by(partial(storage.put, key, b"1", create=True))
            raised_by(partial(begin_upload, key))

    storage = PosixStorage(str(root))
    (root / "link").symlink_to(outside)
    os.mkfifo(root / "fifo")
    act_everywhere()
    before = len(os.listdir("/proc/self/fd"))
    act_everywhere()
    assert len(os.listdir("/proc/self/fd")) == before
    assert _files(outside) == []
