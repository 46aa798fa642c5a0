"""Use an installed dcp_mem: run by .ci/package.py in an environment without a checkout.

    python packaged.py '{"extra": "s3", "root": "s3://…", "storage_options": {}}'

Without an extra: the demo, the command line, and the example with DCP's calls. With a framework's
extra its example or a save by it, and with a tracker's or a store's a run of the manager with that.
"""

from __future__ import annotations

import json
import os
import runpy
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

EXAMPLES = {
    "": "dcp_calls",
    "deepspeed": "deepspeed_zero",
    "huggingface": "huggingface_trainer",
    "lightning": "lightning_trainer",
    "megatron": "megatron_core",
}
DEMO = ("-m", "dcp_mem.demo", "--size", "small", "--steps", "5", "--save-every", "1")


def main(extra: str, root: str, storage_options: dict[str, Any]) -> None:
    import dcp_mem

    assert Path(dcp_mem.__file__).is_relative_to(sys.prefix), dcp_mem.__file__
    assert version("dcp_mem") == dcp_mem.__version__
    if not extra:
        subprocess.run([sys.executable, *DEMO], check=True)
    if extra in EXAMPLES:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        os.environ.update({**alone, **meeting, "DS_ACCELERATOR": "cpu"})
        sys.argv = [f"{EXAMPLES[extra]}.py", root, "12"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif extra == "torch-checkpointing":
        _save_by_torch_checkpointing(root)
    else:
        if extra == "torchft":
            _heal_by_torchft()
        _train(root, _trackers(extra), storage_options)
    found = dcp_mem.MemoryStorageReader(root, storage_options=storage_options).recoverable()
    assert found, f"{root} has no checkpoint"
    if extra not in ("azure", "gs", "s3"):  # Their options aren't in the environment.
        command = [str(Path(sys.prefix, "bin", "dcp-mem")), "ls", root]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "durable" in listed, listed


def _train(root: str, trackers: list[Any], storage_options: dict[str, Any]) -> None:
    import torch

    from dcp_mem import CheckpointManager

    state = {"w": torch.zeros(1000)}
    with CheckpointManager(
        root, save_interval_steps=1, trackers=trackers, storage_options=storage_options
    ) as manager:
        for step in range(3):
            state["w"].fill_(step)
            manager.save(step, state)
    with CheckpointManager(
        root, save_interval_steps=1, storage_options=storage_options, memory_root=_elsewhere()
    ) as manager:
        assert manager.restore(state) == 2
        assert manager.report().source == "storage"
        assert state["w"].tolist() == [2.0] * 1000


def _save_by_torch_checkpointing(root: str) -> None:
    import torch
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    from dcp_mem.integrations.torch_checkpointing import in_memory

    places = in_memory(root)
    manager = CheckpointManager(
        CheckpointManager.Config(save=SyncCheckpointSaverConfig(), **places)
    )
    manager.save("step-1", {"model": {"w": torch.full((1000,), 2.0)}})
    into = {"model": {"w": torch.zeros(1000)}}
    manager.load("step-1", into=into)
    assert into["model"]["w"].tolist() == [2.0] * 1000
    manager.close()
    places["storage_config"].flush()


def _heal_by_torchft() -> None:
    from datetime import timedelta

    import torch

    from dcp_mem.integrations.torchft import MemoryCheckpointTransport

    one, other = MemoryCheckpointTransport(), MemoryCheckpointTransport()
    timeout = timedelta(seconds=60)
    one.send_checkpoint([1], 3, {"w": torch.full((1000,), 2.0)}, timeout)
    healed = other.recv_checkpoint(0, one.metadata(), 3, timeout)
    assert healed["w"].tolist() == [2.0] * 1000
    one.shutdown()
    other.shutdown()


def _trackers(extra: str) -> list[Any]:
    if extra == "mlflow":
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        import mlflow

        from dcp_mem.integrations.trackers.mlflow import MLflow

        mlflow.set_tracking_uri(Path("runs").resolve().as_uri())
        mlflow.start_run()
        return [MLflow()]
    if extra == "openmetrics":
        from dcp_mem.integrations.trackers.openmetrics import OpenMetrics

        return [OpenMetrics("dcp_mem.prom")]
    if extra == "opentelemetry":
        from dcp_mem.integrations.trackers.opentelemetry import OpenTelemetry

        return [OpenTelemetry()]
    if extra == "wandb":
        import wandb

        from dcp_mem.integrations.trackers.wandb import WandB

        return [WandB(wandb.init(mode="offline"))]
    if extra == "tensorboard":
        from dcp_mem.integrations.trackers.tensorboard import TensorBoard

        return [TensorBoard("runs")]
    return []


def _elsewhere() -> str:
    """A memory root without checkpoints, as on a new node."""
    root = Path(os.environ["DCP_MEM_ROOT"], "elsewhere")
    root.mkdir(mode=0o700)
    return str(root)


def _free_port() -> str:
    """A port that nobody listens on, below those that the kernel gives to connections."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = first_given - 1 - secrets.randbelow(10_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
