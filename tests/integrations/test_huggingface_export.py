"""`export=`: Hugging Face directories, made of checkpoints by a process beside the agent."""

import json
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from dcp_mem import (
    CheckpointManager,
    CheckpointStatus,
    ConfigError,
    ExportState,
    HuggingFaceExport,
    MemoryStorageWriter,
    State,
    collect_orphans,
    every_n_steps,
)
from dcp_mem.integrations.huggingface import TrainerCheckpoints
from tests.support.checkpoints.jobs import Job, agents, committed_in, wait_until
from tests.support.frameworks.exports import (
    GATE,
    Names,
    failing,
    made_within,
    once_open,
    shouted,
)
from tests.support.frameworks.huggingface_jobs import Account, make_trainer, tiny_model
from tests.support.private import private_directory
from tests.support.processes.forks import forked, forked_ranks
from tests.support.storage.servers import StorageRoot

INDEX = "model.safetensors.index.json"
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


def make_weights(number: int) -> dict[str, torch.Tensor]:
    """A model's part that belongs to one number, on all ranks or on one."""
    whole = torch.arange(6000.0).view(60, 100) / 7 + number
    return {
        "layers.0.weight": sharded(whole),
        "layers.0.bias": torch.full((33,), number, dtype=torch.bfloat16),
        "layers.1.weight": sharded(-whole),
        "count": torch.tensor(number),
        "secret": torch.full((5,), number / 3),
    }


def sharded(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():
        return tensor
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = tensor.chunk(dist.get_world_size())[dist.get_rank()]
    return DTensor.from_local(local, mesh, [Shard(0)])


def make_state(number: int) -> dict[str, Any]:
    optimizer = {"momentum": torch.full((60, 100), 1000.0 + number), "step": number}
    return {"model": make_weights(number), "optimizer": optimizer}


def exported_in(directory: Path) -> list[str]:
    """The exports of a directory, as readers see them."""
    return sorted(path.parent.name for path in directory.glob(f"[!.]*/{INDEX}"))


def load_export(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export, by its index; nothing else may lie in its files."""
    index = json.loads((directory / INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    files = sorted(directory.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        tensors = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        found |= tensors
    assert found.keys() == index["weight_map"].keys()
    nbytes = sum(tensor.nbytes for tensor in found.values())
    assert index["metadata"]["total_size"] == nbytes
    return found


def assert_equal(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name


def status_of(writer: MemoryStorageWriter, name: str) -> CheckpointStatus:
    return next(one for one in writer.status() if one.name == name)


def exporters(memory: str) -> list[psutil.Process]:
    """The processes that export for a memory root's agent, or did."""
    return [one for one in psutil.process_iter() if exports_for(one, memory)]


def exports_for(process: psutil.Process, memory: str) -> bool:
    try:
        is_one = "dcp_mem.operations.export_process" in process.cmdline()
        return is_one and f"{memory}/.agent" in os.readlink(f"/proc/{process.pid}/fd/2")
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied, FileNotFoundError):
        return False


def save(writer: MemoryStorageWriter, number: int, name: str | None = None) -> None:
    """Save step-<number>, and wait until storage has it."""
    writer.annotate_next_save(step=number)
    name = name or f"step-{number}"
    dcp.save(make_state(number), checkpoint_id=name, storage_writer=writer)
    writer.wait(name, timeout=60)


# -- what an export holds --------------------------------------------------------------------------


def train_with_a_trainer(job: Job, export: HuggingFaceExport, output: str) -> None:
    trainer = make_trainer(output, Account(), max_steps=4)
    places: dict[str, Any] = {"memory_root": job.memory, "job": job.name}
    TrainerCheckpoints(trainer, job.url, export=export, **places)
    trainer.train()
    trainer.save_model(f"{output}/final")


def test_from_pretrained_loads_a_trainers_exports_in_shards_with_a_tied_tensor(
    job: Job, tmp_path: Path
) -> None:
    out, base = tmp_path / "out", tmp_path / "base"
    tiny_model().config.save_pretrained(base)
    (base / "weights.pt").touch()
    export = HuggingFaceExport(out, part="app.model", files=[base], keep=1, shard_bytes=20_000)
    forked(train_with_a_trainer, job, export, str(tmp_path / "trainer"), timeout=180)
    assert exported_in(out) == ["step-4"]
    assert len(list((out / "step-4").glob("*.safetensors"))) > 1
    assert not (out / "step-4" / "weights.pt").exists(), "weights were handed in as a file"
    found, expected = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (out / "step-4", tmp_path / "trainer" / "final")
    )
    assert_equal(found, expected)


