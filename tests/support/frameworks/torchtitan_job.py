"""torchtitan's own program on CPU ranks: `-m … --config=memory --dump_folder=FOLDER`.

torchtitan 0.3 is made for GPUs and for a newer torch. These lines have its trainer run without:

- It takes "cuda" where no accelerator is found. Here its device is the CPU.
- It imports Triton (200 MB) and datasets (70 MB) when it is imported, and uses neither here. Where
  they are missing, empty modules stand in for them.
- Its language models' attention has no backward on CPUs. The model here has torch's own instead.
- Its FSDP divides gradients in a way that gloo doesn't know. FSDP has a setting for that.
- It calls torch.distributed.set_timeout, which torch 2.13 hasn't.

The model, its parallelisms, optimizer, dataloader, loop and checkpoints are torchtitan's.
"""

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._triton as torchs_triton
from torch.utils.data import IterableDataset

_VOCABULARY = 2048


class _Cpu(types.ModuleType):
    """torch.cpu, with what torchtitan asks of a device's module beside that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...


class _Empty(types.ModuleType):
    """A module whose functions return their first argument, or are decorators that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda value=None, *_, **__: (lambda function: function) if value is None else value


class _Empties(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _import_without_gpu() -> None:
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _Cpu("cpu")
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]
    torchs_triton.has_triton()  # torch remembers the answer
    missing = {name for name in ("datasets", "triton") if importlib.util.find_spec(name) is None}
    finder = _Empties(missing)
    sys.meta_path.append(finder)
    for name in ("distributed.minimal_async_ep.kernels", "hf_datasets.text_datasets"):
        importlib.import_module(f"torchtitan.{name}")
    sys.meta_path.remove(finder)
    for name in list(sys.modules):
        if name.partition(".")[0] in missing:
            del sys.modules[name]


_import_without_gpu()

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class _Tokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return _VOCABULARY


class _Texts(IterableDataset[Any]):
    """Texts that follow from their number, and go on behind the last one that was read."""

    def __init__(self, rank: int, tokens: int) -> None:
        self._rank, self._tokens, self._count = rank, tokens, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self._count += 1
            generator = torch.Generator().manual_seed(self._rank * 100_000 + self._count)
            text = torch.randint(_VOCABULARY, (self._tokens + 1,), generator=generator)
            yield {"input": text[:-1], "positions": torch.arange(self._tokens)}, text[1:]

    def state_dict(self) -> dict[str, int]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._count = state["count"]


class _Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        super().__init__(
            _Texts(dp_rank, seq_len),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps or 1,
        )


def _tiny_llama() -> ModelSpec:
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    theirs = spec.parallelize_fn

    def parallelize(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        model = theirs(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelize
    return spec


class Training(Trainer):  # type: ignore[misc]
    """torchtitan's trainer, which prints at the end what it has come to."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        pass

    def train(self) -> None:
        """Train, and print a hash of the end."""
        super().train()
        print(f"rank {dist.get_rank()} ends at {self.step} with {digest(self)}", flush=True)


def _training(checkpoint: CheckpointManager.Config) -> Training.Config:
    return Training.Config(
        model_spec=_tiny_llama(),
        tokenizer=_Tokenizer.Config(),
        dataloader=_Loader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=_VOCABULARY),
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=32,
            steps=12,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1),
        checkpoint=checkpoint,
    )


def torchtitans() -> Training.Config:
    """A training of a tiny Llama, with torchtitan's own checkpoint manager."""
    return _training(CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False))


def memory() -> Training.Config:
    """The same, with dcp_mem's."""
    from dcp_mem.integrations.torchtitan import MemoryCheckpointManager

    return _training(
        MemoryCheckpointManager.Config(enable=True, interval=3, last_save_model_only=False)
    )


def digest(trainer: Trainer) -> str:
    """A hash of this rank's part of model and optimizer, and of the step."""
    hashed = hashlib.sha256(str(trainer.step).encode())
    states = [*(part.state_dict() for part in trainer.model_parts), trainer.optimizers.state_dict()]
    for state in states:
        for name in sorted(state):
            value = state[name]
            local = getattr(value, "to_local", lambda value=value: value)()
            hashed.update(name.encode())
            if isinstance(local, torch.Tensor):
                hashed.update(local.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                hashed.update(repr(local).encode())
    return hashed.hexdigest()


if __name__ == "__main__":
    from torchtitan.train import main

    sys.argv[1:1] = ["--module=tests.support.frameworks.torchtitan_job"]
    main()
