"""Fixtures: storage on real servers, a private memory root, an environment without surprises."""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from hypothesis import settings

from tests import ways
from tests.cluster import Cluster, running_cluster
from tests.servers import (
    BlobServer,
    S3Server,
    ServerUnavailable,
    StorageRoot,
    running_azurite,
    running_moto,
    running_radosgw,
)

S = TypeVar("S")

_SHM = Path("/dev/shm")
_ROOT_PREFIX = "dcp_mem-test"
_SERVER_FIXTURES = {"azurite", "moto", "radosgw"}
_KEPT_VARIABLES = {"DCP_MEM_AZURITE", "DCP_MEM_NO_NODES", "DCP_MEM_NO_RADOSGW"}
_LOG_CHARACTERS = 8192
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.01
_SETTLED_SECONDS = 60.0  # After which a directory without a lock will not get one any more.

# Processes are started within tests: a first example takes many times longer than the next.
settings.register_profile("dcp_mem", settings(), deadline=None)
settings.load_profile("dcp_mem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server, by its fixtures; storage_root's parameters mark themselves."""
    for item in items:
        if _SERVER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.servers)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip what can't be collected without the packages in $DCP_MEM_WITHOUT: `.ci/compat` has a torch that they don't go with."""
    report = yield
    text = str(report.longrepr)
    missing = [name for name in os.environ.get("DCP_MEM_WITHOUT", "").split() if name.partition("-")[0] in text]
    if report.failed and missing:
        reason = f"Skipped: torch {version('torch')} goes without {', '.join(missing)}"
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report


@pytest.fixture(scope="session", autouse=True)
def _hermetic_environment() -> Iterator[None]:
    """No job, memory root, account or proxy of the developer's reaches a test or a child of it."""
    _remove_abandoned()
    foreign = ("AWS_", "AZURE_", "DCP_MEM_", "SLURM_", "TORCHELASTIC_")
    with pytest.MonkeyPatch.context() as patch, _private_directory("default") as default_root:
        for name in list(os.environ):
            if name.startswith(foreign) and name not in _KEPT_VARIABLES:
                patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("DCP_MEM_ROOT", str(default_root))
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture
def memory_root() -> Iterator[Path]:
    """A private directory in /dev/shm. At the end, processes that use it are killed (the agents),
    their logs shown, and everything in it has to be the owner's alone; then it is removed.
    """
    with _private_directory("root") as root:
        yield root
        _kill_users(root)
        _show_logs(root)
        exposed = [str(path) for path in (root, *root.rglob("*")) if _is_exposed(path)]
        assert not exposed, f"open to other users: {exposed}"


@pytest.fixture(scope="session")
def azurite() -> Iterator[BlobServer]:
    """Azurite for the whole session. Tests that make a server fail use `running_azurite()`."""
    with _started(running_azurite) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """moto's S3 for the whole session. Tests that make a server fail use `running_moto()`."""
    with _started(running_moto) as server:
        yield server


@pytest.fixture(scope="session")
def radosgw() -> Iterator[S3Server]:
    """Ceph's S3 for the whole session. $DCP_MEM_NO_RADOSGW has its tests skipped also where a missing server fails."""
    if os.environ.get("DCP_MEM_NO_RADOSGW"):
        pytest.skip("radosgw could not be installed: it takes Debian's packages, and root or sudo")
    with _started(running_radosgw) as server:
        yield server


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """As many nodes as the test's mark `nodes` says, which takes what `running_cluster` does.

    $DCP_MEM_NO_NODES has tests on nodes skipped also where their lack is a failure.
    """
    if os.environ.get("DCP_MEM_NO_NODES"):
        pytest.skip("no nodes can be made here: it takes root, namespaces, and Debian's iproute2")
    mark = request.node.get_closest_marker("nodes")
    with _started(lambda: running_cluster(*mark.args, **mark.kwargs)) as cluster:
        yield cluster


