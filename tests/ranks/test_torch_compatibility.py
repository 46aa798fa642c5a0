"""Torch's own writers, readers and tools beside ours, and the ways to name a checkpoint."""

import inspect
import os
import pickle
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_mem import (
    CheckpointNotFound,
    ConfigError,
    MemoryStorageReader,
    MemoryStorageWriter,
    NoRecoverableCheckpoint,
)
from tests.support.checkpoints.plans import save_by_torch
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    blank_of,
    comes_back,
    random_tensor,
)
from tests.support.processes.forks import forked_ranks


def _state(step: int) -> State:
    return {
        "w": random_tensor(torch.bfloat16, 33, 21, seed=step),
        "scalar": torch.tensor(float(step)),
        "empty": torch.empty(0, 3),
        "nested": {"step": step, "log": "x" * 1000, "list": [torch.randn(4), "end"]},
        **{f"layer.{i}": torch.full((i + 1, 2), float(step)) for i in range(30)},
    }


def _load_newest(reader: MemoryStorageReader, into: State) -> State:
    dcp.load(into, storage_reader=reader)
    return into


# -- checkpoints of torch's own writers ------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thread_count": 3},
        {"single_file_per_rank": False},
        {"thread_count": 2, "sync_files": False},
    ],
    ids=["default", "three files", "a file each", "unsynced"],
)
def test_a_checkpoint_of_torchs_file_system_writer_loads(
    places: Places, options: dict[str, Any]
) -> None:
    state = _state(1)
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(places.directory("storage", "step-1"), **options)
    )
    comes_back(places, "step-1", state, roads=("storage", "stock from storage"))
    with MemoryStorageReader(places.url, memory_root=places.memory) as reader:
        assert_same(state, _load_newest(reader, blank_of(state)))
        report = reader.report()
        assert (report.checkpoint_id, report.source, report.save_id) == ("step-1", "storage", "")


def test_a_checkpoint_of_torchs_fsspec_writer_loads(places: Places) -> None:
    state = _state(2)
    dcp.save(state, storage_writer=FsspecWriter(f"file://{places.url}/step-2"))
    comes_back(places, "step-2", state, roads=("storage", "stock from storage"))


def test_ours_and_torchs_fsspec_classes_share_any_file_system(places: Places) -> None:
    url, state = f"memory://{Path(places.memory).name}/run", _state(3)
    # With sync_files, torch 2.6 would ask the file for a fileno.
    dcp.save(state, storage_writer=FsspecWriter(f"{url}/theirs", sync_files=False))
    with MemoryStorageWriter(url, memory_root=places.memory, job="job", agent="thread") as writer:
        dcp.save(state, checkpoint_id="ours", storage_writer=writer)
        writer.wait("ours", timeout=60)
    for name in ("ours", "theirs"):
        theirs, ours = blank_of(state), blank_of(state)
        dcp.load(theirs, storage_reader=FsspecReader(f"{url}/{name}"))
        dcp.load(
            ours,
            checkpoint_id=name,
            storage_reader=MemoryStorageReader(url, memory_root=f"{places.memory}/none", job="job"),
        )
        assert_same(state, theirs, name)
        assert_same(state, ours, name)


def _saves_with_torchs_writer(places: Places, collectives: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    state: State = {f"own.{rank}": torch.full((9,), rank), "step": 4}
    if collectives:
        full = torch.arange(70.0).reshape(14, 5)
        state["sharded"] = distribute_tensor(full, init_device_mesh("cpu", (world,)), [Shard(0)])
    options: dict[str, Any] = {} if collectives else {"use_collectives": False}
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(places.directory("storage", "step-4")), **options
    )
    dist.barrier()
    comes_back(places, "step-4", state, roads=("storage", "stock from storage"))
    into = blank_of(state)
    dcp.load(into, storage_reader=MemoryStorageReader(places.url, memory_root=places.memory))
    assert_same(state, into)
    dist.barrier()


def test_what_torchs_writer_saved_on_two_ranks_loads_on_two_and_on_one(places: Places) -> None:
    forked_ranks(_saves_with_torchs_writer, 2, places, True)
    comes_back(
        places,
        "step-4",
        {"sharded": torch.arange(70.0).reshape(14, 5), "own.1": torch.full((9,), 1), "step": 4},
        roads=("storage",),
    )


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="no use_collectives here",
)
def test_what_torchs_writer_saved_without_collectives_loads(places: Places) -> None:
    forked_ranks(_saves_with_torchs_writer, 2, places, False)


def test_the_newest_of_torchs_checkpoints_and_ours_is_loaded(places: Places) -> None:
    first, second, third = _state(1), _state(2), _state(3)
    dcp.save(first, storage_writer=dcp.FileSystemWriter(places.directory("storage", "z-first")))
    past = time.time() - 1000
    os.utime(places.directory("storage", "z-first") / ".metadata", (past, past))
    with places.writer() as writer:
        places.save(writer, second, "m-second")
    reader = MemoryStorageReader(places.url, memory_root=f"{places.memory}/none")
    assert_same(second, _load_newest(reader, blank_of(second)))
    dcp.save(third, storage_writer=dcp.FileSystemWriter(places.directory("storage", "a-third")))
    future = time.time() + 1000
    os.utime(places.directory("storage", "a-third") / ".metadata", (future, future))
    assert_same(third, _load_newest(reader, blank_of(third)))


