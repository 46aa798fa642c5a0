"""DeepSpeed on dcp_mem, through its own engine for Nebula and through ours; killed and resumed."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_mem.integrations.nebula
from dcp_mem import ConfigError
from tests.support.checkpoints.jobs import wait_until
from tests.support.command import command
from tests.support.processes.forks import forked_ranks, killed_ranks

pytest.importorskip("deepspeed")

_STEPS = 5
_KILLED_IN = 3
_STAGES = (0, 1, 2, 3)
_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
"""By default they take a GB."""
_NONE_IS_SMALL = {"stage3_param_persistence_threshold": 0}
"""By default, parameters of less than 100,000 elements aren't partitioned. ZeRO 3 of DeepSpeed
0.19.6 on CPUs then sometimes trains on memory that it hasn't written."""


@pytest.fixture
def env(memory_root: Path) -> dict[str, str]:
    """The environment of the ranks."""
    return {"DCP_MEM_ROOT": str(memory_root), "DCP_MEM_TIMEOUT": "60"}


def _deepspeed() -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    dcp_mem.integrations.nebula.install()
    import deepspeed

    # It would be compiled, for minutes; gloo alone does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _engine(deepspeed: Any, stage: int, nebula: dict[str, Any] | None) -> Any:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **_BUCKETS, **(_NONE_IS_SMALL if stage == 3 else {})},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": stage > 0},
        **({} if nebula is None else {"nebula": nebula}),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine: Any, stage: int, step: int) -> float:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    dtype = torch.bfloat16 if stage else torch.float32
    inputs, targets = (torch.randn(4, size, generator=generator).to(dtype) for size in (8, 4))
    loss = ((engine(inputs) - targets) ** 2).float().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def _train(
    engine: Any, stage: int, save_dir: Path, *, saves: bool, stop: int = _STEPS
) -> tuple[int, float]:
    """Train on from the newest checkpoint; return the first step taken and the last loss."""
    found, client = engine.load_checkpoint(str(save_dir)) if saves else (None, {})
    first, loss = client["step"] + 1 if found else 0, 0.0
    for step in range(first, stop):
        loss = _step(engine, stage, step)
        if saves:
            engine.save_checkpoint(
                str(save_dir), tag=f"global_step{step}", client_state={"step": step}
            )
    return first, loss


def _nebula_config(place: str, stage: int) -> dict[str, Any]:
    return {
        "enabled": True,
        "persistent_storage_path": f"{place}/storage-{stage}",
        "persistent_time_interval": 3600,
        "num_of_version_in_retention": 2,
        "enable_nebula_load": True,
    }


def _train_all(
    place: str, is_killed: bool, with_nebula: bool
) -> dict[str, tuple[int, float, float]]:
    """By engine and stage: where it went on, its last loss, and that of an undisturbed run.

    At the end one rank is killed.
    """
    deepspeed = _deepspeed()
    from dcp_mem.integrations.deepspeed import use_memory

    stop, found = _KILLED_IN if is_killed else _STEPS, {}
    for stage in _STAGES if with_nebula else ():
        save_dir = Path(place) / f"save-{stage}"
        engine = _engine(deepspeed, stage, _nebula_config(place, stage))
        first, loss = _train(engine, stage, save_dir, saves=True, stop=stop)
        if is_killed and stage == _STAGES[-1]:
            _leave_a_save_half_done(engine, stage, save_dir)
        found[f"nebula, stage {stage}"] = (
            first,
            loss,
            0.0 if is_killed else _undisturbed(deepspeed, stage),
        )
    save_dir, stage = Path(place) / f"save-{is_killed}", 2  # another one, as on a new machine
    engine = _engine(deepspeed, stage, None)
    use_memory(engine, f"{place}/storage", load_dir=save_dir)
    first, loss = _train(engine, stage, save_dir, saves=True, stop=stop)
    if is_killed:
        wait_until((Path(place) / "storage" / f"global_step{_KILLED_IN - 1}" / ".metadata").exists)
        _die_in_the_middle_of_a_save(engine, stage, save_dir)
    else:
        _check_files(engine, Path(place))
    found["ours"] = first, loss, _undisturbed(deepspeed, stage)
    _check_strategy(deepspeed, place)
    return found


