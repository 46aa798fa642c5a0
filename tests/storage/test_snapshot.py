"""Listing many checkpoints takes few requests, fewer the second time, and is never out of date."""

from pathlib import Path
from typing import Any

import pytest

from dcp_mem.config import Settings
from dcp_mem.operations.inventory import list_checkpoints
from dcp_mem.options import settings
from dcp_mem.storage import Entry, Storage, routes, snapshot
from dcp_mem.storage.routes import open_storage
from dcp_mem.storage.snapshot import FileCache, Snapshot
from tests.support.checkpoints.jobs import Job, save
from tests.support.storage.servers import StorageRoot

pytestmark = [pytest.mark.timeout(120)]


class Counted:
    """A storage that counts the requests made to it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name != "url"
        return getattr(self._storage, name)


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


def test_second_listing_takes_one_request(
    job: Job, counted: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_SETTLED_SECONDS", -60.0)
    _save(job, 1, 2, 3, 4)
    first = _names(job)
    assert [name for name, _, _ in first] == ["step-4", "step-3", "step-2", "step-1"]
    assert counted[-1].requests == 1 + 4  # the listing proves the commits: manifests alone are read
    assert _names(job) == first
    assert counted[-1].requests == 1


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
    monkeypatch.setattr(snapshot, "_MOST_KEYS", 1)
    assert _names(job) == first


def test_what_is_saved_again_under_its_name_is_seen_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(job, 1)
    (before,) = _names(job)
    _save(job, 1)
    (after,) = _names(job)
    assert before[1] != after[1]


def test_what_is_gone_leaves_the_cache(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_SETTLED_SECONDS", -60.0)
    _save(job, 1, 2)
    _names(job)
    kept = list(Path(job.memory, ".listings").glob("*/*"))
    assert kept
    assert all(file.stat().st_mode & 0o077 == 0 for file in kept)
    storage = open_storage(job.url or "", job.storage_options)
    storage.delete("step-1/.metadata")
    assert [name for name, _, _ in _names(job)] == ["step-2"]
    assert len(list(Path(job.memory, ".listings").glob("*/*"))) < len(kept)


def test_no_memory_root_means_no_cache(job: Job, tmp_path: Path) -> None:
    _save(job, 1)
    chosen = settings(
        job.url,
        memory_root=tmp_path / "none",
        job="elsewhere",
        storage_options=job.storage_options,
    )
    assert [one.name for one in list_checkpoints(chosen)] == ["step-1"]
    assert not (tmp_path / "none").exists()


# -- without a server ------------------------------------------------------------------------------


class Files:
    """A storage of a few files, whose modification times a test sets."""

    url = "test://files"

    def __init__(self) -> None:
        self.files = {"step-1/.metadata": (b"one", 1000.0)}
        self.reads = 0

    def tree(self, most: int) -> list[tuple[str, Entry]]:
        return [
            (
                key.rpartition("/")[0],
                Entry(key.rpartition("/")[2], len(data), False, modified=modified),
            )
            for key, (data, modified) in self.files.items()
        ]

    def get(self, key: str) -> bytes:
        self.reads += 1
        return self.files[key][0]

    def read_into(self, key: str, offset: int, buffers: Any) -> int:
        self.reads += 1
        data = self.files[key][0][offset:][: len(buffers[0])]
        buffers[0][: len(data)] = data
        return len(data)


def _read(files: Files, cache: FileCache) -> tuple[bytes, bytes]:
    seen, end = Snapshot(files, cache), bytearray(2)  # type: ignore[arg-type]
    seen.read_into("step-1/.metadata", 1, [memoryview(end)])
    return seen.get("step-1/.metadata"), bytes(end)


def test_files_are_read_again_when_the_listing_shows_another_size_or_time(tmp_path: Path) -> None:
    files, cache = Files(), FileCache(str(tmp_path / "cache"))
    for _ in range(2):
        assert _read(files, cache) == (b"one", b"ne")
    assert files.reads == 2
    files.files["step-1/.metadata"] = (b"two", 1001.0)
    assert _read(files, cache) == (b"two", b"wo")
    files.files["step-1/.metadata"] = (b"three", 1001.0)
    assert _read(files, cache) == (b"three", b"hr")


@pytest.mark.parametrize("modified", [0.0, 1e12])
def test_files_without_an_age_are_read_each_time(tmp_path: Path, modified: float) -> None:
    files, cache = Files(), FileCache(str(tmp_path / "cache"))
    files.files["step-1/.metadata"] = (b"one", modified)
    _read(files, cache)
    files.files["step-1/.metadata"] = (b"two", modified)
    assert _read(files, cache) == (b"two", b"wo")
