"""What `MemoryCheckpointing` promises, tried on two ranks by torchrun, one claim after the other.

    torchrun --nproc-per-node 2 -m tests.support.frameworks.megatron_claims DIRECTORY MEMORY ANSWER

ANSWER: a file for what rank 0 finds: by the name of each function, where it failed, or nothing.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_mem import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    MemoryStorageReader,
    MemoryStorageWriter,
    every_n_saves,
)
from dcp_mem.common import faults
from dcp_mem.integrations.megatron import (
    MegatronCheckpointNotFound,
    MemoryCheckpointing,
    MemoryLoadStrategy,
    MemorySaveStrategy,
    releases,
)
from dcp_mem.integrations.megatron.releases import COMMON_IS_SHARDED, RELEASE
from dcp_mem.integrations.megatron.strategies import name_of
from tests.support.checkpoints.jobs import wait_until
from tests.support.frameworks.megatron_cpu import do_without_gpu

State = dict[str, Any]

DIRECTORY, MEMORY, ANSWER = map(Path, sys.argv[1:4])


def _state(number: int) -> State:
    """Make a number's state: sharded, replicated, per rank, common, and some that isn't saved."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.arange(48.0).view(8, 6).chunk(size)[rank] + number
    return {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("weight", weight, (0, rank, size)),
            "bias": ShardedTensor.from_rank_offsets(
                "bias", torch.full((5,), float(number)), replica_id=rank
            ),
        },
        "rng": ShardedObject("rng", {"rank": rank, "number": number}, (size,), (rank,)),
        "here": LocalNonpersistentObject(f"rank {rank}"),
        "args": Namespace(lr=number / 10),
        "iteration": number,
    }


def _assert_same(loaded: State, number: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert torch.equal(
        loaded["model"]["weight"], torch.arange(48.0).view(8, 6).chunk(size)[rank] + number
    )
    assert torch.equal(loaded["model"]["bias"], torch.full((5,), float(number)))
    assert loaded["rng"] == {"rank": rank, "number": number}
    assert loaded["here"] == f"rank {rank}"
    assert loaded["args"] == Namespace(lr=number / 10)
    assert loaded["iteration"] == number


def _root(name: str) -> Path:
    """A root of its own, that exists."""
    root = DIRECTORY / name
    root.mkdir(parents=True, exist_ok=True)
    return root


def _directory(root: Path | str, iteration: int, *, make: bool = False) -> str:
    directory = Path(root, f"iter_{iteration:07d}")
    if make:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(directory)


def _here(**options: Any) -> MemoryCheckpointing:
    return MemoryCheckpointing(memory_root=MEMORY, **options)


def _on_new_nodes() -> MemoryCheckpointing:
    """As after a restart on other nodes, whose memory has nothing."""
    return MemoryCheckpointing(memory_root=MEMORY / "others")


def what_was_saved_comes_back_from_memory() -> None:
    root, checkpointing = DIRECTORY / "nowhere", _here(persist=False)
    assert checkpointing.latest(root) == -1
    directory = _directory(root, 3)
    assert not checkpointing.check_is_distributed_checkpoint(directory)
    assert checkpointing.save(_state(3), directory, content_metadata={"kind": "test"}) is None
    assert checkpointing.check_is_distributed_checkpoint(directory)
    assert checkpointing.latest(root) == 3
    _assert_same(checkpointing.load(_state(0), directory), 3)
    assert checkpointing.report().source == "memory"
    assert checkpointing.report().step == 3
    # Storage has the record of the load, and nothing of the checkpoint.
    assert [path.name for path in root.iterdir()] == [".dcp_mem"]


def common_state_and_metadata_come_alone() -> None:
    checkpointing = _here(persist=False)
    directory = _directory(DIRECTORY / "alone", 4)
    checkpointing.save(_state(4), directory, content_metadata={"kind": "test"})
    common = checkpointing.load_common_state_dict(directory)
    assert common == {
        "args": Namespace(lr=0.4),
        "iteration": 4,
        "content_metadata": {"kind": "test"},
    }
    assert checkpointing.load_content_metadata(directory) == {"kind": "test"}
    assert checkpointing.load_content_metadata(preloaded_state_dict=common) == {"kind": "test"}
    with pytest.raises(ConfigError, match="preloaded_state_dict"):
        checkpointing.load_content_metadata()
    tensors = checkpointing.load_tensors_metadata(directory)
    assert {key: tuple(one.global_shape) for key, one in tensors.items()} == {
        "weight": (8, 6),
        "bias": (5,),
    }
    plain = checkpointing.load_plain_tensors(directory)
    assert torch.equal(plain["weight"], torch.arange(48.0).view(8, 6) + 4)
    assert plain.keys() == {"weight", "bias"}


def names_of_tensors_and_objects_are_those_that_megatron_would_have_saved() -> None:
    root = _root("names")
    megatrons, ours = _directory(root, 1, make=True), _directory(root, 2, make=True)
    dist_checkpointing.save(_state(1), megatrons)
    dist.barrier()
    with MemoryStorageWriter(root, memory_root=MEMORY, persist=False) as writer:
        dist_checkpointing.save(_state(2), ours, MemorySaveStrategy(writer))
        loading = MemoryLoadStrategy(MemoryStorageReader(root, memory_root=MEMORY))
        expected = load_sharded_metadata(megatrons)
        for directory in (megatrons, ours):
            found = load_sharded_metadata(directory, loading)
            assert found.keys() == expected.keys() >= {"weight", "rng/shard_0_2", "rng/shard_1_2"}


def what_a_checkpoint_lacks_or_has_beyond_is_told() -> None:
    checkpointing = _here(persist=False)
    directory = _directory(DIRECTORY / "strict", 1)
    checkpointing.save(_state(1), directory)
    state = _state(0)
    del state["model"]["bias"]
    state["more"] = ShardedTensor.from_rank_offsets(
        "more", torch.zeros(2), replica_id=dist.get_rank()
    )
    loaded, missing, unexpected = checkpointing.load(state, directory, strict="return_all")
    assert torch.equal(loaded["model"]["weight"], _state(1)["model"]["weight"].data)
    assert (missing, unexpected) == ({"bias"}, {"more"})


def a_checkpoint_is_loaded_by_half_as_many_ranks() -> None:
    checkpointing = _here(persist=False)
    directory = _directory(DIRECTORY / "fewer", 2)
    checkpointing.save(_state(2), directory)
    state = {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", torch.zeros(8, 6), replica_id=dist.get_rank()
        )
    }
    loaded = checkpointing.load(state, directory)
    assert torch.equal(loaded["weight"], torch.arange(48.0).view(8, 6) + 2)


