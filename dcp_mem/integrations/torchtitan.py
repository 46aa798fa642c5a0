"""torchtitan: its checkpoint manager, with node memory in front of storage.

Trainer.Config(..., checkpoint=MemoryCheckpointManager.Config(enable=True, interval=10))
"""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("torchtitan")

import os
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.components.checkpointer.base import OPTIMIZER

from dcp_mem.common.log import log
from dcp_mem.config import parity
from dcp_mem.errors import ConfigError, NoRecoverableCheckpoint
from dcp_mem.functional import async_save, load, save
from dcp_mem.manager import name_of, step_of
from dcp_mem.policy.persistence import every_n_saves
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.saving.overlap import wait_for_copies
from dcp_mem.writer import MemoryStorageWriter

_SEED = name_of(0)


class MemoryCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager, whose checkpoints are complete once they are in node memory.

    When to save, what belongs into a checkpoint, where a first start loads from, and the last
    step's export to Hugging Face are torchtitan's. A restart takes the newest checkpoint that is
    whole, from memory or storage; what torchtitan's own manager has saved is found, too. The
    attribute `writer` has `wait` and `status`.

    Args:
        config: How to save.
        **parts: What torchtitan's trainer hands to its checkpoint manager.

    Raises:
        ConfigError: The options can't work together.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own options, and these.

        With `async_mode="async"` training waits for the copy; with "async_with_pinned_mem", which
        isn't needed for pinned memory here, parameters and optimizer state are copied under the
        next forward and backward. `keep_latest_k` is for storage.
        """

        persist_every: int = 1
        """Every so many saves go to storage, from the first on; at the end the newest, too."""

        keep_memory: int = 2
        """Complete checkpoints that stay in memory."""

        memory_limit: str | None = None
        """Bytes of node memory for checkpoints ("64GiB"); None for `keep_memory` + 1 of them."""

        memory_root: str | None = None
        """Directory in tmpfs; None for DCP_MEM_ROOT, else /dev/shm/dcp_mem-<uid>."""

        replicas: int = 0
        """Copies in other nodes' memory."""

        parity: int = 0
        """Nodes beside one whose parity it keeps, in place of copies; 0 for none."""

        upload_limit: str | None = None
        """Bytes per second that a node sends to storage ("200MiB"); None for no limit."""

        weights_only: bool = True
        """False to load states that are more than numbers, texts, containers and tensors."""

        def __post_init__(self) -> None:
            """Check torchtitan's options, and these."""
            CheckpointManager.Config.__post_init__(self)
            if self.replicas and self.parity:
                raise ConfigError("replicas and parity: give one of them")

    async_mode: AsyncMode

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        self._weights_only = config.weights_only
        self._overlap: Sequence[torch.optim.Optimizer] | None = None
        if self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            # The writer stages into pinned memory itself; torchtitan would make a stager.
            self._overlap, self.async_mode = list(parts["optimizers"].optimizers), AsyncMode.ASYNC
        self.reader = MemoryStorageReader(self.folder, memory_root=config.memory_root)
        self.writer = MemoryStorageWriter(
            self.folder,
            persist=every_n_saves(config.persist_every),
            keep_memory=config.keep_memory,
            keep_storage=config.keep_latest_k or None,
            memory_limit=config.memory_limit,
            replicas=config.replicas or None,
            redundancy=parity(config.parity) if config.parity else None,
            upload_limit=config.upload_limit,
            memory_root=config.memory_root,
        )

    # -- in place of torchtitan's methods ----------------------------------------------------------

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state dict into memory; return a future for an asynchronous save.

        An export to Hugging Face (`to_hf`) is torchtitan's.
        """
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        name = os.path.basename(checkpoint_id)
        self.writer.annotate_next_save(step=step_of(name))
        if async_mode is AsyncMode.DISABLED:
            save(state_dict, checkpoint_id=name, storage_writer=self.writer)
            return None
        begun = async_save(
            state_dict,
            checkpoint_id=name,
            storage_writer=self.writer,
            process_group=self.pg,
            overlap=self._overlap,
        )
        return getattr(begun, "upload_completion", begun)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        name = self._found(step)
        if name is None:
            return bool(super()._load(step))  # initial_load_path, Hugging Face, nothing, an error
        states = self._states_to_load(model_only=name == _SEED)
        if isinstance(states.get(OPTIMIZER), Stateful):
            states[OPTIMIZER] = _Optimizers(states[OPTIMIZER])
        # Without a name, an older checkpoint is loaded if this one turns out to be damaged.
        is_newest_wanted = step == -1 and name != _SEED
        load(
            states,
            checkpoint_id=None if is_newest_wanted else name,
            storage_reader=self.reader,
            weights_only=self._weights_only,
        )
        self.states[MODEL].load_state_dict(states)
        report = self.reader.report()
        log.info("torchtitan goes on from %s, loaded from %s", report.checkpoint_id, report.source)
        return True

    def _found(self, step: int) -> str | None:
        """Return the checkpoint to load; None where there is none of ours."""
        plan = self.reader._elected(None if step == -1 else name_of(step))
        for choice in plan.choices:
            if step_of(choice.name) is not None:
                return choice.name
        if plan.reasons:
            raise NoRecoverableCheckpoint(self.folder, plan.reasons)
        return None

    def _maybe_wait_for_staging(self) -> None:
        wait_for_copies()

    def _should_purge(self) -> bool:
        return False  # keep_storage does it, when a newer checkpoint is durable.

    def _close(self) -> None:
        has_failed = sys.exc_info()[0] is not None
        super()._close()
        if not hasattr(self, "writer"):
            return
        # After an error other ranks may be gone; the agent goes on alone.
        if self.save_future is not None and not has_failed:
            self._wait_for_saving()
        self.reader.close()
        self.writer.close(flush=not has_failed, keep_slots=has_failed)

    def __del__(self) -> None:
        """Leave what wasn't closed to the agent: nothing here may wait for storage."""


