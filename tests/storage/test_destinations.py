"""Roots that checkpoints can't be brought to are refused before the first save, with a remedy."""

import importlib
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dcp_mem import ConfigError, MemoryStorageReader, MemoryStorageWriter, StorageRefused
from dcp_mem.config import AgentKind
from dcp_mem.operations.flush import flush_now
from dcp_mem.options import settings
from dcp_mem.storage.fsspec_route import FsspecStorage
from tests.support.checkpoints.jobs import save
from tests.support.processes.forks import forked, raised_by

_REGISTRY: Any = importlib.import_module("fsspec.registry")


class OwnFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = "own"


class ReadOnlyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = "own"

    def _open(self, *args: object, **options: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("memory://bucket/run", {}),
        ("dir::memory://bucket/run", {}),
        ("dir://run", {"target_protocol": "memory"}),
    ],
)
def test_file_systems_of_one_process_are_refused_for_the_agent(
    url: str, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"memory:// lives in one process.*agent='thread'"):
        MemoryStorageWriter(url, storage_options=options)
    MemoryStorageWriter(url, storage_options=options, agent="thread")
    MemoryStorageWriter(url, storage_options=options, persist=False)
    MemoryStorageReader(url, storage_options=options)


@pytest.mark.parametrize("agent", ["process", "thread"])
@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache", "cached"])
@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("{}::s3://bucket/run", {}),
        ("{}::memory://bucket/run", {}),
        ("{}://run", {"target_protocol": "memory"}),
    ],
)
def test_caches_are_refused_for_a_writer_and_admitted_for_a_reader(
    url: str, options: dict[str, object], cache: str, agent: AgentKind
) -> None:
    url = url.format(cache)
    with pytest.raises(ConfigError, match=rf"{cache}:// can't take.*a cache shows old files"):
        MemoryStorageWriter(url, storage_options=options, agent=agent)
    MemoryStorageWriter(url, storage_options=options, agent=agent, persist=False)
    MemoryStorageReader(url, storage_options=options)


def test_commands_dont_flush_into_their_agents_own_memory(memory_root: Path) -> None:
    with pytest.raises(ConfigError, match="agent='thread'"):
        flush_now(settings("memory://bucket/run", memory_root=memory_root))


@pytest.mark.parametrize(
    ("protocol", "cls"),
    [("own", OwnFileSystem), ("s3", OwnFileSystem), ("webhdfs", OwnFileSystem)],
)
def test_classes_that_only_the_trainer_has_are_refused_for_the_agent(
    monkeypatch: pytest.MonkeyPatch, protocol: str, cls: type
) -> None:
    monkeypatch.setitem(_REGISTRY._registry, protocol, cls)
    url = f"{protocol}://bucket/run"
    with pytest.raises(ConfigError, match=r"in this process only.*agent='thread'"):
        MemoryStorageWriter(url)
    MemoryStorageWriter(url, agent="thread")


def test_classes_that_the_trainer_registered_by_name_are_refused_for_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "fsspec.implementations.local.LocalFileSystem"
    monkeypatch.setitem(_REGISTRY.known_implementations, "own", {"class": name})
    with pytest.raises(ConfigError, match=r"own:// is registered .* in this process only"):
        MemoryStorageWriter("own://bucket/run")


@pytest.mark.parametrize("protocol", ["s3", "abfs"])
def test_classes_that_every_process_has_are_admitted_before_and_after_their_first_use(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.delitem(_REGISTRY._registry, protocol, raising=False)
    MemoryStorageWriter(f"{protocol}://bucket/run")
    _REGISTRY.get_filesystem_class(protocol)
    MemoryStorageWriter(f"{protocol}://bucket/run")


@pytest.mark.parametrize("agent", ["process", "thread"])
@pytest.mark.parametrize(
    "url",
    [
        "http://host/run",
        "https://host/run",
        "zip://run::/archive.zip",
        "simplecache::https://host/run",
    ],
)
def test_what_takes_no_files_is_refused(url: str, agent: AgentKind) -> None:
    with pytest.raises(ConfigError, match=r"can't take checkpoints.*give a directory or an object"):
        MemoryStorageWriter(url, agent=agent)
    MemoryStorageWriter(url, agent=agent, persist=False)


def test_file_system_that_is_mounted_read_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def statvfs(path: str) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_flag=os.ST_RDONLY)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(ConfigError, match="mounted read-only: mount it read-write"):
        MemoryStorageWriter(tmp_path / "not" / "there" / "yet")
    assert asked == [str(tmp_path)]


def test_file_system_that_cant_write_is_a_refusal_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(_REGISTRY._registry, "own", ReadOnlyFileSystem)
    with pytest.raises(
        StorageRefused, match=r"NotImplementedError: no reason given\. .*give another URL"
    ):
        FsspecStorage("own://bucket/run", {}).upload("segment", 1)


def _save_as_process_executor(writer: bytes) -> str:
    return str(raised_by(lambda: save(pickle.loads(writer), 1)))


def test_process_executor_doesnt_flush_into_its_own_memory(memory_root: Path) -> None:
    writer = MemoryStorageWriter(
        "memory://bucket/run", memory_root=memory_root, job="job", agent="thread"
    )
    error = forked(_save_as_process_executor, pickle.dumps(writer))
    assert "lives in the process that made the writer" in error
