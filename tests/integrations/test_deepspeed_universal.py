"""ZeRO's checkpoints, saved by our engine and loaded by another number of ranks."""

import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_mem import ConfigError
from dcp_mem.integrations import nebula
from tests.support.checkpoints.jobs import wait_until
from tests.support.processes.forks import forked_ranks, killed_ranks

_CASES = {"1 bf16": (1, True), "2 fp32": (2, False), "3 fp32": (3, False)}
_ROUNDING = {True: 2e-2, False: 1e-5}
"""By whether it trains in bf16: how far losses of other numbers of ranks may be apart."""
_BATCH = 8
_ZERO = {
    "reduce_bucket_size": 100_000,
    "allgather_bucket_size": 100_000,
    "stage3_param_persistence_threshold": 0,
}
Losses = dict[str, list[float]]


class _Model(torch.nn.Module):
    """Sizes that no number of ranks divides, a frozen part, and a buffer that training changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(7, 13), torch.nn.Linear(13, 5)
        self.frozen = torch.nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.frozen(self.second(torch.tanh(self.first(inputs))))
        return found + self.seen / 100


def _deepspeed() -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    # It would be compiled, for minutes; gloo alone does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _engine(stage: int, is_bf16: bool, seed: int, optimizer: Any = torch.optim.AdamW) -> Any:
    deepspeed = _deepspeed()
    torch.manual_seed(seed)
    model = _Model()
    config = {
        "train_micro_batch_size_per_gpu": _BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage, **_ZERO},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": is_bf16},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
    }
    groups = [
        {"params": list(model.first.parameters()), "weight_decay": 0.5},
        {"params": list(model.second.parameters()), "weight_decay": 0.0},
    ]
    made = optimizer(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=made, config=config)[0]


def _step(engine: Any, is_bf16: bool, step: int) -> float:
    """Train on this rank's part of the step's batch; return the loss of the whole batch."""
    generator = torch.Generator().manual_seed(step)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    inputs, targets = (
        torch.randn(_BATCH, size, generator=generator)[rows].to(dtype) for size in (7, 3)
    )
    loss = ((engine(inputs) - targets) ** 2).float().mean()
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone() / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def _states(engine: Any) -> dict[str, torch.Tensor]:
    """All that training has changed, whole: weights and moments in fp32, and the rest."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.data.clone()
        if parameter.requires_grad:
            found[f"{name} fp32"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def _link_moments(engine: Any) -> None:
    """Have `safe_get_full_optimizer_state` know the moments of all groups of parameters.

    ZeRO 1 and 2 link parameters to moments once, when the first group alone has any.
    """
    if not engine.zero_optimization_partition_weights():
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _linked_to_copies(engine: Any) -> list[str]:
    """Parameters whose moments, as `_states` reads them, aren't those that the optimizer uses."""
    states = engine.optimizer.optimizer.state.values()
    own = {one.untyped_storage().data_ptr() for state in states for one in state.values()}
    mappings = {
        name: getattr(parameter, "_hp_mapping", None)
        for name, parameter in engine.module.named_parameters()
    }
    return [
        name
        for name, mapping in mappings.items()
        if mapping is not None
        and any(
            one.untyped_storage().data_ptr() not in own for one in mapping.optim_fragment.values()
        )
    ]


def _differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    names = one.keys() | other.keys()
    return sorted(n for n in names if n not in one or not torch.equal(one[n], other[n]))


def _train_on(place: str, seed: int, steps: int, *, shared: bool, is_killed: bool) -> Losses:
    """Go on from the newest checkpoint, compare it with what was saved, train, and save."""
    from dcp_mem.integrations.deepspeed import use_memory

    losses: Losses = {}
    assert tempfile.gettempdir() == place  # where nothing may be left in the end
    for name, (stage, is_bf16) in _CASES.items():
        nebula._shutdown()  # the case before has saved for the last time
        engine = _engine(stage, is_bf16, seed)
        load_dir = f"{place}/names-{name[0]}-{dist.get_world_size()}"
        use_memory(
            engine,
            f"{place}/storage-{name[0]}",
            load_dir=load_dir,
            shared_dir=f"{place}/shared" if shared else None,
        )
        _, client = engine.load_checkpoint(load_dir)
        first = 0
        if client:
            first = client["step"] + 1
            saved = torch.load(f"{place}/states-{name[0]}-{first - 1}.pt")
            differing = _differing(_states(engine), saved)
            assert not differing, (name, differing)
            assert not _linked_to_copies(engine), (name, _linked_to_copies(engine))
        losses[name] = [_step(engine, is_bf16, step) for step in range(first, first + steps)]
        if not client:
            _link_moments(engine)
        last, states = first + steps - 1, _states(engine)
        if dist.get_rank() == 0:
            torch.save(states, f"{place}/states-{name[0]}-{last}.pt")
        engine.save_checkpoint(load_dir, tag=f"global_step{last}", client_state={"step": last})
        wait_until(Path(place, f"storage-{name[0]}", f"global_step{last}", ".metadata").exists)
    if is_killed and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return losses


def _first(place: str) -> Losses:
    return _train_on(place, 7, 3, shared=False, is_killed=True)


def _grown(place: str) -> Losses:
    return _train_on(place, 8, 2, shared=False, is_killed=False)


def _shrunk(place: str) -> Losses:
    return _train_on(place, 9, 2, shared=True, is_killed=False)


def _undisturbed() -> Losses:
    losses: Losses = {}
    for name, (stage, is_bf16) in _CASES.items():
        engine = _engine(stage, is_bf16, 7)
        losses[name] = [_step(engine, is_bf16, step) for step in range(7)]
    return losses


@pytest.mark.variant
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_zero_saved_on_two_ranks_is_trained_on_by_four_and_then_by_one(
    memory_root: Path, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    env = {"DCP_MEM_ROOT": str(memory_root), "DCP_MEM_TIMEOUT": "60", "TMPDIR": str(tmp_path)}
    place = str(tmp_path)
    undisturbed = forked_ranks(_undisturbed, 2, env=env, timeout=120)[0]
    killed_ranks(_first, 2, place, env=env, timeout=120)
    grown = forked_ranks(_grown, 4, place, env=env, timeout=240)[0]
    jobs = list(memory_root.glob("storage-?-????????"))
    assert len(jobs) == len(_CASES)
    for of_job in jobs:  # the last ones load from storage
        shutil.rmtree(of_job)
        left = (
            tmp_path / "shared" / f"dcp_mem-universal-{of_job.name}" / "files" / "of a killed load"
        )
        left.mkdir(parents=True)
    shrunk = forked_ranks(_shrunk, 1, place, env=env, timeout=240)[0]
    for name, (_, is_bf16) in _CASES.items():
        expected = pytest.approx(undisturbed[name][3:], rel=_ROUNDING[is_bf16])
        assert grown[name] + shrunk[name] == expected, name
    assert not list(tmp_path.glob("**/dcp_mem-universal-*"))


def _refused(place: str, is_first: bool) -> str:
    """The error of a load whose optimizer has no moments of Adam's."""
    from dcp_mem.integrations.deepspeed import use_memory

    def momentum(parameters: Sequence[Any], lr: float) -> Any:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    engine = _engine(2, False, 7, momentum)
    use_memory(engine, f"{place}/storage", load_dir=f"{place}/names")
    if is_first:
        _step(engine, False, 0)
        engine.save_checkpoint(f"{place}/names", tag="global_step0")
        return ""
    with pytest.raises(ConfigError) as refused:
        engine.load_checkpoint(f"{place}/names")
    return str(refused.value)


@pytest.mark.slow
def test_an_optimizer_that_deepspeed_cannot_convert_is_refused_with_the_number_of_ranks_to_use(
    memory_root: Path, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    env = {"DCP_MEM_ROOT": str(memory_root), "DCP_MEM_TIMEOUT": "60", "TMPDIR": str(tmp_path)}
    forked_ranks(_refused, 2, str(tmp_path), True, env=env, timeout=120)
    (text,) = forked_ranks(_refused, 1, str(tmp_path), False, env=env, timeout=120)
    assert "global_step0 was saved by 2 data-parallel ranks" in text
    assert "exp_avg" in text
    assert "Load it with as many ranks" in text
    assert not list(tmp_path.glob("dcp_mem-universal-*"))


@pytest.mark.parametrize(
    ("files", "count", "others"),
    [
        (["mp_rank_00_model_states.pt"], 0, []),
        (
            ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            1,
            [],
        ),
        ([f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)], 12, []),
        ([f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(3)], 0, []),
        (
            ["layer_0_expert_1_mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
            0,
            ["layer_0_expert_1_mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
        ),
    ],
)
def test_names_of_files_tell_who_saved_them(
    files: list[str], count: int, others: list[str]
) -> None:
    universal = pytest.importorskip("dcp_mem.integrations.deepspeed.universal")
    assert universal.saved_ranks(files) == count
    assert universal.unconvertible(files) == others