class _Optimizers:
    """torchtitan's optimizers, where a checkpoint lacks what some parameters hadn't got yet."""

    def __init__(self, optimizers: Any) -> None:
        self._optimizers = optimizers
        self._wanted: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        self._wanted = self._optimizers.state_dict()
        return dict(self._wanted)

    def is_optional(self, key: str) -> bool:
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        lacking = self._wanted.keys() - state_dict.keys()
        if lacking:
            self._bear(lacking, state_dict)
        self._optimizers.load_state_dict(state_dict)

    def _bear(self, lacking: Set[str], loaded: dict[str, Any]) -> None:
        """Keep options that the checkpoint hasn't, and leave parameters without state so."""
        names = {
            name
            for optimizer in self._optimizers.optimizers
            for group in optimizer.param_groups
            for name in group["param_names"]
        }
        saved = {_parameter(key, names) for key in loaded}
        kept, stateless = set(), set()
        for key in sorted(lacking):
            kind, parameter = _parameter(key, names)
            is_partial = kind == "state" and (kind, parameter) in saved
            if is_partial or ("param_groups", parameter) not in saved:
                raise ConfigError(
                    f"the checkpoint has no {key} of the optimizer: it was saved without optimizer "
                    f"(last_save_model_only=True), or with another one"
                )
            if kind == "state":
                stateless.add(parameter)
            else:
                kept.add(key.rpartition(".")[2])
                loaded[key] = self._wanted[key]
        if stateless:
            log.info(
                "%s had no optimizer state yet when the checkpoint was saved: they begin without",
                ", ".join(sorted(stateless)),
            )
        if kept:
            log.info("the checkpoint lacks the optimizer's %s: kept", ", ".join(sorted(kept)))


def _parameter(key: str, names: Set[str]) -> tuple[str, str]:
    """Return what kind of entry a key names, and of which parameter."""
    kind, _, rest = key.partition(".")
    while rest and rest not in names:
        rest = rest.rpartition(".")[0]
    return kind, rest


__all__ = ["MemoryCheckpointManager"]