def test_a_directory_without_metadata_is_no_checkpoint(places: Places) -> None:
    state = _state(1)
    for name in ("step-1", "step-2"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(places.directory("storage", name)))
    (places.directory("storage", "step-2") / ".metadata").unlink()
    (Path(places.url) / "notes").mkdir()
    (Path(places.url) / "README").write_text("not a checkpoint")
    with MemoryStorageReader(places.url, memory_root=places.memory) as reader:
        assert_same(state, _load_newest(reader, blank_of(state)))
        assert reader.report().checkpoint_id == "step-1"
    with pytest.raises(
        dcp.CheckpointException, match=r"no step-2 in memory .*newest first: step-1"
    ):
        places.load("storage", "step-2", blank_of(state))


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_malicious_metadata_is_refused_and_passed_over(places: Places) -> None:
    state = _state(1)
    for name in ("step-1", "step-2"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(places.directory("storage", name)))
    metadata = places.directory("storage", "step-2") / ".metadata"
    metadata.write_bytes(pickle.dumps(_Evil()))
    os.utime(metadata, (time.time() + 1000,) * 2)
    with MemoryStorageReader(places.url, memory_root=places.memory) as reader:
        assert_same(state, _load_newest(reader, blank_of(state)))
        report = reader.report()
        assert report.checkpoint_id == "step-1"
        assert any(
            "step-2" in reason and "refused to unpickle posix.system" in reason
            for reason in report.passed_over
        )
    with pytest.raises(dcp.CheckpointException, match=r"refused to unpickle posix\.system"):
        places.load("storage", "step-2", blank_of(state))


def test_a_reader_that_dcp_does_not_drive_raises_its_own_errors(places: Places) -> None:
    directory = places.directory("storage", "step-1")
    directory.mkdir(parents=True)
    reader = MemoryStorageReader(places.url, memory_root=places.memory)
    with pytest.raises(NoRecoverableCheckpoint, match="nothing was found at all"):
        reader.read_metadata()
    (directory / ".metadata").write_bytes(pickle.dumps(_Evil()))
    reader.reset("step-1")
    with pytest.raises(CheckpointNotFound, match=r"posix\.system"):
        reader.read_metadata()


def test_a_missing_data_file_of_torchs_writer_is_passed_over(places: Places) -> None:
    state = _state(1)
    for name in ("step-1", "step-2"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(places.directory("storage", name)))
    for file in places.directory("storage", "step-2").glob("*.distcp"):
        file.unlink()
    os.utime(places.directory("storage", "step-2") / ".metadata", (time.time() + 1000,) * 2)
    with MemoryStorageReader(places.url, memory_root=places.memory) as reader:
        assert_same(state, _load_newest(reader, blank_of(state)))
        assert reader.report().checkpoint_id == "step-1"


# -- torch's own tools over what we wrote ----------------------------------------------------------


def test_torchs_converter_reads_memory_and_storage(places: Places, tmp_path: Path) -> None:
    state = _state(5)
    with places.writer() as writer:
        places.save(writer, state, "step-5")
        for road in ("memory", "storage"):
            converted = tmp_path / f"{road}.pt"
            dcp_to_torch_save(places.directory(road, "step-5"), converted)
            assert_same(state, torch.load(converted, weights_only=False), road)


def test_torch_loads_single_keys_from_memory_and_storage(places: Places) -> None:
    state = _state(6)
    with places.writer() as writer:
        places.save(writer, state, "step-6")
        for road in ROADS:
            reader, name = (
                places.reader(road, "step-6"),
                None if road.startswith("stock") else "step-6",
            )
            found = _load_state_dict_from_keys(
                {"nested", "scalar"}, checkpoint_id=name, storage_reader=reader
            )
            assert_same(
                {"scalar": state["scalar"], "nested": state["nested"]},
                dict(sorted(found.items(), reverse=True)),
            )


def test_torchs_fsspec_reader_reads_memory_and_storage(places: Places) -> None:
    state = _state(7)
    with places.writer() as writer:
        places.save(writer, state, "step-7")
        for road in ("memory", "storage"):
            into = blank_of(state)
            dcp.load(
                into, storage_reader=FsspecReader(f"file://{places.directory(road, 'step-7')}")
            )
            assert_same(state, into, road)


# -- names of checkpoints --------------------------------------------------------------------------


def _ids(root: str) -> list[Any]:
    return [
        "step-1",
        f"{root}/step-1",
        f"{root}/step-1/",
        Path(root, "step-1"),
        f"file://{root}/step-1",
    ]