def _check_files(engine: Any, place: Path) -> None:
    """DeepSpeed's own tool reads what `dcp-mem export` makes of a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    tag = f"global_step{_STEPS - 1}"
    if dist.get_rank() > 0:
        return
    wait_until((place / "storage" / tag / ".metadata").exists)
    target = place / "files" / tag
    result = command("export", f"{place}/storage", tag, str(target), "--format", "files")
    assert result.exit_code == 0, result.output
    weights = get_fp32_state_dict_from_zero_checkpoint(str(target.parent), tag)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(weights[name].bfloat16(), parameter)


def _check_strategy(deepspeed: Any, place: str) -> None:
    """Lightning's strategy needs CUDA devices; what it does with its engine doesn't."""
    lightning = pytest.importorskip("lightning.pytorch")
    section = {"persistent_storage_path": f"{place}/strategy", "persistent_time_interval": 0}
    config = {"zero_optimization": {"stage": 2}, "nebula": {"enabled": True, **section}}
    try:
        strategy = dcp_mem.integrations.nebula.NebulaDeepspeedStrategy(config=config)
    except ImportError:  # Lightning takes no DeepSpeed before 0.16 beside this torch
        return
    assert isinstance(strategy, lightning.strategies.DeepSpeedStrategy)
    engine = strategy.model = _engine(deepspeed, 2, None)
    _step(engine, 2, 0)
    for number in range(2):
        strategy.save_checkpoint(
            {"number": number, "state_dict": {}}, f"{place}/names/n={number}.ckpt"
        )
    assert dcp_mem.integrations.nebula.get_latest_checkpoint().tag == "n=1.ckpt"
    again = strategy.model = _engine(deepspeed, 2, None)
    strategy._use_memory()
    assert again.load_checkpoint(f"{place}/names/n=0.ckpt")[1]["number"] == 0
    for one, other in zip(engine.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(one, other)


def _undisturbed(deepspeed: Any, stage: int) -> float:
    return _train(_engine(deepspeed, stage, None), stage, Path(), saves=False)[1]


def _leave_a_save_half_done(engine: Any, stage: int, save_dir: Path) -> None:
    """The files are in memory, and no rank commits them."""
    _step(engine, stage, _KILLED_IN)
    engine.checkpoint_engine.commit = lambda info: False
    engine.save_checkpoint(
        str(save_dir), tag=f"global_step{_KILLED_IN}", client_state={"step": _KILLED_IN}
    )


def _die_in_the_middle_of_a_save(engine: Any, stage: int, save_dir: Path) -> None:
    _step(engine, stage, _KILLED_IN)
    if dist.get_rank() == 1:
        engine.checkpoint_engine.commit = lambda info: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(
        str(save_dir), tag=f"global_step{_KILLED_IN}", client_state={"step": _KILLED_IN}
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_goes_on_where_it_was_killed_with_deepspeeds_engine_for_nebula_and_with_ours(
    memory_root: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    """DeepSpeed 0.19.7 and later have no engine for Nebula any more."""
    with_nebula = (Path(str(__import__("deepspeed").__file__)).parent / "nebula").is_dir()
    killed = killed_ranks(
        _train_all,
        2,
        str(tmp_path),
        True,
        with_nebula,
        env=env,
        timeout=240,
    )
    assert len(killed) == 2
    for stage in _STAGES:  # what there is of the newest checkpoints lies in memory alone
        assert not (tmp_path / f"storage-{stage}" / f"global_step{_KILLED_IN - 1}").exists()
    # Without this memory our engine goes on with storage's checkpoint.
    shutil.rmtree(next(memory_root.glob("storage-????????")))
    for of_rank in forked_ranks(
        _train_all, 2, str(tmp_path), False, with_nebula, env=env, timeout=240
    ):
        assert len(of_rank) == (5 if with_nebula else 1)
        for engine, (first, loss, undisturbed) in of_rank.items():
            assert (engine, first, loss) == (engine, _KILLED_IN, undisturbed)


def _save_weights(place: str) -> None:
    """Save a checkpoint, and then the weights of the same step."""
    deepspeed = _deepspeed()
    from dcp_mem.integrations.deepspeed import use_memory

    engine = _engine(deepspeed, 2, None)
    ours = use_memory(engine, f"{place}/storage")
    _step(engine, 2, 0)
    engine.save_checkpoint(f"{place}/names", client_state={"step": 0})
    saved = dcp_mem.integrations.nebula.newest_files()
    assert any(name.endswith("_states.pt") for name in saved[1])
    for save in (engine.save_16bit_model, engine.save_fp16_model):
        assert save(f"{place}/{save.__name__}")
        assert dcp_mem.integrations.nebula.newest_files() == saved
        weights = torch.load(f"{place}/{save.__name__}/pytorch_model.bin")
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(weights[name], parameter)
    assert engine.checkpoint_engine is ours


def _resumed_step(place: str) -> int:
    deepspeed = _deepspeed()
    from dcp_mem.integrations.deepspeed import use_memory

    engine = _engine(deepspeed, 2, None)
    use_memory(engine, f"{place}/storage", load_dir=f"{place}/other-names")
    step: int = engine.load_checkpoint(f"{place}/other-names")[1]["step"]
    return step


@pytest.mark.slow
def test_save_16bit_model_writes_its_file_and_leaves_the_checkpoint_of_that_step(
    env: dict[str, str], tmp_path: Path
) -> None:
    forked_ranks(_save_weights, 2, str(tmp_path), env=env)
    assert forked_ranks(_resumed_step, 2, str(tmp_path), env=env) == [0, 0]


def _use_memory_for_two(place: str) -> None:
    deepspeed = _deepspeed()
    from dcp_mem.integrations.deepspeed import use_memory

    first, second = (_engine(deepspeed, 2, None) for _ in range(2))
    stock = second.checkpoint_engine
    use_memory(first, f"{place}/first")
    with pytest.raises(ConfigError, match=f"saves to .*{place}/first"):
        use_memory(second, f"{place}/second")
    assert second.checkpoint_engine is stock
    use_memory(first, f"{place}/first", persistent_time_interval=0)  # the same one again
    first.save_checkpoint(f"{place}/names", tag="global_step1")
    dcp_mem.integrations.nebula._shutdown()
    assert Path(place, "first", "global_step1", ".metadata").exists()
    use_memory(second, f"{place}/second")
    second.save_checkpoint(f"{place}/names", tag="global_step2")
    dcp_mem.integrations.nebula._shutdown()
    assert Path(place, "second", "global_step2", ".metadata").exists()


@pytest.mark.slow
def test_a_second_engine_is_refused_until_the_first_ones_run_is_shut_down(
    env: dict[str, str], tmp_path: Path
) -> None:
    forked_ranks(_use_memory_for_two, 1, str(tmp_path), env=env)


def _load_deepspeeds_own_files(place: str) -> None:
    """Load what DeepSpeed has saved itself, before and after saving into memory."""
    deepspeed = _deepspeed()
    from dcp_mem.integrations.deepspeed import use_memory

    own, ours = (_engine(deepspeed, 2, None) for _ in range(2))
    for tag in ("global_step1", "global_step2"):
        _step(own, 2, 0)
        own.save_checkpoint(f"{place}/own", tag=tag, client_state={"whose": "own"})
    use_memory(ours, f"{place}/storage")
    assert _loaded(ours, f"{place}/own", None) == "own"
    assert _same_weights(own, ours)
    _step(ours, 2, 1)
    ours.save_checkpoint(f"{place}/names", tag="global_step2", client_state={"whose": "ours"})
    assert not _same_weights(own, ours)
    assert _loaded(ours, f"{place}/names", None) == "ours"
    assert not _same_weights(own, ours)
    assert _loaded(ours, f"{place}/own", "global_step2") == "own"
    assert _same_weights(own, ours)
    for only_weights in (False, True):
        assert _loaded(ours, f"{place}/own", "global_step1", load_module_only=only_weights) == "own"
        assert not _same_weights(own, ours)  # they are those of a step later


def _save_under_one_tag(place: str) -> None:
    """Save and load as Accelerate does, which gives DeepSpeed the same tag each time."""
    deepspeed = _deepspeed()
    from dcp_mem.integrations.deepspeed import use_memory

    engine, tag = _engine(deepspeed, 2, None), "pytorch_model"
    ours = use_memory(engine, f"{place}/storage", num_of_version_in_retention=3)
    for name in ("100", "200", "best"):
        engine.save_checkpoint(f"{place}/out/{name}", tag, {"whose": name})
    for name in ("100", "200", "best"):
        assert _loaded(engine, f"{place}/out/{name}", tag) == name
    for directory in ("100", "100~pytorch_model"):
        assert ours.tag_of(f"{place}/out/{directory}", tag) == "100~pytorch_model"
    assert ours.show_newest_in(f"{place}/new/best") == "best~pytorch_model"
    assert _loaded(engine, f"{place}/new/best", tag) == "best"
    assert ours.show_newest_in(f"{place}/names") == "best~pytorch_model"
    assert _loaded(engine, f"{place}/names", None) == "best"


def _loaded(engine: Any, load_dir: str, tag: str | None, **options: Any) -> str:
    whose: str = engine.load_checkpoint(load_dir, tag, **options)[1]["whose"]
    return whose


def _same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.slow
def test_files_that_deepspeed_saved_itself_are_loaded_and_no_checkpoint_in_their_place(
    env: dict[str, str], tmp_path: Path
) -> None:
    forked_ranks(_load_deepspeeds_own_files, 2, str(tmp_path), env=env)


@pytest.mark.slow
def test_checkpoints_of_one_tag_without_a_number_are_told_apart_by_their_directories(
    env: dict[str, str], tmp_path: Path
) -> None:
    module = pytest.importorskip("dcp_mem.integrations.deepspeed.engine")
    if not module._TELLS_DIRECTORY:
        pytest.skip("DeepSpeed before 0.17 doesn't tell engines the directory")
    forked_ranks(_save_under_one_tag, 1, str(tmp_path), env=env)


def test_a_file_has_content_unless_it_is_a_placeholder(tmp_path: Path) -> None:
    placeholders = pytest.importorskip("dcp_mem.integrations.deepspeed.universal")
    path = tmp_path / "global_step1" / "mp_rank_00_model_states.pt"
    assert not placeholders.has_content(path)
    placeholders.place(path)
    assert not placeholders.has_content(path)
    for length in (10, 0):  # its writer was killed
        path.write_bytes(path.read_bytes()[:length])
        assert not placeholders.has_content(path)
    for is_zip in (False, True):
        torch.save("", path, _use_new_zipfile_serialization=is_zip)  # as DeepSpeed for Nebula
        assert not placeholders.has_content(path)
        torch.save({"step": 1}, path, _use_new_zipfile_serialization=is_zip)
        assert placeholders.has_content(path)
    torch.save({"weight": torch.zeros(10_000)}, path)
    assert placeholders.has_content(path)