def pieces_of_a_tensor_and_padded_shapes_come_back() -> None:
    checkpointing, rank, size = _here(persist=False), dist.get_rank(), dist.get_world_size()
    directory = _directory(DIRECTORY / "pieces", 1)

    def experts(number: float) -> list[ShardedTensor]:
        pieces = [torch.full((2, 3), number * (2 * rank + each)) for each in range(2)]
        offsets = [(0, 2 * rank + each, 2 * size) for each in range(2)]
        return [
            ShardedTensor.from_rank_offsets("experts", piece, offset)
            for piece, offset in zip(pieces, offsets, strict=True)
        ]

    def words(number: float, rows: int) -> ShardedTensor:
        table = torch.full((rows, 3), number)
        return ShardedTensor.from_rank_offsets(
            "words", table, replica_id=rank, allow_shape_mismatch=True
        )

    checkpointing.save({"experts": experts(1.0), "words": words(1.0, 10)}, directory)
    loaded = checkpointing.load({"experts": experts(9.0), "words": words(9.0, 12)}, directory)
    for found, saved in zip(loaded["experts"], experts(1.0), strict=True):
        assert torch.equal(found, saved.data)
    assert torch.equal(loaded["words"], torch.cat([torch.ones(10, 3), torch.zeros(2, 3)]))


def an_async_save_is_done_when_it_returns() -> None:
    root = _root("async")
    checkpointing, queue = _here(), AsyncCallsQueue()
    # From 0.17 on the default is "nvrx", whose package may be missing.
    ways: list[State] = [{}, *([{"async_strategy": "mcore"}] if RELEASE >= (0, 17) else [])]
    for number, way in enumerate(ways):
        directory = _directory(root, 5 + number, make=True)
        request = checkpointing.save(_state(5), directory, async_sharded_save=True, **way)
        assert request is not None
        _assert_same(checkpointing.load(_state(0), directory), 5)
        assert not Path(directory, "metadata.json").exists()
        assert queue.schedule_async_request(request) == number
        assert queue.maybe_finalize_async_calls(blocking=True) == [number]
        dist.barrier()
        assert Path(directory, "metadata.json").exists()
    queue.close()


