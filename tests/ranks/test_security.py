"""Nothing is open to others, nothing untrusted is unpickled, and no secret is written anywhere."""

import json
import os
import pickle
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_mem
from dcp_mem import (
    CheckpointNotFound,
    FlushFailed,
    MemoryRootRefused,
    MemoryStorageReader,
    MemoryStorageWriter,
    NoRecoverableCheckpoint,
    RankFailed,
)
from dcp_mem.comm import ranks_of, relay
from dcp_mem.comm.peers import PeerLost, Peers, TcpWire
from dcp_mem.comm.timed_store import TimedStore
from dcp_mem.flushing.registration import Registration
from dcp_mem.format.catalog import Catalog, catalog_key
from dcp_mem.format.manifest import Manifest
from tests.support.checkpoints.jobs import (
    Job,
    agents,
    load,
    load_anew,
    save,
    save_one,
    save_two,
    save_two_with_torch,
)
from tests.support.processes.forks import forked, forked_ranks, in_process, raised_by
from tests.support.storage.file_systems import NOBODY, become_nobody, needs_root
from tests.support.storage.servers import StorageRoot

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def writing() -> Iterator[Callable[..., MemoryStorageWriter]]:
    """Makes writers in this very process; closed at the end."""
    made: list[MemoryStorageWriter] = []

    def make(job: Job, **options: Any) -> MemoryStorageWriter:
        made.append(job.writer(**options))
        return made[-1]

    yield make
    for writer in made:
        writer.close(flush=False)


# -- who may look ----------------------------------------------------------------------------------


def _live_carelessly(job: Job) -> None:
    """Everything that leaves files behind, by a process that would let everybody in."""
    os.umask(0)
    with job.writer(keep_memory=1) as writer:
        for number in (1, 2, 3):
            save(writer, number)
            writer.wait(timeout=60)
        load(job.reader())


@pytest.mark.parametrize("ranks", [1, 2])
def test_everything_in_memory_is_private_and_a_local_disk_goes_by_the_umask(
    memory_root: Path, tmp_path: Path, ranks: int
) -> None:
    job = Job(str(tmp_path / "storage" / "run"), str(memory_root / "root"))
    forked_ranks(_live_carelessly, ranks, job)
    found = [Path(job.memory), *Path(job.memory).rglob("*")]
    stored = [tmp_path / "storage", *(tmp_path / "storage").rglob("*")]
    assert {
        "agent.log",
        "socket",
        "lock",
        ".metadata",
        "checkpointHistories.csv",
        ".owner.json",
    } <= {path.name for path in (*found, *stored)}
    assert {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in stored} == {
        (True, 0o777),
        (False, 0o666),
    }
    exposed = {
        str(path): oct(stat.S_IMODE(path.lstat().st_mode))
        for path in found
        if stat.S_IMODE(path.lstat().st_mode)
        != (0o700 if path.is_dir() or path.is_socket() else 0o600)
    }
    assert exposed == {}


def _knock(root: str) -> Exception | None:
    """Try to reach the agent as another user."""
    become_nobody()
    with socket.socket(socket.AF_UNIX) as connection:
        return raised_by(lambda: connection.connect(f"{root}/.agent/socket"))


def _knock_at_an_open_door(root: str) -> bytes:
    """Register with the agent as another user who has reached its socket; return its answer."""
    directory = os.open(f"{root}/.agent", os.O_RDONLY | os.O_DIRECTORY)
    become_nobody()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(f"/proc/self/fd/{directory}/socket")
        message = pickle.dumps(Registration(job="job", url=f"{root}/elsewhere", overwrite=True))
        try:
            connection.sendall(struct.pack("!I", len(message)) + message)
            return connection.recv(1)
        except ConnectionError:
            return b""


@needs_root
def test_the_agent_listens_to_its_own_user_only(
    local_root: StorageRoot, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    writer = writing(Job(local_root.url, str(memory_root)))
    save(writer, 1)
    writer.wait(timeout=60)
    assert isinstance(forked(_knock, str(memory_root)), PermissionError)
    doors = [memory_root / ".agent", memory_root / ".agent" / "socket"]
    for door in doors:
        door.chmod(0o777)
    try:
        assert forked(_knock_at_an_open_door, str(memory_root)) == b""
    finally:
        for door in doors:
            door.chmod(0o700)
    save(writer, 2)
    writer.wait(timeout=60)
    assert (Path(local_root.url) / "step-2").is_dir(), "the agent was talked into another place"


# -- memory roots that others could get at ---------------------------------------------------------


def _open_to(mode: int) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / "root").mkdir()
        (place / "root").chmod(mode)
        return place / "root"

    return make


