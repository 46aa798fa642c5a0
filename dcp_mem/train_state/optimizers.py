"""Optimizers' state by the names of parameters, and the state that fresh optimizers lack.

What is saved of optimizers: "state" and "forms" (of state that is no tensor), by name of the
parameter, and "groups": a record for each
parameter group, under a key made of its parameters' names, so that ranks with groups of their own
have records of their own. A load takes all records, and finds each parameter's by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from dcp_mem.common.log import log
from dcp_mem.errors import ConfigError, DcpMemError
from dcp_mem.planning.entries import SavedEntry, first_of
from dcp_mem.planning.own_keys import is_fsdp_1
from dcp_mem.train_state.values import (
    Tensors,
    as_tuple,
    is_fixed,
    on_cpu,
    put_together,
    taken_apart,
)


class Optimizers:
    """The optimizers of a model, whose parameters have names."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._stateless: set[Optimizer] = set()
        self._parameters: dict[str, torch.Tensor] = {}  # as of the last `saved`, like the names
        self._names: list[list[str]] = []
        self._keys: list[set[str]] = []  # of the state in each group
        self._held: dict[tuple[str, str], Tensors] = {}  # tensors in state that is no tensor

    @property
    def are_unnamed(self) -> bool:
        """Whether the parameters' names aren't known yet: nothing has been saved or loaded."""
        return bool(self._optimizers) and not self._names

    def state_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return torch's state dicts of the model and of the optimizers."""
        try:
            return get_state_dict(self._model, self._optimizers)
        except KeyError:
            of_model = set(map(id, self._model.parameters()))
            strangers = [
                str(tuple(one.shape))
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for one in group["params"]
                if id(one) not in of_model
            ]
            if not strangers:
                raise
            raise ConfigError(
                f"the optimizer has parameters that the model lacks, of shape "
                f"{first_of(strangers)}: make it after the model is sharded, and give TrainState a "
                'module that has them all, such as nn.ModuleDict({"model": model, "head": head})'
            ) from None

    @contextmanager
    def having_state(self) -> Iterator[list[bool]]:
        """Give fresh optimizers state in the block; yield of each parameter group whether it is."""
        fresh = [not one.state for one in self._optimizers for _ in one.param_groups]
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(_with_state(optimizer, self._stateless))
            yield fresh

    def saved(self, found: Mapping[str, Any], is_fresh: Sequence[bool]) -> dict[str, Any]:
        """Return what is saved, of torch's state dict of the optimizers; no tensor is copied."""
        for optimizer in self._optimizers:
            if any(is_fixed(one) for group in optimizer.param_groups for one in group["params"]):
                refuse_needing_closure(optimizer)
        state, groups = found.get("state", {}), found.get("param_groups", [])
        self._parameters = self._named_by(groups)
        self._names = [list(group["params"]) for group in groups]
        records = [
            _record(group, state, fresh) for group, fresh in zip(groups, is_fresh, strict=True)
        ]
        self._keys = [set(record["keys"]) for record in records]
        tensors, forms = self._taken_apart(state)
        return {
            "state": tensors,
            "forms": forms,
            "groups": {
                _key(index, record["params"]): as_tuple(record)
                for index, record in enumerate(records)
            },
        }

    def _taken_apart(
        self, state: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors of the state, and the forms of what is no tensor."""
        tensors: dict[str, dict[str, Any]] = {}
        forms: dict[str, dict[str, Any]] = {}
        self._held = {}
        for name, of in state.items():
            tensors[name] = {key: one for key, one in of.items() if isinstance(one, torch.Tensor)}
            if len(tensors[name]) == len(of):
                continue
            forms[name] = {}
            for key, one in of.items():
                if key not in tensors[name]:
                    form, held = taken_apart(one)
                    forms[name][key] = as_tuple(form)
                    if held is not None:
                        tensors[name][key] = self._held[name, str(key)] = held
        return tensors, forms

    def room_for(self, entry: SavedEntry) -> Any:
        """Return room for an entry of what was saved, as `MakesRoom` has it."""
        kind, name, *_ = entry.path
        if kind == "groups":
            return ()
        parameter = self._parameters.get(str(name))
        if parameter is None:
            return NotImplemented  # another rank's, or nobody's: the ranks find out together
        if entry.size is None:
            return ()
        if entry.size == parameter.shape and entry.path[-1] != "step":  # which stays on the CPU
            return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
        return torch.empty(entry.size, dtype=entry.dtype)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore state and options that were saved, each parameter's by its name."""
        if not self._optimizers:
            return
        if not saved["groups"]:
            raise DcpMemError(
                "the checkpoint has no optimizers: strict=False keeps the state of those here"
            )
        names = self._names
        keys = [_key(index, of) for index, of in enumerate(names)]
        own = {key: record for key, (record,) in saved["groups"].items() if key in keys}
        records = [record for (record,) in saved["groups"].values()]
        record_of = {
            name: record for record in [*records, *own.values()] for name in record["params"]
        }
        state = self._put_together(saved["state"], saved.get("forms", {}))
        _refuse_unloaded(state, record_of, names)
        _refuse_partial(state, own.values())
        for of, wanted in zip(names, self._keys, strict=True):
            _refuse_other_kind(state, of, wanted)
        _name_new(record_of, names)
        number = 0
        for optimizer in self._optimizers:
            groups = names[number : number + len(optimizer.param_groups)]
            options = [
                _options(group, _origins(own.get(key), of, record_of))
                for key, group, of in zip(
                    keys[number : number + len(groups)], optimizer.param_groups, groups, strict=True
                )
            ]
            number += len(groups)
            self._restore_one(optimizer, groups, options, state)
            before = [record_of[one]["fresh"] for of in groups for one in of if one in record_of]
            if before and all(before):
                optimizer.state.clear()

    def _put_together(
        self, tensors: Mapping[str, Mapping[str, Any]], forms: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter that has any."""
        state = {
            name: {key: one for key, one in of.items() if key not in forms.get(name, ())}
            for name, of in tensors.items()
        }
        for name, of in forms.items():
            for key, (form,) in of.items():
                what = f"the optimizer's state {key} of {name}"
                found = tensors.get(name, {}).get(key)
                known = self._held.get((name, str(key)))
                state.setdefault(name, {})[key] = put_together(form, found, known, what)
        return {name: of for name, of in state.items() if of}

    def _restore_one(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        options: Sequence[dict[str, Any]],
        state: Mapping[str, Any],
    ) -> None:
        if is_fsdp_1(self._model):  # whose flat parameters have several names
            groups = [{**of, "params": list(one)} for of, one in zip(options, names, strict=True)]
            own = {name: state[name] for one in names for name in one if name in state}
            with _without_empty_step(optimizer):
                set_optimizer_state_dict(
                    self._model,
                    optimizer,
                    {"state": own, "param_groups": groups},
                    options=StateDictOptions(strict=False),
                )
            return
        numbers = {name: number for number, name in enumerate(n for one in names for n in one)}
        optimizer.load_state_dict(
            {
                "state": {number: state[name] for name, number in numbers.items() if name in state},
                "param_groups": [
                    {**of, "params": [numbers[name] for name in one]}
                    for of, one in zip(options, names, strict=True)
                ],
            }
        )

    def _named_by(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if is_fsdp_1(self._model):
            return {}
        of_optimizers = (group for one in self._optimizers for group in one.param_groups)
        return {
            name: parameter
            for group, own in zip(groups, of_optimizers, strict=True)
            for name, parameter in zip(group["params"], own["params"], strict=True)
        }


# -- what is saved --------------------------------------------------------------------------------


def refuse_needing_closure(optimizer: Optimizer) -> None:
    """Raise for LBFGS: a fresh one can't be given sharded state to load."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{type(optimizer).__name__}: its state of sharded parameters can't be restored, since "
            f"a fresh one has none to load into: take another optimizer, or don't shard"
        )


def _record(
    group: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]], is_fresh: bool
) -> dict[str, Any]:
    names = list(group["params"])
    with_state = [state[name] for name in names if state.get(name)]
    return {
        "params": names,
        "options": {key: on_cpu(one) for key, one in group.items() if key != "params"},
        "stateless": [name for name in names if not state.get(name)] if with_state else True,
        "keys": sorted({str(key) for one in with_state for key in one}),
        "fresh": is_fresh,
    }


