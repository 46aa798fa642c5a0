"""torchrun restarts a job whose node is lost; the job resumes from memory, and ends as usual."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
from dcp_mem import NoRecoverableCheckpoint
from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.roundtrip import State, assert_same_tensor
from tests.support.nodes.cluster import Cluster, job_on_nodes
from tests.support.variants import VARIANT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_STARTED_SECONDS = 90.0
_STEPS = 16
_GATE = 12
"""A step that nobody takes before the test says so."""
_ROWS, _COLUMNS = 23, 512
_SEED = 5
# By default torchrun gives the ranks' store to the first round alone.
_ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "DCP_MEM_TIMEOUT": "10",
    "DCP_MEM_REPLICATION_TIMEOUT": "5",
}
COPIES: Mapping[str, Any] = {"replicas": 1}
PARITY: Mapping[str, Any] = {"redundancy": dcp_mem.parity(2)}
_JOB = job_on_nodes()


@dataclass(frozen=True)
class Trained:
    """A life of the job: its number of ranks, and where it resumed.

    Attributes:
        begun: The step that it resumed from.
        source: Where it loaded that step from; "" if it loaded nothing.
    """

    ranks: int
    begun: int
    source: str


def _trained(weight: torch.Tensor, step: int) -> torch.Tensor:
    """Train one step. Each weight changes by itself, so the sharding doesn't matter."""
    return weight * 0.75 + torch.sign(weight) * step


def _initial() -> torch.Tensor:
    return torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(_SEED))


def _sharded(full: torch.Tensor) -> State:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    parts = full.chunk(world)
    rank = dist.get_rank()
    local = parts[rank].clone() if rank < len(parts) else full[:0].clone()
    weight = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return {"weight": weight, "step": 0}


def _resumed(state: State) -> str:
    """Load what there is; returns where from."""
    with _JOB.reader() as reader:
        try:
            dcp_mem.load(state, storage_reader=reader)
        except dcp.CheckpointException as error:
            if any(
                not isinstance(cause, NoRecoverableCheckpoint)
                for cause, _ in error.failures.values()
            ):
                raise
            return ""
        return reader.report().source


def _train(run: Path, redundancy: Mapping[str, Any]) -> Trained:
    """Train to the end with a save after each step, whatever lives this takes."""
    state = _sharded(_initial())
    source = _resumed(state)
    life = Trained(dist.get_world_size(), state["step"], source)
    if dist.get_rank() == 0:
        Path(run, f"life of {life.ranks} from {life.begun}").touch()
    with _JOB.writer(**redundancy) as writer:
        while state["step"] < _STEPS:
            if state["step"] == _GATE:
                wait_until(Path(run, "go").exists)
            state["step"] += 1
            part = state["weight"].to_local()
            part.copy_(_trained(part, state["step"]))
            name = f"step-{state['step']}"
            dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
            writer.wait(name, "replicated", timeout=60)
            Path(run, name).touch()
    expected = _initial()
    for step in range(1, _STEPS + 1):
        expected = _trained(expected, step)
    assert_same_tensor(
        _sharded(expected)["weight"].to_local(), state["weight"].to_local(), "weight"
    )
    return life


@pytest.mark.parametrize(
    ("lost", "redundancy", "joins"),
    [
        pytest.param(2, COPIES, False, id="one node less with copies", marks=VARIANT),
        pytest.param(0, PARITY, False, id="the first node less with parity"),
        pytest.param(1, COPIES, True, id="an empty node joins with copies"),
        pytest.param(
            0,
            PARITY,
            True,
            id="an empty node joins in the place of the first with parity",
            marks=VARIANT,
        ),
    ],
)
@pytest.mark.nodes(3)
def test_an_elastic_job_loses_a_node_and_ends_as_if_it_had_not(
    cluster: Cluster, tmp_path: Path, lost: int, redundancy: Mapping[str, Any], joins: bool
) -> None:
    store = cluster.serve_store()
    job = cluster.launch(
        _train,
        tmp_path,
        redundancy,
        nnodes="2:3",
        max_restarts=5,
        env=_ENVIRONMENT,
        store=store,
        patience=10.0,
    )
    wait_until(
        (tmp_path / f"step-{_GATE // 2}").exists, "half of the way to the gate", _STARTED_SECONDS
    )
    cluster.nodes[lost].kill()
    if joins:
        job.join(cluster.add())
        wait_until(lambda: _later_lives(tmp_path, 3), "a life with the new node", _STARTED_SECONDS)
    (tmp_path / "go").touch()
    lives = job.results(timeout=_STARTED_SECONDS)
    assert {life.ranks for life in lives} == {3 if joins else 2}
    (begun,) = {life.begun for life in lives}
    assert begun >= _GATE // 2 - 1
    (source,) = {life.source for life in lives}
    assert source in (("memory and peers",) if joins else ("memory", "memory and peers"))


def _later_lives(run: Path, ranks: int) -> list[Path]:
    return [path for path in run.glob(f"life of {ranks} from *") if not path.name.endswith(" 0")]