def _a_symlink(place: Path) -> Path:
    (place / "mine").mkdir(mode=0o700)
    (place / "root").symlink_to(place / "mine")
    return place / "root"


def _below_a_symlink(place: Path) -> Path:
    (place / "mine" / "root").mkdir(parents=True, mode=0o700)
    (place / "link").symlink_to(place / "mine")
    return place / "link" / "root"


def _behind_a_symlink(place: Path) -> Path:
    (place / "mine").mkdir(mode=0o700)
    (place / "link").symlink_to(place / "mine")
    return place / "link" / "root"


def _a_symlink_to_nowhere(place: Path) -> Path:
    (place / "root").symlink_to(place / "nowhere")
    return place / "root"


def _a_file(place: Path) -> Path:
    (place / "root").write_bytes(b"")
    return place / "root"


def _someone_elses(place: Path) -> Path:
    if os.geteuid() != 0:
        return Path("/usr")
    (place / "root").mkdir(mode=0o700)
    os.chown(place / "root", NOBODY, NOBODY)
    return place / "root"


ROOTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "someone else's": (_someone_elses, "belongs to uid"),
    "writable by all": (_open_to(0o777), "others may write to it (mode 0777)"),
    "sticky": (_open_to(0o1777), "others may write to it (mode 1777)"),
    "writable by a group": (_open_to(0o770), "others may write to it (mode 0770)"),
    "a symlink": (_a_symlink, "a symlink leads there"),
    "below a symlink": (_below_a_symlink, "a symlink leads there"),
    "to be made behind a symlink": (_behind_a_symlink, "a symlink leads there"),
    "a symlink to nowhere": (_a_symlink_to_nowhere, "a symlink leads there"),
    "a file": (_a_file, "it is not a directory"),
}


def _save_to(root: str, storage: str) -> Exception | None:
    writer = MemoryStorageWriter(storage, memory_root=root)
    return raised_by(lambda: save(writer, 1))


@pytest.fixture
def place(memory_root: Path) -> Iterator[Path]:
    """A directory whose contents may be as open as can be; gone before memory_root looks at it."""
    directory = memory_root / "place"
    directory.mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize(("make", "reason"), ROOTS.values(), ids=ROOTS)
