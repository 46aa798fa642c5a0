"""What saves and loads share: how errors are raised, and which options torch's functions have."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import TypedDict

from dcp_mem.comm.bridge.errors import cause_of
from dcp_mem.errors import ConfigError, kind_of


class CallOptions(TypedDict, total=False):
    """What saves and loads of other rooms say of a call; as in `save` and `load`."""

    checkpoint_id: str | os.PathLike[str] | None
    process_group: dist.ProcessGroup | None
    no_dist: bool


@contextmanager
def raised_together(error: Exception | None) -> Iterator[None]:
    """Raise an error that DCP raises in the block on all ranks; as it is on this one.

    `error`: why this rank can't take part, which its planner raises; None for nothing.
    """
    try:
        yield
    except CheckpointException:
        if error is None:
            raise
    if error is not None:
        raise error


@contextmanager
def cause_raised(what: str, call: CallOptions) -> Iterator[None]:
    """Raise what a CheckpointException of the block tells of, in its place."""
    try:
        yield
    except CheckpointException as error:
        cause, error.__cause__ = error.__cause__, None  # not in a circle
        if cause is not None:
            raise cause from cause.__cause__
        if call.get("no_dist"):  # for DCP, this is rank 0 then
            raise next(iter(error.failures.values()))[0] from error
        raise cause_of(error, call.get("process_group"), what) from error


def refuse_other_kind(argument: str, given: object, base: type, method: str, example: str) -> None:
    """Raise ConfigError where a writer or reader is a path, say, or a class."""
    if given is None or isinstance(given, base):
        return
    if isinstance(given, type) or not hasattr(given, method):
        what = repr(given) if isinstance(given, str) else kind_of(given)
        if isinstance(given, type):
            what = f"the class {given.__name__}"
        raise ConfigError(f"{argument} is {what}: give an object such as {example}")


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def accepted_by(function: Callable[..., Any], **options: tuple[Any, Any]) -> dict[str, Any]:
    """Return the options that this torch's function has, and their values.

    Raises ConfigError.
    """
    known = _parameters(function)
    for name, (value, default) in options.items():
        if name not in known and value != default:
            raise ConfigError(f"{name}={value} needs a newer torch")
    return {name: value for name, (value, _) in options.items() if name in known}
