"""Fixtures of the storage tests: servers, ways with faults, and memory still to be flushed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.storage import ways
from tests.support.storage.file_systems import mounted_xfs
from tests.support.storage.servers import (
    BlobServer,
    GoogleServer,
    S3Server,
    running_radosgw,
    started,
)


@pytest.fixture(scope="session")
def radosgw() -> Iterator[S3Server]:
    """Ceph's S3 for the whole session.

    $DCP_MEM_NO_RADOSGW has its tests skipped also where a missing server fails.
    """
    if os.environ.get("DCP_MEM_NO_RADOSGW"):
        pytest.skip("radosgw could not be installed: it takes Debian's packages, and root or sudo")
    with started(running_radosgw) as server:
        yield server


@pytest.fixture(scope="session")
def xfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that can clone blocks."""
    with mounted_xfs(tmp_path_factory.mktemp("mounted") / "xfs") as directory:
        yield directory


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


@pytest.fixture
def gs_way(google: GoogleServer) -> Iterator[ways.Way]:
    """A way to a fresh bucket in Google's dialect, on which faults can wait."""
    with ways.google_way(google) as way:
        yield way


@pytest.fixture(
    params=[
        pytest.param("s3_way", id="s3", marks=pytest.mark.servers),
        pytest.param("abfs_way", id="abfs", marks=pytest.mark.servers),
        # S3's route in another dialect: test_gcs.py has what differs
        pytest.param("gs_way", id="gs", marks=[pytest.mark.servers, pytest.mark.variant]),
    ]
)
def way(request: pytest.FixtureRequest) -> ways.Way:
    """A way to each kind of server in turn."""
    found: ways.Way = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def flush_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have faults get over soon: short pauses, and parts as short as S3 takes them."""
    ways.flush_quickly(monkeypatch)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's memory with the first state, which goes to storage in one part.

    To be copied, not used.
    """
    return ways.saved_in(tmp_path_factory.mktemp("small"), 1, 0)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's memory with the first state and much more, which goes to storage in three parts.

    To be copied, not used.
    """
    return ways.saved_in(tmp_path_factory.mktemp("large"), 1, ways.LARGE)