def our_name_is_an_async_strategy_without_another_package() -> None:
    checkpointing, root = _here(persist=False), _root("ours")
    directory = _directory(root, 1, make=True)
    save = partial(checkpointing.save, async_sharded_save=True, async_strategy="dcp_mem")
    if RELEASE < (0, 17):
        with pytest.raises(TypeError, match="async_strategy"):
            save(_state(1), directory)
        return
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    # As Megatron-LM and Megatron-Bridge make the queue, by the name that they give to `save`.
    queue = get_async_strategy("dcp_mem")[1]["AsyncCallsQueue"]()
    queue.schedule_async_request(save(_state(1), directory))
    _assert_same(checkpointing.load(_state(0), directory), 1)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    dist.barrier()
    assert Path(directory, "metadata.json").exists()
    with pytest.raises(TypeError, match="of_nobody"):
        get_async_strategy("of_nobody")


def a_save_that_fails_on_a_rank_ends_no_training() -> None:
    root, checkpointing, queue = _root("failing"), _here(persist=False), AsyncCallsQueue()
    checkpointing.save(_state(1), _directory(root, 1, make=True))
    for iteration, is_async in ((2, False), (3, True)):
        directory = _directory(root, iteration, make=True)
        faults.arm("stage.copied:raise:1" if dist.get_rank() == 1 else "")
        request = checkpointing.save(_state(iteration), directory, async_sharded_save=is_async)
        faults.arm("")
        assert (request is not None) == is_async
        if request is not None:  # Megatron-LM schedules what it gets
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        dist.barrier()
        assert not list(Path(directory).iterdir())
        assert checkpointing.latest(root) == 1
    queue.close()
    checkpointing.save(_state(4), _directory(root, 4, make=True))
    assert checkpointing.latest(root) == 4
    _assert_same(checkpointing.load(_state(0), _directory(root, 4)), 4)


def a_save_that_fails_raises_where_that_is_asked_for() -> None:
    checkpointing = _here(persist=False, on_error="raise")
    directory = _directory(DIRECTORY / "raising", 1)
    faults.arm("stage.copied:raise:1" if dist.get_rank() == 1 else "")
    with pytest.raises(CheckpointException, match=r"stage\.copied"):
        checkpointing.save(_state(1), directory)
    faults.arm("")
    dist.barrier()
    assert checkpointing.latest(DIRECTORY / "raising") == -1


class _Unknown:
    """A class that `torch.load` refuses."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unknown)

    __hash__ = None  # type: ignore[assignment]


def _save_beside(root: Path, iteration: int, common: State) -> str:
    """As a Megatron before 0.19 calls the strategy: common state in `common.pt`."""
    directory = _directory(root, iteration, make=True)
    if dist.get_rank() == 0:
        torch.save(common, Path(directory, "common.pt"))
    return _save_by(root, directory, {})


def _save_inside(root: Path, iteration: int, common: State) -> str:
    """As a Megatron from 0.19 on calls the strategy: common state among the shards."""
    directory, rank = _directory(root, iteration, make=True), dist.get_rank()
    inside = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    return _save_by(root, directory, {"common_state": inside})


def _save_by(root: Path, directory: str, more: State) -> str:
    with MemoryStorageWriter(root, memory_root=MEMORY, persist=False) as writer:
        model = _state(1)["model"]
        MemorySaveStrategy(writer).save({**model, "rng": _state(1)["rng"], **more}, directory)
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig("torch_dist", 1), directory)
    dist.barrier()
    return directory


def _wipe(directory: str) -> None:
    """Leave nothing there, as where only memory has the checkpoint."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(directory).iterdir():
            path.unlink()
    dist.barrier()


