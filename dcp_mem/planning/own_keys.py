"""Keys that a model's `state_dict` gives and its `load_state_dict` doesn't take, or the reverse.

Layers of quantised weights have such keys: what belongs to a weight stands beside it, and is no
parameter or buffer. What lies in tensors that the layer uses is loaded into these; all else can
only be held against what the model has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dcp_mem.common.log import log
from dcp_mem.planning.wrapper_tensors import has_memory

_EXTRA_STATE = "_extra_state"
_WRAPPERS = frozenset({"module", "_orig_mod"})
_NAMED = 3
_attributes: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""By model, the keys that are known to lead to an attribute."""


@contextmanager
def own_keys_given(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Keep from torch's `get_state_dict` the keys that are no attributes, on which it stumbles.

    The dict that is yielded has them afterwards.
    """
    apart: dict[str, Any] = {}

    def take_out(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        apart.update({key: state.pop(key) for key in _no_attributes(model, state)})

    if model not in _attributes:
        _attributes[model] = set()
        lost = _lost(model)
        if lost:
            log.warning(
                "the model's load_state_dict doesn't take %s: after a load they are as the model "
                "was built, and the log says so where the checkpoint had other values",
                _names(lost),
            )
    handle = model.register_state_dict_post_hook(take_out)
    try:
        yield apart
    finally:
        handle.remove()


@contextmanager
def own_keys_taken(model: nn.Module, loaded: Mapping[str, Any]) -> Iterator[None]:
    """Have a strict load take what the model's own `state_dict` gives, and ask for nothing more.

    The log names what stays as it was although the checkpoint has another value, or has none.
    """
    untaken: list[str] = []
    lacking: list[str] = []

    def forgive(_: nn.Module, keys: Any) -> None:
        if not keys.unexpected_keys and not keys.missing_keys:
            return
        # FSDP 1 would gather the whole model outside of torch's own calls.
        own = loaded if is_fsdp_1(model) else model.state_dict()
        given = {_plain(key) for key in own}
        untaken.extend(key for key in keys.unexpected_keys if _plain(key) in given)
        lacking.extend(key for key in keys.missing_keys if _plain(key) not in given)
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if key not in untaken]
        keys.missing_keys[:] = [key for key in keys.missing_keys if key not in lacking]

    handle = model.register_load_state_dict_post_hook(forgive)
    try:
        yield
    finally:
        handle.remove()
    if lacking:
        log.warning(
            "the model's state_dict leaves out %s, so no checkpoint has them: they stay as they "
            "are",
            _names(lacking),
        )
    if untaken and not is_fsdp_1(model):
        now = {_plain(key): value for key, value in model.state_dict().items()}
        differing = [key for key in untaken if not _is_same(loaded[key], now[_plain(key)])]
        if differing:
            log.warning(
                "the model's load_state_dict doesn't take %s: they stay as they are, although the "
                "checkpoint has other values; build the model as the run that saved did",
                _names(differing),
            )


def is_fsdp_1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _no_attributes(model: nn.Module, keys: Mapping[str, Any]) -> list[str]:
    known = _attributes[model]
    new = keys.keys() - known
    known.update(key for key in new if "." not in key or _is_attribute(model, key))
    return [key for key in keys if key in new and key not in known] if new else []


def _is_attribute(model: nn.Module, key: str) -> bool:
    found: Any = model
    for name in key.split("."):
        modifiers: Callable[[], dict[str, str]] = getattr(found, "_fqn_modifiers", dict)
        renamed = modifiers().get(name)  # as torch asks for it
        found = getattr(found, renamed, found) if renamed else found
        if name == _EXTRA_STATE:
            return True
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def _lost(model: nn.Module) -> list[str]:
    """Return the keys that torch's own loading of modules doesn't take, and no tensor in use has.

    Modules that load in a way of their own may take any key.
    """
    if is_fsdp_1(model):
        return []
    first = model.state_dict()
    known = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    known |= {key for key, _ in model.named_buffers(remove_duplicate=False)}
    modules = dict(model.named_modules(remove_duplicate=False))
    strange = [
        key
        for key in first
        if key not in known
        and not key.endswith(_EXTRA_STATE)
        and not any(_loads_by_itself(modules[owner]) for owner in _owners(key) if owner in modules)
    ]
    second = model.state_dict() if strange else {}
    return [key for key in strange if not _is_in_use(first[key], second[key])]


def _owners(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:number]) for number in range(len(parts)))


def _loads_by_itself(module: nn.Module) -> bool:
    kind = type(module)
    own = getattr(kind, "_load_from_state_dict", None)
    return (
        own is not getattr(nn.Module, "_load_from_state_dict", None)
        or kind.load_state_dict is not nn.Module.load_state_dict
        or bool(getattr(module, "_load_state_dict_pre_hooks", None))
    )


def _is_in_use(one: Any, again: Any) -> bool:
    one, again = _local(one), _local(again)
    return (
        isinstance(one, torch.Tensor)
        and isinstance(again, torch.Tensor)
        and has_memory(one)
        and has_memory(again)
        and one.data_ptr() == again.data_ptr()
    )


def _is_same(one: Any, other: Any) -> bool:
    if _is_in_use(one, other):
        return True
    one, other = _local(one), _local(other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # a class may compare as it likes
        return False


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _plain(key: str) -> str:
    """Return a key without what DDP and torch.compile put into it."""
    if "module" not in key and "_orig_mod" not in key:
        return key
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _names(keys: Sequence[str]) -> str:
    more = len(keys) - _NAMED
    return ", ".join(keys[:_NAMED]) + (f" and {more} more" if more > 0 else "")
