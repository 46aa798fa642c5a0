"""Choose the writer or the reader of DCP calls that name only a path.

`dcp.save`, `dcp.async_save` and `dcp.load` ask torch's `_storage_setup`. `install` puts a function
in its place that asks a `Choose` first. `dcp.async_save` of newer torches decides who stages before
it asks, so a function in its place hands it the writer. `torch.multiprocessing.start_processes`,
which is public, gets a function that runs what it is given in a served process. Nothing else of
torch is replaced.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from dcp_mem.comm.bridge import SWITCH, torch_plans
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ConfigError


@value_class
class Choice:
    """The storage that a DCP call uses, and the checkpoint's name there."""

    storage: StorageWriter | StorageReader
    checkpoint_id: str


Choose = Callable[[Any, bool], Choice | None]
"""Takes a checkpoint id, and whether it is to be loaded; None leaves the call to torch."""


ServeRanks = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes what processes are to run; returns what serves them first."""


@value_class
class _Replaced:
    module: ModuleType
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


def install(choose: Choose, serve_ranks: ServeRanks) -> Callable[[], bool]:
    """Have DCP ask a function what calls without a writer or reader go through.

    `choose`: asked in the caller's thread, or in that of an asynchronous save. Returns puts torch's
    functions back. It returns False where somebody else has replaced one of ours meanwhile: that
    one stays in place, and goes on asking. Raises ConfigError.
    """
    if torch_plans():
        raise ConfigError(
            f"dcp_mem.serve replaces functions of torch's, which {SWITCH}=1 forbids: unset it, or "
            "pass storage_writer= and storage_reader="
        )
    try:
        setups = (state_dict_saver._storage_setup, state_dict_loader._storage_setup)
    except AttributeError:
        raise ConfigError(
            "dcp_mem.serve doesn't know how this torch chooses a writer for a path: "
            "pass storage_writer= and storage_reader= instead"
        ) from None
    saving = _asking(setups[0], choose)
    loading = saving if setups[1] is setups[0] else _asking(setups[1], choose)
    begin = state_dict_saver.async_save
    staging = _handing_over(begin, choose)
    replaced = [
        _Replaced(state_dict_saver, "_storage_setup", setups[0], saving),
        _Replaced(state_dict_loader, "_storage_setup", setups[1], loading),
        _Replaced(state_dict_saver, "async_save", begin, staging),
    ]
    if dcp.async_save is begin:
        replaced.append(_Replaced(dcp, "async_save", begin, staging))
    starting = importlib.import_module("torch.multiprocessing.spawn")  # `spawn` is a function, too
    start = _starting_served(starting.start_processes, serve_ranks)
    replaced += [
        _Replaced(module, "start_processes", module.start_processes, start)
        for module in (starting, torch.multiprocessing)
        if module.start_processes is starting.start_processes
    ]
    for one in replaced:
        setattr(one.module, one.name, one.ours)
    return functools.partial(_put_back, replaced)


def _put_back(replaced: list[_Replaced]) -> bool:
    found = [one for one in replaced if getattr(one.module, one.name) is one.ours]
    for one in found:
        setattr(one.module, one.name, one.original)
    return len(found) == len(replaced)


def _asking(original: Callable[..., Any], choose: Choose) -> Callable[..., Any]:
    @functools.wraps(original)
    def chosen_setup(
        storage: StorageReader | StorageWriter | None,
        checkpoint_id: str | os.PathLike[str] | None,
        reader: bool = False,
    ) -> StorageReader | StorageWriter | None:
        choice = choose(checkpoint_id, reader) if not storage and checkpoint_id else None
        if choice is None:
            setup: StorageReader | StorageWriter | None = original(storage, checkpoint_id, reader)
            return setup
        choice.storage.reset(choice.checkpoint_id)
        return choice.storage

    return chosen_setup


def _handing_over(original: Callable[..., Any], choose: Choose) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin_with_writer(*positional: Any, **arguments: Any) -> Any:
        checkpoint_id = arguments.get("checkpoint_id")
        if checkpoint_id and not arguments.get("storage_writer"):
            choice = choose(checkpoint_id, False)
            if choice is not None:
                # Under the name that the writer knows: `reset` may come in another process.
                arguments["storage_writer"] = choice.storage
                arguments["checkpoint_id"] = choice.checkpoint_id
        return original(*positional, **arguments)

    return begin_with_writer


def _starting_served(original: Callable[..., Any], serve_ranks: ServeRanks) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_served(fn: Callable[..., Any], *positional: Any, **arguments: Any) -> Any:
        return original(serve_ranks(fn), *positional, **arguments)

    return start_served