def _key(index: int, names: Sequence[str]) -> str:
    text = "\0".join(names) or f"no parameters, group {index}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# -- what is restored -----------------------------------------------------------------------------


def _refuse_unloaded(
    state: Mapping[str, Mapping[str, Any]],
    record_of: Mapping[str, Mapping[str, Any]],
    names: Sequence[Sequence[str]],
) -> None:
    """Raise where a parameter had state that wasn't loaded, as torch's own `dcp.load` does it."""
    for name in (name for group in names for name in group if name in record_of):
        record = record_of[name]
        if record["stateless"] is True or name in state or name in record["stateless"]:
            continue
        raise DcpMemError(
            f"the optimizer's state of {name} is in the checkpoint and wasn't loaded, as a fresh "
            "optimizer has none to load into: load with dcp_mem.load"
        )


def _refuse_partial(
    state: Mapping[str, Mapping[str, Any]], records: Iterable[Mapping[str, Any]]
) -> None:
    """Raise where all parameters of a group are here, and not all that their state had."""
    for record in records:
        loaded = {str(key) for name in record["params"] for key in state.get(name, ())}
        if loaded and (lost := sorted(set(record["keys"]) - loaded)):
            raise DcpMemError(
                f"the optimizer's state {', '.join(lost)} of {first_of(record['params'])} is in "
                "the checkpoint and wasn't loaded: load with dcp_mem.load"
            )