def test_an_unsafe_memory_root_is_refused_on_every_rank(
    place: Path, tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    root = make(place)
    before = sorted(place.rglob("*"))
    for error in forked_ranks(_save_to, 2, str(root), str(tmp_path / "storage")):
        assert isinstance(error, MemoryRootRefused)
        assert isinstance(error, PermissionError)
        assert f"memory root {root} refused: " in str(error)
        assert reason in str(error)
        assert "Give memory_root= (or DCP_MEM_ROOT) a directory of your own" in str(error)
    assert sorted(place.rglob("*")) == before, "something was left in a place that isn't ours"


def _save_as_nobody(root: str, storage: str) -> Exception | None:
    become_nobody()
    return _save_to(root, storage)


@needs_root
def test_another_users_directory_is_no_memory_root_for_those_who_may_enter_it(
    memory_root: Path, tmp_path: Path
) -> None:
    (memory_root / "theirs").mkdir(mode=0o755)
    memory_root.chmod(0o711)
    try:
        error = forked(_save_as_nobody, str(memory_root / "theirs"), str(tmp_path))
    finally:
        memory_root.chmod(0o700)
        (memory_root / "theirs").chmod(0o700)
    assert isinstance(error, MemoryRootRefused)
    assert f"it belongs to uid 0, not to you (uid {NOBODY})" in str(error)


def _load_from(root: str, storage: str) -> Exception | None:
    return raised_by(lambda: load(MemoryStorageReader(storage, memory_root=root)))


@pytest.mark.parametrize("what", ["writable by all", "someone else's"])
def test_a_load_takes_nothing_from_an_unsafe_memory_root(
    place: Path, tmp_path: Path, what: str
) -> None:
    job = Job(str(tmp_path / "storage"), str(place / "safe"), name=None)
    forked(save_one, job)
    shutil.rmtree(tmp_path / "storage")
    shutil.copytree(job.memory, place / "root")
    if what == "someone else's" and os.geteuid() == 0:
        os.chown(place / "root", NOBODY, NOBODY)
    else:
        (place / "root").chmod(0o777)
    for error in forked_ranks(_load_from, 2, str(place / "root"), str(tmp_path / "storage")):
        assert isinstance(error, MemoryRootRefused)


def test_a_job_directory_that_is_a_symlink_is_refused(memory_root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (memory_root / "job").symlink_to(tmp_path / "elsewhere")
    error = forked(_save_in_memory, str(memory_root))
    (memory_root / "job").unlink()
    assert isinstance(error, MemoryRootRefused)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def _save_in_memory(root: str) -> Exception | None:
    writer = MemoryStorageWriter(None, memory_root=root, job="job")
    return raised_by(lambda: save(writer, 1))


# -- malicious metadata ----------------------------------------------------------------------------


class _Malice:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._command = f"touch '{mark}'"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._command,)


def _malicious(whole: bytes, mark: Path, disguised: bool) -> bytes:
    """The metadata with malice in it, or malice alone."""
    if not disguised:
        return pickle.dumps(_Malice(mark))
    metadata = pickle.loads(whole)
    metadata.planner_data = {"key": _Malice(mark)}
    return pickle.dumps(metadata, protocol=4)


alone_or_disguised = pytest.mark.parametrize("disguised", [False, True], ids=["alone", "disguised"])


@alone_or_disguised
@pytest.mark.parametrize("ranks", [1, 2])
def test_malicious_metadata_of_a_checkpoint_of_ours_on_storage_is_not_run(
    memory_root: Path, tmp_path: Path, ranks: int, disguised: bool
) -> None:
    """It is looked through for the save id, and never unpickled."""
    job, mark = Job(str(tmp_path / "storage"), str(memory_root)), tmp_path / "it ran"
    forked_ranks(save_two, ranks, job)
    shutil.rmtree(job.directory)
    path = tmp_path / "storage" / "step-2" / ".metadata"
    path.write_bytes(_malicious(path.read_bytes(), mark, disguised))
    for number, error in forked_ranks(_newest_and_named, ranks, job):
        assert number == (2 if disguised else 1)
        assert (error is None) if disguised else isinstance(error, CheckpointNotFound)
    assert not mark.exists()


@alone_or_disguised
@pytest.mark.parametrize("ranks", [1, 2])
def test_malicious_metadata_in_memory_is_not_run(
    memory_root: Path, tmp_path: Path, ranks: int, disguised: bool
) -> None:
    job, mark = Job(str(tmp_path / "storage"), str(memory_root)), tmp_path / "it ran"
    forked_ranks(save_two, ranks, job)
    directory = job.directory / "step-2"
    (own,) = directory.glob(".dcp_mem/metadata-*")
    own.write_bytes(_malicious((directory / ".metadata").read_bytes(), mark, disguised))
    assert own.samefile(directory / ".metadata")
    assert forked_ranks(_newest_and_named, ranks, replace(job, url=None)) == [(2, None)] * ranks
    assert not mark.exists()


def _plant(own: Path, mark: Path) -> None:
    """Give a checkpoint a catalog with malicious planner data, as one who knows the format."""
    (manifest_path,) = own.glob("manifest*.json")
    manifest = Manifest.from_json(manifest_path.read_bytes())
    path = own / f"catalog-{manifest.catalog}"
    catalog = Catalog.from_bytes(path.read_bytes())
    malice = pickle.dumps({"key": _Malice(mark)}, protocol=3)
    data = replace(catalog, paths=None, planner_pickle=malice).to_bytes()
    manifest_path.write_bytes(replace(manifest, catalog=catalog_key(data)).to_json())
    path.unlink()  # it is a name of a file that older checkpoints have too
    (own / f"catalog-{catalog_key(data)}").touch(mode=0o600)
    (own / f"catalog-{catalog_key(data)}").write_bytes(data)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", ["memory", "storage"])
def test_a_malicious_catalog_is_refused_and_not_run(
    memory_root: Path, tmp_path: Path, place: str, ranks: int
) -> None:
    job, mark = Job(str(tmp_path / "storage"), str(memory_root)), tmp_path / "it ran"
    forked_ranks(save_two, ranks, job)
    if place == "storage":
        shutil.rmtree(job.directory)
        _plant(tmp_path / "storage" / "step-2" / ".dcp_mem", mark)
    else:
        job = replace(job, url=None)
        _plant(job.directory / "step-2" / ".dcp_mem", mark)
    _assert_refused(job, ranks, mark)


@alone_or_disguised
def test_malicious_metadata_in_torchs_own_format_is_refused_and_not_run(
    memory_root: Path, tmp_path: Path, disguised: bool
) -> None:
    job, mark = Job(str(tmp_path / "storage"), str(memory_root)), tmp_path / "it ran"
    forked(save_two_with_torch, tmp_path / "storage")
    path = tmp_path / "storage" / "step-2" / ".metadata"
    path.write_bytes(_malicious(path.read_bytes(), mark, disguised))
    _assert_refused(job, 1, mark)


def _newest_and_named(job: Job) -> tuple[int, Exception | None]:
    return load_anew(job).number, raised_by(lambda: load_anew(job, "step-2"))


def _assert_refused(job: Job, ranks: int, mark: Path) -> None:
    for number, error in forked_ranks(_newest_and_named, ranks, job):
        assert number == 1
        assert isinstance(error, CheckpointNotFound)
        assert "refused to unpickle posix.system: DCP metadata doesn't contain it" in str(error)
        assert "load it with torch's own" in str(error)
    assert not mark.exists()


def test_a_checkpoint_reaches_no_file_outside_of_it(memory_root: Path, tmp_path: Path) -> None:
    forked(save_two_with_torch, tmp_path / "storage")
    directory = tmp_path / "storage" / "step-2"
    shutil.move(directory / "__0_0.distcp", tmp_path / "private.distcp")
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../private.distcp"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    number, error = forked(_newest_and_named, Job(str(tmp_path / "storage"), str(memory_root)))
    assert number == 1
    assert "names a file outside of the checkpoint: ../../private.distcp" in str(error)


# -- secrets ---------------------------------------------------------------------------------------

KEY, SECRET = "AKIAVERYSPECIALKEYID", "very+special/secret0access1key2"


def _files_with(secrets: tuple[str, ...], *directories: Path) -> list[str]:
    return [
        str(path)
        for directory in directories
        for path in directory.rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets)
    ]