@pytest.fixture
def local_root(tmp_path: Path) -> StorageRoot:
    """An absent directory on a local disk."""
    return StorageRoot(str(tmp_path / "storage"))


@pytest.fixture
def abfs_root(azurite: BlobServer) -> Iterator[StorageRoot]:
    """A fresh container."""
    with azurite.fresh_root() as root:
        yield root


@pytest.fixture
def s3_root(moto: S3Server) -> Iterator[StorageRoot]:
    """A fresh bucket."""
    with moto.fresh_root() as root:
        yield root


@pytest.fixture(
    params=[
        pytest.param("local_root", id="local"),
        pytest.param("abfs_root", id="abfs", marks=pytest.mark.servers),
        pytest.param("s3_root", id="s3", marks=pytest.mark.servers),
    ]
)
def storage_root(request: pytest.FixtureRequest) -> StorageRoot:
    """A fresh root on every kind of storage in turn."""
    root: StorageRoot = request.getfixturevalue(request.param)
    return root


@pytest.fixture
def s3_way(moto: S3Server) -> Iterator[ways.Way]:
    """A way to a fresh bucket, on which faults can wait."""
    with ways.s3_way(moto) as way:
        yield way


@pytest.fixture
def abfs_way(azurite: BlobServer) -> Iterator[ways.Way]:
    """A way to a fresh container, on which faults can wait."""
    with ways.azure_way(azurite) as way:
        yield way


@pytest.fixture(
    params=[
        pytest.param("s3_way", id="s3", marks=pytest.mark.servers),
        pytest.param("abfs_way", id="abfs", marks=pytest.mark.servers),
    ]
)
def way(request: pytest.FixtureRequest) -> ways.Way:
    """A way to each kind of server in turn."""
    found: ways.Way = request.getfixturevalue(request.param)
    return found


@contextlib.contextmanager
def _started(running: Callable[[], AbstractContextManager[S]]) -> Iterator[S]:
    """The server; where there is none, tests are skipped on a desk and fail in CI."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running())
        except ServerUnavailable as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        yield server


@contextlib.contextmanager
def _private_directory(purpose: str) -> Iterator[Path]:
    directory = _SHM / f"{_ROOT_PREFIX}-{purpose}-{secrets.token_hex(8)}"
    directory.mkdir(mode=0o700)
    with _lock(directory):
        try:
            yield directory
        finally:
            _kill_users(directory)
            shutil.rmtree(directory)


def _remove_abandoned() -> None:
    """Free the memory of sessions that were killed: their directories have lost their locks."""
    for directory in _SHM.glob(f"{_ROOT_PREFIX}-*"):
        with contextlib.suppress(OSError):  # Of another user, or in use, or gone by now.
            settled = time.time() - directory.stat().st_ctime > _SETTLED_SECONDS
            with _lock(directory):
                if settled:
                    shutil.rmtree(directory)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. Raises BlockingIOError where another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _kill_users(directory: Path) -> None:
    """Kill every other process that was told of the directory or has a file in it open."""
    deadline = time.monotonic() + _KILL_SECONDS
    while users := [each for each in psutil.process_iter() if _uses(each, str(directory))]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"can't kill the users of {directory}: {users}")
        for process in users:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_SECONDS)


def _uses(process: psutil.Process, directory: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        told = [*process.cmdline(), *process.environ().values()]
        opened = [file.path for file in process.open_files()]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(directory in text for text in (*told, *opened))


def _show_logs(root: Path) -> None:
    """Put the agents' logs where pytest shows them, should the test have failed."""
    for path in root.rglob("*.log"):
        print(f"--- {path}\n{path.read_text(errors='replace')[-_LOG_CHARACTERS:]}")


def _is_exposed(path: Path) -> bool:
    """Whether others than the owner may do anything with it."""
    mode = path.lstat().st_mode
    return not stat.S_ISLNK(mode) and bool(stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO))