def _refuse_other_kind(
    state: Mapping[str, Mapping[str, Any]], names: Sequence[str], wanted: set[str]
) -> None:
    """Raise where a group's state is another optimizer's; name what it lacks else."""
    loaded = {str(key) for name in names for key in state.get(name, ())}
    lacking = sorted(wanted - loaded)
    if not loaded or not lacking:
        return
    if loaded.isdisjoint(wanted):
        raise DcpMemError(
            f"the checkpoint is of another kind of optimizer: it has {', '.join(sorted(loaded))} "
            f"of {first_of(names)}, where {', '.join(lacking)} is wanted"
        )
    log.warning(
        "the checkpoint lacks the optimizer's state %s of %s, which goes on without",
        ", ".join(lacking),
        first_of(names),
    )


def _name_new(record_of: Mapping[str, Mapping[str, Any]], names: Sequence[Sequence[str]]) -> None:
    new = [name for group in names for name in group if name not in record_of]
    if new:
        log.warning(
            "parameters that the saved optimizers didn't have begin without state: %s",
            first_of(new),
        )


def _origins(
    own: Mapping[str, Any] | None,
    names: Sequence[str],
    record_of: Mapping[str, Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return the records of a group: its own, else those of its parameters."""
    if own is not None:
        return [own]
    return list({id(record_of[one]): record_of[one] for one in names if one in record_of}.values())


def _options(group: Mapping[str, Any], origins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a group's options: those saved for its parameters, else its own."""
    own = {key: value for key, value in group.items() if key != "params"}
    if not origins:
        return own
    saved: dict[str, Any] = {}
    differing = set()
    for record in origins:
        for key, value in record["options"].items():
            if not _are_equal(saved.setdefault(key, value), value):
                differing.add(key)
    kept = sorted(key for key in own.keys() - saved.keys())
    if kept:
        log.warning(
            "options of a parameter group that the checkpoint lacks keep their values: %s",
            ", ".join(f"{key}={own[key]!r}" for key in kept),
        )
    if differing & own.keys():
        log.warning(
            "parameters of one group were in several with different options, which keep their "
            "values: %s",
            ", ".join(f"{key}={own[key]!r}" for key in sorted(differing & own.keys())),
        )
    taken = {
        key: _as_kind_of(own.get(key), value)
        for key, value in saved.items()
        if not (key in differing and key in own)
    }
    return {**own, **taken}


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _as_kind_of(own: Any, saved: Any) -> Any:
    """Return a saved option as a number or a tensor, whichever the optimizer has now."""
    if isinstance(own, torch.Tensor) and isinstance(saved, (int, float, torch.Tensor)):
        return torch.as_tensor(saved).to(own)
    if isinstance(own, (int, float)) and isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return saved.item()
    return saved


# -- fresh optimizers -----------------------------------------------------------------------------


@contextmanager
def _with_state(optimizer: Optimizer, stateless: set[Optimizer]) -> Iterator[None]:
    """Give a fresh optimizer the state that a step with gradients of 0 makes; then clear it again.

    Parameters, gradients, options of the groups and schedulers stay as they are. Optimizers known
    to make no state are in `stateless`; this one is added if it makes none.
    """
    if optimizer.state:
        yield
        return
    if optimizer not in stateless:
        try:
            _take_zero_step(optimizer)
        except Exception as error:  # LBFGS wants a closure, SparseAdam sparse gradients
            optimizer.state.clear()
            log.debug("no state can be made for a fresh %s: %s", type(optimizer).__name__, error)
    if not optimizer.state:
        stateless.add(optimizer)
    try:
        with _without_empty_step(optimizer):
            yield
    finally:
        optimizer.state.clear()


@torch.no_grad()
def _take_zero_step(optimizer: Optimizer) -> None:
    """Take a step with gradients and rate 0, which makes the state and changes nothing else.

    The parameters are copied before the step and restored after it: some optimizers change their
    bits all the same.
    """
    parameters = _trained(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    values = [parameter.detach().clone() for parameter in parameters]
    options = [dict(group) for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        # The class's method: schedulers count calls of the object's.
        type(optimizer).step(optimizer, closure=None)
    finally:
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
        for group, known in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(known)


@contextmanager
def _without_empty_step(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer without state a gradient, so that torch takes no empty step for it."""
    parameters = _trained(optimizer)
    if (
        optimizer.state
        or not parameters
        or any(parameter.grad is not None for parameter in parameters)
    ):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