def _shown(error: BaseException) -> str:
    return "".join([str(error), repr(error), *traceback.format_exception(error)])


@pytest.mark.parametrize("by", ["options", "environment"])
def test_credentials_are_written_nowhere(
    s3_root: StorageRoot,
    memory_root: Path,
    writing: Callable[..., MemoryStorageWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by: str,
) -> None:
    """Through a flush, a refused one, an eviction and an empty load, no output holds a secret."""
    secrets = (KEY, SECRET)
    options = {name: s3_root.storage_options[name] for name in ("endpoint_url", "client_kwargs")}
    if by == "options":
        options |= {"key": KEY, "secret": SECRET}
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    job = Job(f"{s3_root.url}/run", str(memory_root), options)
    astray = Job("s3://no-such-bucket/run", str(memory_root), options, "astray")
    writer, lost = writing(job, keep_memory=1), writing(astray, keep_memory=1)
    for number in (1, 2):
        save(writer, number)
        writer.wait(timeout=60)
        save(lost, number)
        with pytest.raises(FlushFailed) as failure:
            lost.wait(timeout=60)
    error = raised_by(lambda: load_anew(replace(astray, memory=str(memory_root / "none"))))
    assert isinstance(error, NoRecoverableCheckpoint)
    (agent,) = agents(memory_root)
    arguments, environment = agent.cmdline(), agent.environ()
    package = Path(dcp_mem.__file__).parent
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(package.parent)

    assert _files_with(secrets, memory_root) == []
    fs, path = s3_root.filesystem()
    stored = fs.cat(fs.find(path))
    assert len(stored) >= 8
    assert not [
        name for name, data in stored.items() if any(secret.encode() in data for secret in secrets)
    ]
    told = [
        *arguments,
        *(repr(each) for one in (writer, lost) for each in (one, one.settings, one.status())),
        *(_shown(each) for each in (error, failure.value)),
        caplog.text,
    ]
    assert not [text for text in told if any(secret in text for secret in secrets)]
    if by == "options":
        assert not [
            name for name, text in environment.items() if any(secret in text for secret in secrets)
        ]
    log = Path(writer.agent_log).read_text()
    assert "step-2 is durable in s3://" in log
    assert "flush of step-2 failed" in log
    assert (memory_root / "astray" / "checkpointHistories.csv").exists()


def test_a_connection_string_is_written_nowhere(
    abfs_root: StorageRoot, memory_root: Path, writing: Callable[..., MemoryStorageWriter]
) -> None:
    given = str(abfs_root.storage_options["connection_string"])
    key = given.partition("AccountKey=")[2].partition(";")[0]
    job = abfs_root.job(memory_root)
    writer, lost = (
        writing(job),
        writing(replace(job, url="abfs://no-such-container/run", name="astray")),
    )
    save(writer, 1)
    writer.wait(timeout=60)
    save(lost, 1)
    with pytest.raises(FlushFailed) as failure:
        lost.wait(timeout=60)
    assert _files_with((key, given), memory_root) == []
    told = [repr(writer), repr(writer.settings), repr(lost.status()), _shown(failure.value)]
    assert not [text for text in told if key in text]


def test_a_registration_shows_no_secrets() -> None:
    registration = Registration(
        job="job",
        url="s3://bucket/run",
        overwrite=True,
        storage_options={"secret": SECRET},
        environment={"AWS_SECRET_ACCESS_KEY": SECRET},
    )
    assert SECRET not in repr(registration)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAVERYSPECIALKEYID:secret-word@bucket/run",
        "https://me:secret-word@host/run",
        "abfs://container/run?sv=2024&sig=secret-word",
        "https://host/run?X-Amz-Signature=secret-word",
    ],
)
def test_a_url_with_a_secret_in_it_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(
        ValueError, match="give it as storage_options= or in the environment"
    ) as failure:
        MemoryStorageWriter(url)
    assert "secret-word" not in str(failure.value)


