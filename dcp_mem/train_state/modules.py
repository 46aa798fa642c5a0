"""Keys of a model's state dict that its `load_state_dict` doesn't take.

Quantised layers have such keys: scales beside the weight, which the layer makes by itself. Torch's
`load_state_dict(strict=True)` refuses the model's own state then.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from dcp_mem.common.log import log
from dcp_mem.planning.entries import first_of


class UntakenKeys:
    """Looks for such keys at the first save of a structure, and at each load."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looked_at: frozenset[str] = frozenset()

    def name_lost(self, state: dict[str, Any]) -> None:
        """Name, once per structure, keys with values that no load could restore."""
        if state.keys() == self._looked_at:
            return
        self._looked_at = frozenset(state)
        lost = [key for key in _untaken(self._model) if not _is_live(self._model, key)]
        if lost:
            log.warning(
                "load_state_dict of the model doesn't take %s, which its state_dict has: a restore "
                "leaves these as the model makes them",
                first_of(lost),
            )

    def load(self, state: dict[str, Any]) -> None:
        """Load a model's state; untaken keys were loaded in place, where that can be done."""
        loaded = dict(state)  # torch takes keys out
        result = set_model_state_dict(self._model, loaded, options=StateDictOptions(strict=False))
        if result.missing_keys:
            raise RuntimeError(
                f"the model's load_state_dict wants {first_of(result.missing_keys)}, which the "
                "loaded state lacks"
            )
        if not result.unexpected_keys:
            return
        now = self._model.state_dict()
        kept = [key for key in result.unexpected_keys if not _is_same(now.get(key), state.get(key))]
        if kept:
            log.warning(
                "load_state_dict of the model doesn't take %s: these stay as the model made them",
                first_of(kept),
            )


def _untaken(model: nn.Module) -> list[str]:
    """Return the keys of modules' own states that they don't take back."""
    found: list[str] = []
    for name, module in model.named_modules():
        # A class with rules of its own may refuse to be asked so: nobody can tell then.
        with suppress(Exception):
            found += [f"{name}.{key}" if name else key for key in _untaken_here(module)]
    return found


def _untaken_here(module: nn.Module) -> list[str]:
    own: dict[str, Any] = {}
    module._save_to_state_dict(own, "", keep_vars=True)
    for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        own.pop(key, None)
    own.pop("_extra_state", None)
    unexpected: list[str] = []
    if own:
        module._load_from_state_dict(own, "", {}, True, [], unexpected, [])
    return unexpected


def _is_live(model: nn.Module, key: str) -> bool:
    """Tell whether a value is a tensor of the model's, into which a load can write."""
    one, other = (model.state_dict().get(key) for _ in range(2))
    return _is_same(one, other)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one is other or (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
        and one.shape == other.shape
    )