def common_state_is_found_beside_the_shards_and_among_them_whatever_release_saved_it() -> None:
    root, checkpointing = _root("common"), _here(persist=False)
    common = {"args": Namespace(lr=0.1), "iteration": 1, "content_metadata": {"kind": "test"}}
    for iteration, save in enumerate((_save_beside, _save_inside), 1):
        directory = save(root, iteration, common)
        loading = MemoryLoadStrategy(MemoryStorageReader(root, memory_root=MEMORY))
        _assert_same(dist_checkpointing.load(_state(0), directory, loading), 1)
        _wipe(directory)
        assert checkpointing.load_content_metadata(directory) == {"kind": "test"}
        assert checkpointing.load_common_state_dict(directory) == common
        dist.barrier()
        # What is needed to load it without the shards is there again.
        assert dist_checkpointing.load_common_state_dict(directory) == common
        loaded, missing, _ = checkpointing.load(_state(0), directory, strict="return_all")
        _assert_same(loaded, 1)
        assert not missing


def common_state_of_any_class_comes_back_where_megatron_reads_such() -> None:
    root, checkpointing = _root("any class"), _here()
    directory = _save_inside(root, 1, {"iteration": 1, "args": _Unknown()})
    assert not Path(directory, "common.pt").exists()
    if COMMON_IS_SHARDED:
        assert checkpointing.load_common_state_dict(directory)["args"] == _Unknown()
        state = {**_state(0)["model"], "rng": _state(0)["rng"]}
        assert checkpointing.load(state, directory)["args"] == _Unknown()
        return
    for look in (checkpointing.load_common_state_dict, partial(checkpointing.load, _state(0))):
        with pytest.raises(DcpMemError, match=r"only megatron-core 0\.19 or newer"):
            look(directory)
        dist.barrier()


def integrity_may_be_asked_for() -> None:
    checkpointing = _here(persist=False)
    directory = _directory(_root("integrity"), 1, make=True)
    if RELEASE < (0, 17):
        with pytest.raises(TypeError, match="verify_integrity"):
            checkpointing.load(_state(0), directory, verify_integrity=True)
        return
    checkpointing.save(_state(1), directory, verify_integrity=True)
    _assert_same(checkpointing.load(_state(0), directory, verify_integrity=True), 1)


def some_ranks_may_load_by_themselves() -> None:
    checkpointing = _here(persist=False)
    directory = _directory(DIRECTORY / "some", 1)
    checkpointing.save({"whole": torch.ones(2), **_whole("weight", 1.0)}, directory)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if RELEASE >= (0, 19) and dist.get_rank() == 1:
        loaded = checkpointing.load(_whole("weight", 0.0), directory, process_group=alone[1])
        assert torch.equal(loaded["weight"], torch.ones(3))
        assert checkpointing.report().source == "memory"
    dist.barrier()


def _whole(name: str, number: float) -> State:
    value = torch.full((3,), number)
    return {name: ShardedTensor.from_rank_offsets(name, value, replica_id=dist.get_rank())}


def what_was_flushed_loads_without_memory_and_without_dcp_mem() -> None:
    root = _root("flushed")
    checkpointing = _here()
    directory = _directory(root, 6, make=True)
    checkpointing.save(_state(6), directory)
    checkpointing.writer(root).wait("iter_0000006", timeout=120)
    dist.barrier()
    elsewhere = _on_new_nodes()
    _assert_same(elsewhere.load(_state(0), directory), 6)
    assert elsewhere.report().source == "storage"
    elsewhere.close()
    if hasattr(TensorProperties, "strides"):
        # Megatron 0.16's own code loads nothing beside torch 2.15: it doesn't know of strides
        return
    _assert_same(dist_checkpointing.load(_state(0), directory), 6)
    _, missing, _ = dist_checkpointing.load(_state(0), directory, strict="return_all")
    assert missing == (set() if COMMON_IS_SHARDED else {"dcp_mem.common"})


def what_went_with_memory_is_not_the_latest() -> None:
    root = _root("gone")
    checkpointing = _here(persist=every_n_saves(2))
    for iteration in (1, 2, 3, 4):
        checkpointing.save(_state(iteration), _directory(root, iteration, make=True))
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    assert checkpointing.latest(root) == 4
    checkpointing.close(persist_newest=False)
    dist.barrier()
    elsewhere = _on_new_nodes()
    assert elsewhere.latest(root) == 3
    _assert_same(elsewhere.load(_state(0), _directory(root, 3)), 3)
    assert not elsewhere.check_is_distributed_checkpoint(_directory(root, 4))
    with pytest.raises(CheckpointNotFound, match="iter_0000003"):
        elsewhere.load(_state(0), _directory(root, 4))


def storage_is_told_what_it_is_to_have() -> None:
    root, checkpointing = DIRECTORY / "told", _here(persist=False)
    checkpointing.annotate_next_save(metrics={"loss": 0.5}, persist=True)
    for iteration in (1, 2):
        checkpointing.save(_state(iteration), _directory(root, iteration))
    status = {one.name: one for one in checkpointing.writer(root).status()}
    assert (status["iter_0000001"].metrics, status["iter_0000002"].metrics) == ({"loss": 0.5}, {})
    assert (status["iter_0000001"].persist, status["iter_0000002"].persist) == (True, False)


def a_save_that_memory_has_no_room_for_is_none() -> None:
    root, checkpointing = _root("full"), _here(on_full="skip", memory_limit="16MiB", persist=False)
    checkpointing.save(_state(1), _directory(root, 1, make=True))
    large = {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", torch.ones(8 << 20), replica_id=dist.get_rank()
        )
    }
    directory = _directory(root, 2, make=True)
    checkpointing.save(large, directory)
    assert checkpointing.latest(root) == 1
    assert not list(Path(directory).iterdir())


def megatrons_own_checkpoints_are_loaded() -> None:
    root, checkpointing = _root("before"), _here()
    directory = _directory(root, 7, make=True)
    dist_checkpointing.save(_state(7), directory)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    assert checkpointing.check_is_distributed_checkpoint(directory)
    assert checkpointing.latest(root) == 7
    assert checkpointing.load_common_state_dict(directory)["iteration"] == 7
    _assert_same(checkpointing.load(_state(0), directory), 7)
    assert checkpointing.load_tensors_metadata(directory).keys() == {"weight", "bias"}
    plain = checkpointing.load_plain_tensors(directory)
    assert torch.equal(plain["weight"], torch.arange(48.0).view(8, 6) + 7)
    checkpointing.save(_state(8), _directory(root, 8))
    assert checkpointing.latest(root) == 8


class _LooksUp(MCoreLoadPlanner):  # type: ignore[misc]
    """Looks up in the metadata where each item lies, as planners of Megatron's users may."""

    files: ClassVar[set[str]] = set()

    def create_local_plan(self) -> LoadPlan:
        plan: LoadPlan = super().create_local_plan()
        for item in plan.items:
            self.files.add(self.metadata.storage_data[item.storage_index].relative_path)
        return plan


def planners_find_where_items_lie_whoever_saved_them() -> None:
    root = _root("looked-up")
    megatrons, ours = _directory(root, 1, make=True), _directory(root, 2, make=True)
    dist_checkpointing.save(_state(1), megatrons)
    dist.barrier()
    with (
        MemoryStorageWriter(root, memory_root=MEMORY, persist=False) as writer,
        mock.patch.object(releases, "MCoreLoadPlanner", _LooksUp),
    ):
        dist_checkpointing.save(_state(2), ours, MemorySaveStrategy(writer))
        for number, directory in enumerate((megatrons, ours), 1):
            _LooksUp.files.clear()
            loading = MemoryLoadStrategy(MemoryStorageReader(root, memory_root=MEMORY))
            _assert_same(dist_checkpointing.load(_state(0), directory, loading), number)
            assert all(re.fullmatch(r"__[01]_.*\.distcp", file) for file in _LooksUp.files)
            assert _LooksUp.files
            assert loading.cached_global_metadata.state_dict_metadata.keys() >= {"weight", "bias"}


def replicas_share_the_work_as_under_megatron() -> None:
    checkpointing = _here(persist=False)
    directory = _directory(DIRECTORY / "shared", 8)
    saving = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), None, True
    )
    for _ in range(2):
        checkpointing.save(_state(8), directory, saving)
    loading = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    _assert_same(checkpointing.load(_state(0), directory, loading), 8)
    assert checkpointing.report().source == "memory"


