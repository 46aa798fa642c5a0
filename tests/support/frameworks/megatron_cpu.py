"""Megatron's real model, data parallelism and optimizer on CPUs, over gloo: `training(tensor=2)`.

Megatron-core takes it for granted that there is a GPU. Here every tensor that it wants to have on
one is made on the CPU.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

_VOCABULARY, _LENGTH = 64, 16


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is wanted on a GPU, and has CPU tensors say that they lie there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def do_without_gpu() -> None:
    """From here on this process needs no GPU for Megatron."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]


class _Attention(torch.nn.Module):
    """What Megatron has CUDA kernels and generators for."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class Training:
    """A GPT model of two layers that learns to count, its distributed optimizer, and its state.

    The state is that which Megatron-LM would save.
    """

    def __init__(self, tensor: int, pipeline: int, seed: int = 1) -> None:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, pipeline)
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            persist_layer_norm=False,
        )
        layer = get_gpt_layer_local_spec()
        layer.submodules.self_attention.submodules.core_attention = _Attention
        self._model = GPTModel(
            config,
            layer,
            _VOCABULARY,
            _LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self._ddp = DistributedDataParallel(config, ddp, self._model)
        options = OptimizerConfig(
            optimizer="adam", lr=0.01, use_distributed_optimizer=True, clip_grad=0.0
        )
        self._optimizer = get_megatron_optimizer(options, [self._ddp])
        _mend(self._optimizer.chained_optimizers[0])
        self.step = 0

    def train(self) -> float:
        """Take a step; returns its loss on this rank."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        first = self.step + 7 * parallel_state.get_data_parallel_rank()
        counted = (torch.arange(_LENGTH + 1)[None] + first) % _VOCABULARY
        places = torch.arange(_LENGTH)[None]
        loss = self._ddp(counted[:, :-1], places, None, labels=counted[:, 1:]).mean()
        loss.backward()
        self._ddp.finish_grad_sync()
        self._optimizer.step()
        self.step += 1
        return float(loss.detach())

    def state(self, kind: str, is_loading: bool = False) -> dict[str, Any]:
        """What Megatron-LM gives to `dist_checkpointing`.

        kind: how the optimizer's state is sharded.
        """
        if is_loading:
            self._make_state()
        metadata = {
            "distrib_optim_sharding_type": kind,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        model = self._model.sharded_state_dict(metadata=metadata)
        optimizer = self._optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        args = Namespace(
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size()
        )
        return {"args": args, "iteration": self.step, "model": model, "optimizer": optimizer}

    def _make_state(self) -> None:
        """Make the optimizer's state, which it lacks before a step without Transformer Engine."""
        adam = self._optimizer.chained_optimizers[0].optimizer
        for parameter in (
            parameter for group in adam.param_groups for parameter in group["params"]
        ):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.tensor(0.0), **moments}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for of_parameter in self._optimizer.chained_optimizers[0].optimizer.state.values():
            # Megatron gave all of them the same tensor to count in.
            of_parameter["step"] = of_parameter["step"].clone()
        self.step = state["iteration"]

    def values(self) -> dict[str, torch.Tensor]:
        """Return each whole tensor of model and optimizer by name, on all ranks."""
        found: dict[str, torch.Tensor] = {}
        for parts in _gathered(self.state("fully_reshardable")):
            for key, shape, offset, part in parts:
                whole = found.setdefault(key, torch.full(shape, torch.nan))
                whole[tuple(map(slice, offset, map(int.__add__, offset, part.shape)))] = part
        return found


def _mend(optimizer: Any) -> None:
    """Make the optimizer's load keep the steps, which torch's Adam counts for each parameter.

    0.16 expects Transformer Engine's: with torch's, "dp_reshardable" states come back with the
    steps of a fresh optimizer, and "fully_reshardable" ones not at all.
    """
    original = optimizer._set_main_param_and_optimizer_states

    def with_step(parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, place = optimizer.model_param_group_index_map[parameter]
        adam = optimizer.optimizer
        step = adam.state[adam.param_groups[group]["params"][place]]["step"]
        original(parameter, {**tensors, "step": step})

    optimizer._set_main_param_and_optimizer_states = with_step


def _gathered(state: dict[str, Any]) -> list[Any]:
    """(name, whole shape, offset, values) of every rank's parts."""
    dist_checkpointing.state_dict_utils.apply_factories(state)
    tensors = [
        one for one in nested_values(state) if isinstance(one, dist_checkpointing.ShardedTensor)
    ]
    mine = [
        (
            one.key,
            one.global_shape,
            one.global_offset,
            one.data.view((1,) * one.prepend_axis_num + one.local_shape),
        )
        for one in tensors
    ]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts
