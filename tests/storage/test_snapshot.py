"""Listing many checkpoints takes few requests, and is never out of date."""

import threading
from pathlib import Path
from typing import Any

import pytest

from dcp_mem.config import Settings
from dcp_mem.operations.inventory import list_checkpoints
from dcp_mem.options import settings
from dcp_mem.storage import Storage, listing, routes
from dcp_mem.storage.routes import open_storage
from tests.support.checkpoints.jobs import Job, save
from tests.support.storage.servers import StorageRoot

pytestmark = [pytest.mark.timeout(120)]


class Counted:
    """A storage that counts the requests made to it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        if not callable(found):
            return found

        def request(*arguments: Any) -> Any:
            self.requests += 1
            return found(*arguments)

        return request


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """The storages that listings open, from then on."""
    opened: list[Counted] = []

    def opening(*arguments: Any) -> Any:
        opened.append(Counted(open_storage(*arguments)))
        return opened[-1]

    monkeypatch.setattr(routes, "open_storage", opening)
    return opened


@pytest.fixture(params=["s3_root", "abfs_root"])
def job(request: pytest.FixtureRequest, memory_root: Path) -> Job:
    root: StorageRoot = request.getfixturevalue(request.param)
    return root.job(memory_root)


def _settings(job: Job) -> Settings:
    return settings(
        job.url, memory_root=job.memory, job="elsewhere", storage_options=job.storage_options
    )


def _names(job: Job) -> list[tuple[str, str, int | None]]:
    return [(one.name, one.save_id, one.step) for one in list_checkpoints(_settings(job))]


def _save(job: Job, *numbers: int) -> None:
    with job.writer(keep_memory=2, agent="thread") as writer:
        for number in numbers:
            writer.annotate_next_save(step=number)
            save(writer, number)
            writer.wait(timeout=60)


def test_a_listing_takes_one_request_and_one_for_each_checkpoint(
    job: Job, counted: list[Counted]
) -> None:
    _save(job, 1, 2, 3, 4)
    assert [name for name, _, _ in _names(job)] == ["step-4", "step-3", "step-2", "step-1"]
    assert counted[-1].requests == 1 + 4  # the listing proves the commits: manifests alone are read


def test_names_are_looked_at_side_by_side(
    job: Job, counted: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each get waits for another one, which one thread at a time would never make."""
    _save(job, 1, 2)
    both = threading.Barrier(2, timeout=30)

    class Meeting(Counted):
        def get(self, key: str) -> bytes:
            both.wait()
            return self._storage.get(key)

    monkeypatch.setattr(f"{__name__}.Counted", Meeting)
    assert [name for name, _, _ in _names(job)] == ["step-2", "step-1"]


def test_a_commit_that_the_listing_does_not_prove_is_read(job: Job, counted: list[Counted]) -> None:
    """As where a storage encrypts, or shows no digest: and what isn't the save's is found."""
    _save(job, 1, 2)
    storage = open_storage(job.url or "", job.storage_options)
    metadata = storage.get("step-1/.metadata")
    storage.put("step-1/.metadata", metadata + b"\n")  # another digest, and the same save id
    storage.put("step-2/.metadata", metadata)  # of another save
    found = {one.name: (one.save_id, one.problem) for one in list_checkpoints(_settings(job))}
    assert counted[-1].requests > 1 + 2 + 2
    assert found["step-1"][0] != ""
    assert found["step-1"][1] == ""
    assert found["step-2"] == ("", found["step-2"][1])
    assert "lost" in found["step-2"][1]


def test_listing_of_many_objects_goes_directory_by_directory(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(job, 1, 2)
    first = _names(job)
    monkeypatch.setattr(listing, "_MOST_KEYS", 1)
    assert _names(job) == first


def test_what_is_saved_again_under_its_name_is_seen_at_once(job: Job) -> None:
    _save(job, 1)
    (before,) = _names(job)
    _save(job, 1)
    (after,) = _names(job)
    assert before[1] != after[1]


def test_what_is_gone_is_listed_no_more(job: Job) -> None:
    _save(job, 1, 2)
    assert len(_names(job)) == 2
    storage = open_storage(job.url or "", job.storage_options)
    storage.delete("step-1/.metadata")
    assert [name for name, _, _ in _names(job)] == ["step-2"]


def test_a_listing_makes_no_memory_root(job: Job, tmp_path: Path) -> None:
    _save(job, 1)
    chosen = settings(
        job.url,
        memory_root=tmp_path / "none",
        job="elsewhere",
        storage_options=job.storage_options,
    )
    assert [one.name for one in list_checkpoints(chosen)] == ["step-1"]
    assert not (tmp_path / "none").exists()