def the_strategies_serve_megatrons_functions() -> None:
    root = _root("strategies")
    directory = _directory(root, 9, make=True)
    with MemoryStorageWriter(root, memory_root=MEMORY, persist=False) as writer:
        dist_checkpointing.save(_state(9), directory, MemorySaveStrategy(writer))
        loading = MemoryLoadStrategy(MemoryStorageReader(root, memory_root=MEMORY))
        _assert_same(dist_checkpointing.load(_state(0), directory, loading), 9)
        assert loading.reader.report().source == "memory"
    assert not list(Path(directory).glob("*.distcp"))
    Path(directory, "common.pt").unlink(missing_ok=True)
    dist.barrier()
    # The common state was in memory as well.
    _assert_same(_here(persist=False).load(_state(0), directory), 9)


def megatrons_files_come_back_after_a_kill() -> None:
    root, checkpointing = _root("killed"), _here(persist=False)
    directory = _directory(root, 1, make=True)
    checkpointing.save(_state(1), directory)
    dist.barrier()
    if dist.get_rank() == 0:
        assert dist_checkpointing.check_is_distributed_checkpoint(directory)
        for path in Path(directory).iterdir():
            path.unlink()
    dist.barrier()
    assert checkpointing.check_is_distributed_checkpoint(directory)
    checkpointing.load_common_state_dict(directory)
    assert dist_checkpointing.check_is_distributed_checkpoint(directory)
    assert dist_checkpointing.load_common_state_dict(directory)["iteration"] == 1


def retention_on_storage_leaves_megatrons_files() -> None:
    root, checkpointing = _root("retained"), _here(keep_storage=1)
    directories = [_directory(root, iteration, make=True) for iteration in (1, 2)]
    for iteration, directory in enumerate(directories, 1):
        checkpointing.save(_state(iteration), directory)
        checkpointing.writer(root).wait(name_of(directory), timeout=120)
    dist.barrier()
    first = Path(directories[0])
    wait_until(lambda: len(list(first.iterdir())) == 2, "what dcp_mem wrote is deleted")
    assert {path.name for path in first.iterdir()} == {"common.pt", "metadata.json"}
    elsewhere = _on_new_nodes()
    assert elsewhere.latest(root) == 2
    assert not elsewhere.check_is_distributed_checkpoint(first)


def storage_may_lie_elsewhere() -> None:
    named, root = _root("named"), DIRECTORY / "elsewhere"
    checkpointing = _here(storage={str(named): str(root)})
    directory = _directory(named, 1, make=True)
    checkpointing.save(_state(1), directory)
    checkpointing.close()
    dist.barrier()
    assert sorted(path.name for path in Path(directory).iterdir()) == ["common.pt", "metadata.json"]
    assert (root / "iter_0000001" / ".metadata").exists()
    assert checkpointing.latest(named) == 1
    _assert_same(checkpointing.load(_state(0), directory), 1)


def files_whose_checkpoint_went_with_memory_are_no_checkpoint() -> None:
    root = _root("files alone")
    directory = _directory(root, 1, make=True)
    with MemoryStorageWriter(root, memory_root=MEMORY, persist=False) as writer:
        dist_checkpointing.save(_state(1), directory, MemorySaveStrategy(writer))
    loading = MemoryLoadStrategy(MemoryStorageReader(root, memory_root=MEMORY / "others"))
    assert dist_checkpointing.check_is_distributed_checkpoint(directory)
    _assert_not_found(
        partial(dist_checkpointing.load, _state(0), sharded_strategy=loading), directory
    )


def _assert_not_found(look: Callable[[str], Any], directory: str) -> None:
    """Both of dcp_mem's users and of Megatron's catch the error."""
    with pytest.raises(CheckpointingException, match="iter_0000001") as found:
        look(directory)
    assert isinstance(found.value, CheckpointNotFound)
    assert isinstance(pickle.loads(pickle.dumps(found.value)), MegatronCheckpointNotFound)
    dist.barrier()