def save_on_two_nodes(url: str, memory: str, export: HuggingFaceExport) -> list[str]:
    job = Job(url, f"{memory}/{dist.get_rank()}")
    with job.writer(export=export) as writer:
        save(writer, 7)
    return [one.exported_to for one in writer.status() if one.exported_to]


def test_one_node_exports_whole_what_two_have_sharded_and_torch_reads_it(
    memory_root: Path, tmp_path: Path
) -> None:
    out, url = tmp_path / "out", str(tmp_path / "run")
    names = {"layers.0.weight": "first.weight", "secret": None}
    export = HuggingFaceExport(out, names=names, shard_bytes=24_100)
    said = forked_ranks(save_on_two_nodes, 2, url, str(memory_root), export, timeout=120)
    assert sorted(said) == [[], [str(out / "step-7")]]
    expected = make_weights(7)
    expected["first.weight"] = expected.pop("layers.0.weight")
    del expected["secret"]
    assert_equal(load_export(out / "step-7"), expected)
    sizes = [file.stat().st_size for file in (out / "step-7").glob("*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 24_100 + 1000, "a shard is larger than it may be, but for its head"

    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(out / "step-7")))
    assert_equal(found, expected)


def save_as(job: Job, export: HuggingFaceExport) -> None:
    with job.writer(export=export) as writer:
        save(writer, 3)


def test_an_export_in_tmpfs_is_a_copy_with_the_umasks_modes_that_its_reader_may_take_away(
    job: Job,
) -> None:
    with private_directory("export") as root:
        out = root / "made"
        export = HuggingFaceExport(out, part="", names=shouted, dtype=torch.float16)
        forked(save_as, job, export, timeout=120)
        expected = {f"MODEL.{name.upper()}": one for name, one in make_weights(3).items()}
        del expected["MODEL.SECRET"]
        expected["OPTIMIZER.MOMENTUM"] = make_state(3)["optimizer"]["momentum"]
        assert_equal(load_export(out / "step-3"), expected, torch.float16)
        with safe_open(out / "step-3" / "model-00001-of-00001.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
        mask = os.umask(0o077)
        os.umask(mask)
        slots = {path.stat().st_ino for path in job.directory.rglob("*")}
        for path in (out, *out.rglob("*")):
            wanted = (0o777 if path.is_dir() else 0o666) & ~mask
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path
            assert path.stat().st_ino not in slots
        assert stat.S_IMODE(Path(job.memory).stat().st_mode) == 0o700
        for path in (out / "step-3").iterdir():
            path.write_bytes(b"something else")
            path.unlink()
        found = make_state(0)
        with job.reader() as reader:
            dcp.load(found, checkpoint_id="step-3", storage_reader=reader)
            assert reader.report().source == "memory"
        assert_equal(found["model"], make_weights(3))


def peak_of_export(job: Job, export: HuggingFaceExport, count: int) -> int:
    """KiB of memory that an export of so many tensors of 8 MiB has taken at most."""
    os.environ["DCP_MEM_FAULTS"] = "export.shards:stop:1"
    state = {"model": {str(number): torch.ones(2 << 20) for number in range(count)}}
    with job.writer(export=export, keep_memory=1) as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
        wait_until(lambda: is_stopped(job.memory), "all shards")
        (exporter,) = exporters(job.memory)
        status = Path(f"/proc/{exporter.pid}/status").read_text()
        exporter.send_signal(signal.SIGCONT)
    return int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.variant), "bfloat16"])
def test_an_export_takes_the_memory_of_a_shard(
    memory_root: Path, tmp_path: Path, dtype: str | None
) -> None:
    one, many = (
        forked(
            peak_of_export,
            Job(str(tmp_path / f"run-{count}"), str(memory_root / str(count))),
            HuggingFaceExport(tmp_path / f"out-{count}", shard_bytes="9MB", dtype=dtype),
            count,
            timeout=120,
        )
        for count in (1, 16)
    )
    assert many - one < 64 << 10, "half of what 16 tensors take"


# -- which checkpoints -----------------------------------------------------------------------------


