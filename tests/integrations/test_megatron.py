"""Megatron's `dist_checkpointing` through node memory.

Megatron is imported by torchrun's ranks only: it takes seconds.
"""

import importlib.util
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dcp_mem import CheckpointManager
from tests.support.checkpoints.jobs import wait_until
from tests.support.nodes.cluster import Cluster
from tests.support.processes.launch import run_torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]

_SECONDS = 250.0


def _train(
    module: str, *arguments: str | Path, temporary: Path
) -> "subprocess.CompletedProcess[str]":
    """Run a module on two ranks.

    temporary: where they have their temporary files, which a kill leaves there.
    """
    temporary_files = {"TMPDIR": str(temporary)}
    return run_torchrun("-m", module, *arguments, timeout=_SECONDS, env=temporary_files)


def _answer(run: subprocess.CompletedProcess[str], answer: Path) -> Any:
    assert run.returncode == 0, run.stdout[-8000:]
    return json.loads(answer.read_text())


def test_dist_checkpointing_goes_through_memory(memory_root: Path, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    places = tmp_path / "ckpts", memory_root, answer
    fates = _answer(
        _train("tests.support.frameworks.megatron_claims", *places, temporary=tmp_path), answer
    )
    assert len(fates) == 28
    failed = {claim: fate for claim, fate in fates.items() if fate}
    assert not failed, "\n".join(f"--- {claim}\n{fate}" for claim, fate in failed.items())


def test_a_training_that_is_killed_in_a_save_goes_on_and_loads_in_other_shapes(
    memory_root: Path, tmp_path: Path
) -> None:
    places = tmp_path / "ckpts", memory_root, tmp_path / "answer"
    killed = _train(
        "tests.support.frameworks.megatron_training",
        *places,
        "stage.copied:kill:4",
        temporary=tmp_path,
    )
    assert "SIGKILL" in killed.stdout, killed.stdout[-8000:]
    found = _answer(
        _train("tests.support.frameworks.megatron_training", *places, temporary=tmp_path),
        tmp_path / "answer",
    )
    assert found == {
        "latest": 3,
        "source": "memory",
        "reference": found["reference"],
        "losses": found["reference"][3:],
        "same end": True,
        "same with TP1 PP1": True,
        "same with TP1 PP2": True,
    }
    assert len(set(found["reference"])) == 6


def test_the_last_save_of_a_training_that_ends_reaches_storage_without_close(
    memory_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "ckpts"
    ended = _train("tests.support.frameworks.megatron_end", root, memory_root, temporary=tmp_path)
    assert ended.returncode == 0, ended.stdout[-8000:]
    wait_until((root / "iter_0000002" / ".metadata").exists, ended.stdout[-8000:])


@pytest.mark.variant
def test_the_last_save_of_a_training_that_fails_stays_in_memory(
    memory_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "ckpts"
    ended = _train(
        "tests.support.frameworks.megatron_end", root, memory_root, "fails", temporary=tmp_path
    )
    assert "as training does" in ended.stdout, ended.stdout[-8000:]
    newest, first = CheckpointManager(root, memory_root=memory_root).list()
    assert (newest.name, newest.persist) == ("iter_0000002", False)
    assert (first.name, first.is_durable) == ("iter_0000001", True)


def _save_and_idle(saved: Path) -> None:
    from tests.support.frameworks import megatron_nodes

    megatron_nodes.save(saved)
    time.sleep(1000)


def _load() -> tuple[int, int, bool, set[str]]:
    from tests.support.frameworks import megatron_nodes

    return megatron_nodes.load()


@pytest.mark.variant
@pytest.mark.nodes(2)
def test_the_node_that_had_the_common_state_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    killed = cluster.launch(_save_and_idle, tmp_path / "saved", patience=_SECONDS)
    wait_until((tmp_path / "saved").exists, killed.output(), _SECONDS)
    cluster.nodes[0].kill()
    killed.kill()
    cluster.add()
    loaded = cluster.launch(_load, patience=_SECONDS).results(_SECONDS)
    assert [results[:3] for results in loaded] == [(2, 2, True)] * 2
    # By both loads together: when the tensors are read, the new node may already have been given
    # its copies.
    assert set().union(*(places for *_, places in loaded)) == {"memory", "peers"}