@pytest.mark.parametrize("spelling", range(5), ids=["name", "path", "slash", "PathLike", "url"])
def test_a_checkpoint_goes_by_name_path_and_url(places: Places, spelling: int) -> None:
    state = _state(1)
    with places.writer() as writer:
        checkpoint_id = _ids(places.url)[spelling]
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
        writer.wait(checkpoint_id, timeout=60)
        comes_back(places, "step-1", state)
        into = blank_of(state)
        reader = MemoryStorageReader(places.url, memory_root=places.memory, job=places.job)
        dcp.load(into, checkpoint_id=checkpoint_id, storage_reader=reader)
        assert_same(state, into)


@pytest.mark.parametrize("root", ["{}", "file://{}", "local://{}", "{}/", "{}/../storage"])
def test_a_root_goes_by_path_and_url(places: Places, root: str) -> None:
    state, path = _state(1), root.format(places.url)
    with MemoryStorageWriter(path, memory_root=places.memory, agent="thread") as writer:
        assert writer.settings.url == places.url
        for checkpoint_id in _ids(places.url):
            dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
        writer.wait("step-1", timeout=60)
    comes_back(places, "step-1", state, roads=("storage", "stock from storage"))
    assert_same(
        state,
        _load_newest(MemoryStorageReader(places.url, memory_root=places.memory), blank_of(state)),
    )


def test_a_root_on_another_file_system_takes_full_urls(places: Places) -> None:
    url, state = f"memory://{Path(places.memory).name}/ids", _state(1)
    with MemoryStorageWriter(url, memory_root=places.memory, agent="thread") as writer:
        for checkpoint_id in ("step-1", f"{url}/step-1", f"{url}/step-1/"):
            dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
            writer.wait(checkpoint_id, timeout=60)
        assert {entry.name for entry in writer.status()} == {"step-1"}


@pytest.mark.parametrize(
    "checkpoint_id",
    [
        "",
        "/",
        "..",
        "a/b",
        "../step-1",
        "/elsewhere/step-1",
        ".hidden",
        "s3://b/step",
        "a\nb",
        "x" * 300,
    ],
)
def test_an_id_that_is_no_name_under_the_root_is_an_error_that_says_what_to_give(
    places: Places, checkpoint_id: str
) -> None:
    state = _state(1)
    with places.writer() as writer:
        with pytest.raises(dcp.CheckpointException, match="give a plain name such as 'step-100'"):
            dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
        places.save(writer, state, "step-1")
        with pytest.raises(dcp.CheckpointException, match="give a plain name such as 'step-100'"):
            dcp.load(
                blank_of(state),
                checkpoint_id=checkpoint_id,
                storage_reader=places.reader("memory", ""),
            )
        comes_back(places, "step-1", state)


def test_a_save_without_an_id_is_an_error_that_says_what_to_give(places: Places) -> None:
    with places.writer() as writer:
        for save in (dcp.save, save_by_torch):
            with pytest.raises(dcp.CheckpointException, match=r"pass checkpoint_id= to dcp\.save"):
                save({"a": torch.ones(2)}, storage_writer=writer)
            dcp.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer)


def test_an_id_that_is_not_there_lists_what_is(places: Places) -> None:
    with places.writer() as writer:
        for step in range(3):
            places.save(writer, {"a": torch.ones(2)}, f"step-{step}")
        for road, listed in (("memory", "step-2, step-1"), ("storage", "step-2, step-1, step-0")):
            with pytest.raises(dcp.CheckpointException, match=rf"newest first: {listed}\)"):
                places.load(road, "step-9", {"a": torch.zeros(2)})


def test_nothing_at_all_is_an_error_that_says_where_was_looked(places: Places) -> None:
    with pytest.raises(
        dcp.CheckpointException, match=rf"no recoverable checkpoint in .*{places.url}"
    ) as failure:
        dcp.load(
            {"a": torch.zeros(2)},
            storage_reader=MemoryStorageReader(places.url, memory_root=places.memory),
        )
    (error, _), *others = failure.value.failures.values()
    assert not others
    assert isinstance(error, NoRecoverableCheckpoint)
    assert isinstance(error, FileNotFoundError)


@pytest.mark.parametrize(
    "checkpoint_id", ["step-1", Path("/a/b"), PurePosixPath("x"), "s3://bucket/x"]
)
def test_torch_may_ask_whether_an_id_is_valid(checkpoint_id: Any) -> None:
    assert MemoryStorageWriter.validate_checkpoint_id(checkpoint_id)
    assert MemoryStorageReader.validate_checkpoint_id(checkpoint_id)


def test_memory_alone_needs_a_job_name_that_a_restart_finds_again(places: Places) -> None:
    with pytest.raises(ConfigError, match="give job="):
        MemoryStorageWriter(memory_root=places.memory)
    state = _state(1)
    with MemoryStorageWriter(memory_root=places.memory, job="mine") as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
        with pytest.raises(ConfigError, match="nothing becomes durable"):
            writer.wait("step-1")
        writer.wait("step-1", "complete")
    assert_same(
        state,
        _load_newest(MemoryStorageReader(memory_root=places.memory, job="mine"), blank_of(state)),
    )