# -- who is a rank ---------------------------------------------------------------------------------


def _agrees(environments: Sequence[Mapping[str, str]]) -> str:
    """Agree with the other rank; return what that raises."""
    os.environ.update(environments[dist.get_rank()])
    tempfile.tempdir = None  # the process that was forked may have looked for it
    error = raised_by(lambda: ranks_of(None, "who").all_reduce(1, int.__add__))
    assert error is None or isinstance(error, RankFailed)
    dist.barrier()  # who is refused mustn't end the store that the other one learns it from
    return str(error or "")


_SOON = {"DCP_MEM_TIMEOUT": "60"}


def test_who_knows_the_store_but_not_the_machines_secret_is_no_rank(memory_root: Path) -> None:
    """As another user of the machine, who can't read this one's memory root."""
    roots = [{"DCP_MEM_ROOT": str(memory_root / name)} for name in ("mine", "theirs")]
    for text in forked_ranks(_agrees, 2, roots, env=_SOON):
        assert "has another secret than this process" in text
        assert "DCP_MEM_SECRET_FILE" in text


def test_ranks_of_one_machine_find_their_secret_in_its_memory_root(memory_root: Path) -> None:
    root = {"DCP_MEM_ROOT": str(memory_root)}
    for _ in range(2):  # what an earlier job has left is as good
        assert forked_ranks(_agrees, 2, [root, root], env=_SOON) == ["", ""]
    assert stat.S_IMODE((memory_root / ".secret").stat().st_mode) == 0o600


def test_ranks_with_one_secret_file_are_ranks_wherever_their_memory_is(memory_root: Path) -> None:
    secret = memory_root / "secret"
    places = [
        {"DCP_MEM_ROOT": str(memory_root / name), "DCP_MEM_SECRET_FILE": str(secret)}
        for name in ("first", "second")
    ]
    assert forked_ranks(_agrees, 2, places, env=_SOON) == ["", ""]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    secret.write_text("one that a person has chosen")
    assert forked_ranks(_agrees, 2, places, env=_SOON) == ["", ""]
    places[1]["DCP_MEM_SECRET_FILE"] = ""
    for text in forked_ranks(_agrees, 2, places, env=_SOON):
        assert "DCP_MEM_SECRET_FILE" in text


