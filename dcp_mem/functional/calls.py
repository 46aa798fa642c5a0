"""What saves and loads share: how errors are raised, and which options torch's functions have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ParamSpec, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from dcp_mem.comm.bridge.errors import cause_of
from dcp_mem.errors import ConfigError, kind_of

P = ParamSpec("P")
T = TypeVar("T")


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


def raising_cause(act: Callable[P, T], *args: P.args, **call: P.kwargs) -> T:
    """Call `save` or `load`, and raise dcp_mem's errors as they are: no CheckpointException."""
    try:
        return act(*args, **call)
    except CheckpointException as error:
        cause, error.__cause__ = error.__cause__, None  # not in a circle
        if cause is not None:
            raise cause from cause.__cause__
        if call.get("no_dist"):  # for DCP, this is rank 0 then
            raise next(iter(error.failures.values()))[0] from error
        group: Any = call.get("process_group")
        raise cause_of(error, group, f"the {act.__name__}") from error


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