def save_five(job: Job, export: HuggingFaceExport) -> dict[str, ExportState | None]:
    with job.writer(export=export) as writer:
        for number in range(1, 6):
            save(writer, number)
    return {one.name: one.export for one in writer.status()}


@pytest.mark.parametrize(
    ("every", "exported"),
    [
        (2, ["step-1", "step-3", "step-5"]),
        pytest.param(every_n_steps(3), ["step-1", "step-4"], marks=pytest.mark.variant),
    ],
)
def test_every_nth_checkpoint_is_exported_and_the_newest_are_kept(
    job: Job, tmp_path: Path, every: Any, exported: list[str]
) -> None:
    out = tmp_path / "out"
    said = forked(save_five, job, HuggingFaceExport(out, every=every, keep=2), timeout=240)
    assert [name for name, state in said.items() if state] == exported[::-1]
    assert exported_in(out) == exported[-2:]
    for name in exported[-2:]:
        number = int(name.rpartition("-")[2])
        assert_equal(load_export(out / name), make_weights(number))
    assert sorted(os.listdir(out)) == exported[-2:], "something hidden is left"


def save_in_memory(job: Job, export: HuggingFaceExport) -> list[tuple[str, bool]]:
    with job.writer(export=export, persist=False) as writer:
        dcp.save(make_state(1), checkpoint_id="step-1", storage_writer=writer)
        wait_until(lambda: status_of(writer, "step-1").exported_to, "the export")
    return [(one.name, one.state is State.DURABLE) for one in writer.status()]