def _open_to_others(path: Path) -> None:
    path.write_text("a secret of a person")
    path.chmod(0o640)


def _short(path: Path) -> None:
    path.touch(0o600)
    path.write_text("short")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_open_to_others, "others may read it"),
        (_short, "it holds less than 16 bytes"),
        (os.mkfifo, "it isn't a file of yours"),
        (Path.mkdir, "Is a directory"),
    ],
)
def test_a_secret_file_that_keeps_no_secret_is_refused(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    make(tmp_path / "secret")
    env = {"DCP_MEM_SECRET_FILE": str(tmp_path / "secret"), **_SOON}
    for text in forked_ranks(_agrees, 2, [{}, {}], env=env):
        assert f"{tmp_path / 'secret'} can't keep the ranks' secret: " in text
        assert why in text


@pytest.mark.parametrize("root", ["open", "of a missing directory/root", "a file"])
def test_a_memory_root_that_can_keep_no_secret_has_a_private_directory_stand_in(
    tmp_path: Path, root: str
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "a file").touch()
    (tmp_path / "tmp").mkdir()
    env = {"DCP_MEM_ROOT": str(tmp_path / root), "TMPDIR": str(tmp_path / "tmp"), **_SOON}
    assert forked_ranks(_agrees, 2, [{}, {}], env=env) == ["", ""]
    assert list((tmp_path / "open").iterdir()) == []
    (kept,) = (tmp_path / "tmp").glob("dcp_mem-*/.secret")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_where_no_directory_can_keep_the_secret_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / f"dcp_mem-{os.geteuid()}").touch()
    env = {"DCP_MEM_ROOT": str(tmp_path / "open"), "TMPDIR": str(tmp_path / "tmp"), **_SOON}
    found = forked_ranks(_agrees, 2, [{}, {}], env=env)
    for text in found:
        assert "others may write to it (mode 0777)" in text


@pytest.mark.parametrize("how", ["answers", "passes on"])
@in_process
def test_a_stranger_in_a_ranks_place_gets_nothing_but_a_greeting(how: str) -> None:
    store = dist.HashStore()
    first, second = (
        Peers("two", rank, TimedStore(store, 10.0), lambda: False) for rank in range(2)
    )
    with suppress(PeerLost):
        first.connected([1], time.monotonic() + 0.1)  # listens, and nobody comes
    host, port, token = json.loads(store.get("two/address/0"))
    passed, got = list[bool](), bytearray()

    def stranger(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, socket.create_connection((host, port)) as real:
            got.extend(connection.recv(1 << 16))
            if how == "answers":
                connection.sendall(b"x" * 32)
            else:
                real.sendall(got)
                answer = real.recv(32)
                passed.append(bool(answer))
                connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                got.extend(data)

    def welcome() -> None:
        with suppress(PeerLost):
            first.connected([1], time.monotonic() + 8)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set("two/address/0", json.dumps([*listener.getsockname(), token]))
        threads = [
            threading.Thread(target=stranger, args=[listener]),
            threading.Thread(target=welcome),
        ]
        for thread in threads:
            thread.start()
        error = raised_by(
            lambda: TcpWire(second, 1, time.monotonic() + 20).send([0], b"tensors" * 100)
        )
        for thread in threads:
            thread.join()
    for peers in (first, second):
        peers.close()
    text, nbytes, is_rank = str(error), len(got), any(passed)
    assert "rank 0" in text
    assert ("somebody else answers" if how == "answers" else "another secret") in text
    assert nbytes < 100
    assert not is_rank


class _Harm:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def _hears(path: str) -> str:
    """Rank 1 is somebody who knows all that ranks know, and sends a pickle."""
    ranks = ranks_of(None, "harm")
    ranks.all_reduce(1, int.__add__)
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("encoded", "dumped"):
                patch.setattr(relay, name, lambda value: pickle.dumps(_Harm(path)), raising=False)
            return str(raised_by(lambda: ranks.all_reduce(1, int.__add__)))
    return str(raised_by(lambda: ranks.all_reduce(1, int.__add__)))


def test_what_comes_from_a_rank_runs_nothing(tmp_path: Path) -> None:
    found, _ = forked_ranks(_hears, 2, str(tmp_path / "made"))
    assert "what came is no message of a rank" in found
    assert not (tmp_path / "made").exists()