def what_cannot_work_says_so() -> None:
    checkpointing = _here(persist=False)
    directory = _directory(DIRECTORY / "errors", 1)
    with pytest.raises(ConfigError, match="nothing has been loaded"):
        checkpointing.report()
    with pytest.raises(ConfigError, match="torch_dist"):
        checkpointing.save(_state(1), directory, object())
    for look in (
        checkpointing.load_common_state_dict,
        checkpointing.load_content_metadata,
        checkpointing.load_tensors_metadata,
        checkpointing.load_plain_tensors,
        partial(checkpointing.load, _state(0)),
    ):
        _assert_not_found(look, directory)
    foreign = _directory(_root("foreign"), 1, make=True)
    _assert_not_found(partial(checkpointing.load, _state(0)), foreign)
    # In Megatron's words, for those who look for them.
    for path, words in (
        (directory, f"directory {directory} does not exist"),
        (foreign, f"{foreign} is not a distributed checkpoint"),
    ):
        for functions in (checkpointing, dist_checkpointing):
            for look in (partial(functions.load, _state(0)), functions.load_tensors_metadata):
                with pytest.raises(CheckpointingException, match=re.escape(words)):
                    look(path)
                dist.barrier()
    with pytest.raises(ConfigError, match="choose 'warn' or 'raise'"):
        MemoryCheckpointing(memory_root=MEMORY, on_error="panic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_full"):
        MemoryCheckpointing(memory_root=MEMORY, on_full="panic").latest(DIRECTORY)  # type: ignore[arg-type]


def a_release_that_cannot_work_is_refused_in_words() -> None:
    releases.check_release()
    with (
        mock.patch.object(releases, "RELEASE", (0, 15)),
        pytest.raises(ConfigError, match=r"too old.*>=0\.16,<0\.20"),
    ):
        MemoryLoadStrategy(MemoryStorageReader(DIRECTORY, memory_root=MEMORY))
    with (
        mock.patch.object(releases, "RELEASE", (0, 20)),
        pytest.raises(ImportError, match=r'lacks .*_gone.*"megatron-core>=0\.16,<0\.20"'),
        releases.telling_the_release(),
    ):
        from megatron.core.dist_checkpointing.core import _gone  # noqa: F401


def without_a_process_group() -> None:
    """As `--use-checkpoint-args` asks, on each rank, before there is a process group."""
    checkpointing = _here(persist=False)
    assert checkpointing.latest(DIRECTORY / "alone") == 4
    directory = str(DIRECTORY / "alone" / "iter_0000004")
    assert checkpointing.check_is_distributed_checkpoint(directory)
    assert checkpointing.load_common_state_dict(directory)["iteration"] == 4


CLAIMS: list[Callable[[], None]] = [
    what_was_saved_comes_back_from_memory,
    common_state_and_metadata_come_alone,
    names_of_tensors_and_objects_are_those_that_megatron_would_have_saved,
    what_a_checkpoint_lacks_or_has_beyond_is_told,
    a_checkpoint_is_loaded_by_half_as_many_ranks,
    pieces_of_a_tensor_and_padded_shapes_come_back,
    an_async_save_is_done_when_it_returns,
    our_name_is_an_async_strategy_without_another_package,
    a_save_that_fails_on_a_rank_ends_no_training,
    a_save_that_fails_raises_where_that_is_asked_for,
    common_state_is_found_beside_the_shards_and_among_them_whatever_release_saved_it,
    common_state_of_any_class_comes_back_where_megatron_reads_such,
    integrity_may_be_asked_for,
    some_ranks_may_load_by_themselves,
    what_was_flushed_loads_without_memory_and_without_dcp_mem,
    what_went_with_memory_is_not_the_latest,
    storage_is_told_what_it_is_to_have,
    a_save_that_memory_has_no_room_for_is_none,
    megatrons_own_checkpoints_are_loaded,
    planners_find_where_items_lie_whoever_saved_them,
    files_whose_checkpoint_went_with_memory_are_no_checkpoint,
    replicas_share_the_work_as_under_megatron,
    the_strategies_serve_megatrons_functions,
    megatrons_files_come_back_after_a_kill,
    retention_on_storage_leaves_megatrons_files,
    storage_may_lie_elsewhere,
    what_cannot_work_says_so,
    a_release_that_cannot_work_is_refused_in_words,
]


def _fate_of(claim: Callable[[], None]) -> str:
    """Where it failed, on any rank."""
    failure = ""
    try:
        claim()
    except Exception:
        failure = traceback.format_exc()
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return "\n".join(filter(None, failures))


def main() -> None:
    warnings.filterwarnings("error", module=r"dcp_mem(\.|$)")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    do_without_gpu()
    fates = {claim.__name__: _fate_of(claim) for claim in CLAIMS}
    if dist.get_rank() == 0:
        ANSWER.write_text(json.dumps(fates))
    dist.destroy_process_group()
    without_a_process_group()


if __name__ == "__main__":
    main()