def test_what_stays_in_memory_is_exported_if_that_is_asked_for(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = forked(save_in_memory, job, HuggingFaceExport(out, of="complete"), timeout=120)
    assert said == [("step-1", False)]
    assert_equal(load_export(out / "step-1"), make_weights(1))
    assert committed_in(Path(str(job.url))) == set()


def save_without_a_step(job: Job, export: HuggingFaceExport) -> str:
    with job.writer(export=export) as writer:
        dcp.save(make_state(1), checkpoint_id="step-1", storage_writer=writer)
    assert status_of(writer, "step-1").export is ExportState.SKIPPED
    return status_of(writer, "step-1").export_error


def test_a_save_that_tells_no_step_is_skipped_where_steps_count(job: Job, tmp_path: Path) -> None:
    export = HuggingFaceExport(tmp_path / "out", every=every_n_steps(5))
    assert "annotate_next_save(step=...)" in forked(save_without_a_step, job, export, timeout=60)


def save_anew(job: Job, export: HuggingFaceExport) -> None:
    for number in (1, 2):
        with job.writer(export=export) as writer:
            save(writer, number, "step-1")


def test_a_later_save_of_a_name_takes_the_place_of_its_export(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    forked(save_anew, job, HuggingFaceExport(out), timeout=120)
    assert_equal(load_export(out / "step-1"), make_weights(2))
    (shard,) = (out / "step-1").glob("*.safetensors")
    assert shard.name != "model-00001-of-00001.safetensors", "a reader could mix two saves"
    assert os.listdir(out) == ["step-1"]


def save_three(job: Job, export: HuggingFaceExport, of_two: HuggingFaceExport) -> None:
    save_as(job, export)
    save_anew(job, of_two)


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["abfs_root", pytest.param("s3_root", marks=pytest.mark.variant)])
def test_an_export_to_an_object_store_may_lie_below_the_jobs_root(
    memory_root: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    root: StorageRoot = request.getfixturevalue(kind)
    job = root.job(memory_root)
    to = f"{job.url}/hf"
    forked(save_three, job, HuggingFaceExport(to), HuggingFaceExport(to, keep=1), timeout=180)
    options = root.storage_options
    assert collect_orphans(str(job.url), older_than=0.0, storage_options=options) == []
    files, exports = fsspec.core.url_to_fs(to, use_listings_cache=False, **options)
    copied = tmp_path / "copied"
    copied.mkdir()
    assert [Path(one).name for one in files.ls(exports, detail=False)] == ["step-1"]
    for one in files.ls(f"{exports}/step-1", detail=False):
        (copied / Path(one).name).write_bytes(files.cat_file(one))
    assert_equal(load_export(copied), make_weights(2))
    manager = CheckpointManager(
        job.url, memory_root=job.memory, job=job.name, storage_options=options
    )
    listed = [one.name for one in manager.list()]
    assert listed == ["step-1", "step-3"], "an export is taken for a checkpoint"


# -- kills, pauses, errors -------------------------------------------------------------------------


def kill_agent_in_export(job: Job, export: HuggingFaceExport, point: str) -> list[str]:
    """Kill the agent while its export stands still at a point; then let a new one go on."""
    os.environ["DCP_MEM_FAULTS"] = f"{point}:stop:1"
    with job.writer(export=export) as writer:
        save(writer, 1)
        del os.environ["DCP_MEM_FAULTS"]
        wait_until(lambda: is_stopped(job.memory), "the export to come to its point")
        (exporter,) = exporters(job.memory)
        (agent,) = agents(job.memory)
        seen = os.listdir(export.to)
        first = Path(export.to, seen[0], "model-00001-of-00004.safetensors").stat().st_ino
        agent.kill()
        agent.wait()
        exporter.send_signal(signal.SIGCONT)
        wait_until(lambda: not exporters(job.memory), "the orphaned export to end")
    assert status_of(writer, "step-1").export is ExportState.EXPORTED
    again = Path(export.to, "step-1", "model-00001-of-00004.safetensors").stat().st_ino
    assert again == first, "a shard that was whole was made again"
    return seen


def is_stopped(memory: str) -> bool:
    return [one.status() for one in exporters(memory)] == [psutil.STATUS_STOPPED]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("export.shard", marks=pytest.mark.variant),
        "export.shards",
        pytest.param("export.shown", marks=pytest.mark.variant),
    ],
)
def test_an_export_whose_agent_is_killed_is_finished_by_the_next_one(
    job: Job, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    export = HuggingFaceExport(out, shard_bytes=10_000)
    (seen,) = forked(kill_agent_in_export, job, export, point, timeout=180)
    assert (seen == "step-1") == (point == "export.shown"), "half an export was there to be seen"
    assert_equal(load_export(out / "step-1"), make_weights(1))
    assert os.listdir(out) == ["step-1"]


def kill_exporter(job: Job, export: HuggingFaceExport) -> str:
    os.environ["DCP_MEM_FAULTS"] = "export.shard:stop:1"
    with job.writer(export=export) as writer:
        save(writer, 1)
        wait_until(lambda: is_stopped(job.memory), "the export to come to its point")
        exporters(job.memory)[0].kill()
        wait_until(lambda: status_of(writer, "step-1").export is ExportState.FAILED, "a failure")
        error = status_of(writer, "step-1").export_error
        assert status_of(writer, "step-1").state is State.DURABLE
        # The agent has the fault in its environment: each process stops once.
        wait_until(lambda: is_stopped(job.memory), "the repeat")
        exporters(job.memory)[0].send_signal(signal.SIGCONT)
        wait_until(lambda: status_of(writer, "step-1").exported_to, "the end of the repeat")
    return error


def test_an_export_whose_process_is_killed_is_repeated_and_told(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export = HuggingFaceExport(out, shard_bytes=10_000)
    error = forked(kill_exporter, job, export, timeout=180)
    assert "ended with -9" in error
    assert_equal(load_export(out / "step-1"), make_weights(1))


def close_without_agent(job: Job, export: HuggingFaceExport) -> None:
    os.environ |= {"DCP_MEM_FAULTS": "export.shard:stop:1", "DCP_MEM_TIMEOUT": "1"}
    with job.writer(export=export) as writer:
        save(writer, 1)
        wait_until(lambda: is_stopped(job.memory), "the export to come to its point")
        stopped = [*agents(job.memory), *exporters(job.memory)]
        stopped[0].suspend()
    for one in stopped:
        one.kill()


def test_close_ends_where_nothing_but_an_export_awaits_an_agent_that_is_stopped(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    forked(close_without_agent, job, HuggingFaceExport(tmp_path / "out"), timeout=60)
    assert "aren't made: the agent doesn't answer" in capfd.readouterr().out


def save_and_die(job: Job, export: HuggingFaceExport) -> None:
    writer = job.writer(export=export)
    save(writer, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_agent_finishes_the_export_of_a_trainer_that_was_killed(
    job: Job, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(AssertionError, match="SIGKILL"):
        forked(save_and_die, job, HuggingFaceExport(out))
    wait_until(lambda: exported_in(out) == ["step-1"], "the export")
    assert_equal(load_export(out / "step-1"), make_weights(1))
    wait_until(lambda: not agents(job.memory), "the agent to end")


def leases_in(job: Job) -> list[Path]:
    return list(Path(str(job.url)).glob(".dcp_mem/reader-*"))


def outlive_retention(
    job: Job, export: HuggingFaceExport, gate: Path
) -> dict[str, ExportState | None]:
    """Have retention delete what waits for its export, while one export hangs."""
    os.environ[GATE] = str(gate)
    with job.writer(export=export, keep_storage=1, keep_memory=1) as writer:
        save(writer, 1)
        wait_until(lambda: status_of(writer, "step-1").export is ExportState.RUNNING, "the export")
        wait_until(lambda: leases_in(job), "its lease")
        for number in (2, 3, 4):  # flushes go on meanwhile
            save(writer, number)
        wait_until(lambda: committed_in(Path(str(job.url))) == {"step-1", "step-4"}, "retention")
        gate.touch()
    return {one.name: one.export for one in writer.status()}


def test_retention_leaves_what_is_being_exported_and_what_is_gone_is_told(
    job: Job, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export = HuggingFaceExport(out, names=once_open)
    said = forked(outlive_retention, job, export, tmp_path / "gate", timeout=120)
    assert said["step-1"] is said["step-4"] is ExportState.EXPORTED
    assert said["step-2"] is said["step-3"] is ExportState.SKIPPED
    for number in (1, 4):
        assert_equal(load_export(out / f"step-{number}"), make_weights(number))


def reject_before_its_turn(
    job: Job, export: HuggingFaceExport, gate: Path, keep_memory: int
) -> dict[str, CheckpointStatus]:
    """Reject step-2 while the export of step-1 runs; memory has step-2 still, or not any more."""
    os.environ[GATE] = str(gate)
    manager = CheckpointManager(
        job.url, memory_root=job.memory, job=job.name, export=export, keep_memory=keep_memory
    )
    with manager:
        for number in (1, 2, 3):
            manager.save(number, make_state(number))
            manager.wait(number)
            if number == 1:
                wait_until(lambda: _of(manager, "step-1").export is ExportState.RUNNING)
        assert _of(manager, "step-2").in_memory == (keep_memory > 2)
        manager.reject(2, "a loss spike")
        gate.touch()
    return {one.name: one for one in manager.status()}


def _of(manager: CheckpointManager, name: str) -> CheckpointStatus:
    return next(one for one in manager.status() if one.name == name)


@pytest.mark.parametrize("keep_memory", [pytest.param(3, marks=pytest.mark.variant), 1])
def test_what_is_rejected_before_its_turn_is_skipped_and_told(
    job: Job, tmp_path: Path, keep_memory: int
) -> None:
    out = tmp_path / "out"
    export = HuggingFaceExport(out, names=once_open)
    said = forked(reject_before_its_turn, job, export, tmp_path / "gate", keep_memory, timeout=120)
    assert said["step-1"].export is said["step-3"].export is ExportState.EXPORTED
    assert said["step-2"].export is ExportState.SKIPPED
    assert said["step-2"].export_error == "rejected: a loss spike"
    assert exported_in(out) == ["step-1", "step-3"]
    log = (job.directory.parent / ".agent" / "agent.log").read_text()
    assert "step-2 isn't exported: rejected: a loss spike" in log


def stop_in_flush(job: Job, export: HuggingFaceExport, gate: Path) -> tuple[list[str], bool]:
    """Have the agent stand still in its second flush, and then let the export go on."""
    os.environ |= {GATE: str(gate), "DCP_MEM_FAULTS": "flush.started:stop:2"}
    with job.writer(export=export) as writer:
        save(writer, 1)
        wait_until(lambda: status_of(writer, "step-1").export is ExportState.RUNNING, "the export")
        dcp.save(make_state(2), checkpoint_id="step-2", storage_writer=writer)
        (agent,) = agents(job.memory)
        wait_until(lambda: agent.status() == psutil.STATUS_STOPPED, "the second flush")
        gate.touch()
        wait_until(Path(f"{gate}.passed").exists, "the export to be let on")
        time.sleep(1.0)  # far more than its next steps take
        seen = [str(path) for path in Path(export.to).rglob("*") if path.is_file()]
        (exporter,) = exporters(job.memory)
        agent.send_signal(signal.SIGCONT)
        is_nicer = exporter.nice() == min(19, agent.nice() + 4)
    return seen, is_nicer


def test_an_export_pauses_while_a_checkpoint_is_flushed(job: Job, tmp_path: Path) -> None:
    export = HuggingFaceExport(tmp_path / "out", names=once_open, every=10)
    seen, is_nicer = forked(stop_in_flush, job, export, tmp_path / "gate", timeout=120)
    assert seen == [], "the export went on beside a flush"
    assert is_nicer, "the export has the agent's priority"
    assert_equal(load_export(tmp_path / "out" / "step-1"), make_weights(1))


def fail_to_export(job: Job, exports: list[HuggingFaceExport]) -> list[str]:
    errors = []
    for number, export in enumerate(exports):
        manager = CheckpointManager(
            f"{job.url}-{number}", memory_root=job.memory, export=export, on_error="raise"
        )
        with manager:
            assert manager.save(1, make_state(1))
        assert _of(manager, "step-1").export is ExportState.FAILED
        errors.append(_of(manager, "step-1").export_error)
    return errors


def test_a_failed_export_is_told_and_fails_neither_saves_nor_the_end(
    job: Job, tmp_path: Path
) -> None:
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    (theirs / "step-1").mkdir(parents=True)
    (theirs / "step-1" / "mine.txt").write_text("mine")
    exports = [
        HuggingFaceExport(out, part="weights"),
        HuggingFaceExport(out, names=failing),
        HuggingFaceExport(out, names={"layers.0.bias": "secret"}),
        HuggingFaceExport(theirs),
    ]
    said = forked(fail_to_export, job, exports, timeout=180)
    for error, expected in zip(
        said,
        (
            "no tensor below part='weights'; it has model.layers",
            "RuntimeError: no name for ",
            "both become secret",
            "that no export has made: move it, or export elsewhere",
        ),
        strict=True,
    ):
        assert expected in error
        log = (job.directory.parent / ".agent" / "agent.log").read_text()
        assert expected in log
    assert exported_in(out) == []
    assert [path.name for path in (theirs / "step-1").iterdir()] == ["mine.txt"]


# -- arguments -------------------------------------------------------------------------------------


def test_weights_of_any_framework_are_no_files_to_hand_in(tmp_path: Path) -> None:
    wanted = {"config.json", "tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt"}
    weights = {
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "consolidated.00.pth",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.onnx",
        "rust_model.ot",
        "model.gguf",
    }
    for name in wanted | weights:
        (tmp_path / name).touch()
    export = HuggingFaceExport("/tmp/out", files=[tmp_path])
    assert {Path(path).name for path in export.files} == wanted


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: HuggingFaceExport("out", names=lambda name: name), "put a plain function into"),
        (lambda: HuggingFaceExport("out", names=made_within()), "put a plain function into"),
        (lambda: HuggingFaceExport("out", names=Names().of_object), "put a plain function into"),
        (lambda: HuggingFaceExport("out", names={"a": ""}), "give texts, or None"),
        (lambda: HuggingFaceExport("out", dtype=torch.int8), "choose one of float64"),
        (lambda: HuggingFaceExport("out", every=0), "at least 1"),
        (lambda: HuggingFaceExport("out", keep=0), "at least 1"),
        (lambda: HuggingFaceExport("out", of="staged"), "'durable' or 'complete'"),
        (lambda: HuggingFaceExport("out", shard_bytes="many"), "shard_bytes='many'"),
        (lambda: HuggingFaceExport("out", files=["not-there.json"]), "isn't there"),
        (lambda: HuggingFaceExport("out", files=["model.safetensors"]), "is a file of weights"),
        (lambda: HuggingFaceExport("nope://bucket/out"), "no protocol 'nope'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


def test_a_writer_refuses_exports_that_nobody_would_make(job: Job, memory_job: Job) -> None:
    export = HuggingFaceExport("out", names=Names.kept)
    with pytest.raises(ConfigError, match="agent='process'"):
        job.writer(export=export, agent="thread")
    with pytest.raises(ConfigError, match="needs a path"):
        memory_job.writer(export=export)
    with pytest.raises(ConfigError, match="the job's own root"):
        job.writer(export=HuggingFaceExport(str(job.url)))
    with pytest.raises(ConfigError, match=r"give a dcp_mem\.HuggingFaceExport"):
        job.writer(export="out")
    with pytest.raises(ConfigError, match="lives in one process"):
        job.writer(export=HuggingFaceExport("memory://out"))
