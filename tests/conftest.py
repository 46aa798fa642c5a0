"""Fixtures: storage on real servers, a private memory root, an environment without surprises."""

import os
import stat
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import variants
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.roundtrip import Places
from tests.support.environment import hermetic_environment
from tests.support.nodes.cluster import Cluster, running_cluster
from tests.support.private import private_directory
from tests.support.seeds import IS_EXPLORING, SEED, VARIABLE
from tests.support.storage.servers import (
    BlobServer,
    GoogleServer,
    S3Server,
    StorageRoot,
    running_azurite,
    running_google,
    running_moto,
    started,
)

_SERVER_FIXTURES = {"azurite", "google", "moto", "radosgw"}
_LOG_CHARACTERS = 8192


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have pytest know the option that runs everything."""
    variants.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that `.ci/explore` looks for, besides Hypothesis's own."""
    variants.configure(config)
    # Examples are the same in every run; `.ci/explore` asks for others. There is no deadline:
    # processes are started within tests, and a first example takes many times longer than the next.
    settings.register_profile(
        "dcp_mem",
        max_examples=variants.examples(100),
        deadline=None,
        derandomize=not IS_EXPLORING,
        print_blob=True,
        report_multiple_bugs=False,  # so that a summary names the error, not "2 distinct failures"
    )
    settings.load_profile("dcp_mem")
    config.addinivalue_line(
        "markers", "random: depends on the seed, without being an example of Hypothesis itself"
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which seed random tests have, and whether variants are run."""
    origin = "" if IS_EXPLORING else " is not set: always the same"
    return [
        f"seed of random tests: {SEED} ({VARIABLE}{origin})",
        f"variants: {'run' if config.getoption('--all') else 'left out (--all runs them)'}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a server, by its fixtures; storage_root's parameters mark themselves.

    What the gate has no time for is left out.
    """
    for item in items:
        if _SERVER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.servers)
    variants.leave_out(config, items)


_BEFORE = pytest.StashKey[frozenset[str]]()
_CACHES = {".hypothesis", ".pytest_cache", "__pycache__"}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note what lies in the directory where pytest runs."""
    session.stash[_BEFORE] = frozenset(os.listdir(session.config.invocation_params.dir))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of the gate that has left something in its directory.

    Elsewhere somebody may be working there.
    """
    if "CI" not in os.environ or hasattr(session.config, "workerinput"):
        return
    after = frozenset(os.listdir(session.config.invocation_params.dir))
    before = session.stash[_BEFORE]
    if left := after - before - _CACHES:
        print(f"\ntests have left in the directory where they ran: {', '.join(sorted(left))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip test files that can't be imported without the packages in $DCP_MEM_WITHOUT.

    `.ci/compat` names there the packages that don't work with the torch under test.
    """
    report = yield
    text = str(report.longrepr)
    missing = [
        name
        for name in os.environ.get("DCP_MEM_WITHOUT", "").split()
        if name.partition("-")[0] in text
    ]
    if report.failed and missing:
        reason = f"Skipped: torch {version('torch')} goes without {', '.join(missing)}"
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report


@pytest.fixture(scope="session", autouse=True)
def _hermetic_environment() -> Iterator[None]:
    """No job, memory root, account or proxy of the developer's reaches a test or a child of it."""
    with hermetic_environment():
        yield


@pytest.fixture
def memory_root() -> Iterator[Path]:
    """A private directory in /dev/shm. At the end, processes that use it are killed (the agents),
    their logs shown, and everything in it has to be the owner's alone; then it is removed.
    """
    with private_directory("root", inspect=_inspect) as root:
        yield root


def _inspect(root: Path) -> None:
    _show_logs(root)
    exposed = [str(path) for path in (root, *root.rglob("*")) if _is_exposed(path)]
    assert not exposed, f"open to other users: {exposed}"


@pytest.fixture(scope="session")
def azurite() -> Iterator[BlobServer]:
    """Azurite for the whole session. Tests that make a server fail use `running_azurite()`."""
    with started(running_azurite) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """moto's S3 for the whole session. Tests that make a server fail use `running_moto()`."""
    with started(running_moto) as server:
        yield server


@pytest.fixture(scope="session")
def google() -> Iterator[GoogleServer]:
    """Google's dialect of moto for the whole session."""
    with started(running_google) as server:
        yield server


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """As many nodes as the test's mark `nodes` says, which takes what `running_cluster` does.

    $DCP_MEM_NO_NODES has tests on nodes skipped also where their lack is a failure.
    """
    if os.environ.get("DCP_MEM_NO_NODES"):
        pytest.skip("no nodes can be made here: it takes root, namespaces, and Debian's iproute2")
    mark = request.node.get_closest_marker("nodes")
    with started(lambda: running_cluster(*mark.args, **mark.kwargs)) as cluster:
        yield cluster


@pytest.fixture
def job(memory_root: Path, tmp_path: Path) -> Job:
    """A job with a memory root and a directory as storage."""
    return Job(str(tmp_path / "run"), str(memory_root))


@pytest.fixture
def memory_job(memory_root: Path) -> Job:
    """A job without storage."""
    return Job(None, str(memory_root))


@pytest.fixture
def places(memory_root: Path, tmp_path: Path) -> Places:
    """Memory and storage of a job whose checkpoints are compared on every road."""
    return Places(str(memory_root), str(tmp_path / "storage"))


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """A directory that is there for storage and doesn't exist yet."""
    return tmp_path / "storage"


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


def _show_logs(root: Path) -> None:
    """Put the agents' logs where pytest shows them, should the test have failed."""
    for path in root.rglob("*.log"):
        print(f"--- {path}\n{path.read_text(errors='replace')[-_LOG_CHARACTERS:]}")


def _is_exposed(path: Path) -> bool:
    """Whether others than the owner may do anything with it."""
    mode = path.lstat().st_mode
    return not stat.S_ISLNK(mode) and bool(stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO))
