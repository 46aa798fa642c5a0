"""A training loop's annotations of a checkpoint: rank 0's count, and stay with the checkpoint."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_mem
from dcp_mem import ConfigError, MemoryStorageWriter
from tests.support.checkpoints.plans import SAVES
from tests.support.processes.forks import forked_ranks


def _told(root: str, save: str, url: str) -> list[tuple[str, int | None, dict[str, float], bool]]:
    """Rank 1 says something else than rank 0, of the second of three saves."""
    rank = dist.get_rank()
    with MemoryStorageWriter(
        url, memory_root=root, persist=dcp_mem.every_n_saves(100), keep_memory=4
    ) as writer:
        for number in range(3):
            if number == 1:
                writer.annotate_next_save(
                    step=10 + rank, metrics={"loss": torch.tensor(0.5 + rank)}, persist=rank == 0
                )
            SAVES[save](
                {"w": torch.ones(5), "n": number},
                checkpoint_id=f"step-{number}",
                storage_writer=writer,
            )
        told = [(one.name, one.step, dict(one.metrics), one.persist) for one in writer.status()]
        dist.barrier()  # a rank that closes has the newest go to storage
        return told


@pytest.mark.parametrize("save", SAVES)
def test_the_coordinators_word_stays_with_the_next_save_alone(
    memory_root: Path, tmp_path: Path, save: str
) -> None:
    url = str(tmp_path / "storage")
    for told in forked_ranks(_told, 2, str(memory_root), save, url):
        assert sorted(told) == [
            ("step-0", None, {}, True),
            ("step-1", 10, {"loss": 0.5}, True),
            ("step-2", None, {}, False),
        ]
    [stored] = Path(url, "step-1", ".dcp_mem").glob("manifest-*.json")
    manifest = json.loads(stored.read_bytes())["body"]
    assert (manifest["step"], manifest["metrics"]) == (10, {"loss": 0.5})


class _Subclass(torch.Tensor):
    pass


class _OwnPlanner(DefaultSavePlanner):
    pass


def test_it_stays_with_a_save_that_torch_plans(memory_root: Path, tmp_path: Path) -> None:
    with MemoryStorageWriter(tmp_path / "storage", memory_root=memory_root) as writer:
        writer.annotate_next_save(step=1)
        dcp_mem.save(
            {"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer, planner=_OwnPlanner()
        )
        writer.annotate_next_save(step=2)
        dcp_mem.save(
            {"w": torch.ones(1).as_subclass(_Subclass)}, checkpoint_id="b", storage_writer=writer
        )
        assert [one.step for one in writer.status()] == [2, 1]


def test_figures_that_are_no_numbers_come_back_as_such(memory_root: Path) -> None:
    with MemoryStorageWriter(memory_root=memory_root, job="job") as writer:
        writer.annotate_next_save(metrics={"loss": float("nan"), "best": float("inf")})
        dcp_mem.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
        [status] = writer.status()
    assert status.metrics["loss"] != status.metrics["loss"]
    assert status.metrics["best"] == float("inf")


def test_figures_may_be_losses_with_their_graph_and_arrays_of_one_element(
    memory_root: Path,
) -> None:
    loss = torch.ones(1, requires_grad=True).square().sum()
    given = {"loss": loss, "score": np.ones((1, 1)), "norm": np.float32(2), "lr": 3}
    with MemoryStorageWriter(memory_root=memory_root, job="job") as writer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `float(loss)` warns once for each process.
            writer.annotate_next_save(metrics=given)
        dcp_mem.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=writer)
        [status] = writer.status()
        assert status.metrics == {"loss": 1.0, "score": 1.0, "norm": 2.0, "lr": 3.0}
        assert all(type(value) is float for value in status.metrics.values())
        with pytest.raises(ConfigError, match="no number"):
            writer.annotate_next_save(metrics={"loss": torch.ones(2)})
