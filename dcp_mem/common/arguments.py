"""What is wrong in a call: names that aren't known, values without a name, values of another kind.

What users call is decorated with `takes`.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from typing_extensions import TypedDict

from dcp_mem.errors import ConfigError, kind_of

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, object], None]

_ROOT, _KEEP = ("path", "root"), ("keep_storage", "keep_memory")
_INTERVAL, _PERSIST = ("save_interval_steps",), ("persist",)
_NEIGHBOURS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("checkpoint_dir", "ckpt_dir", "dir", "directory", "dirpath"), _ROOT),
    **dict.fromkeys(("folder", "output_dir", "path", "root", "root_dir", "save_dir", "url"), _ROOT),
    **dict.fromkeys(("keep_latest_k", "keep_n", "max_checkpoints", "max_to_keep"), _KEEP),
    **dict.fromkeys(("monitor", "num_to_keep", "save_top_k", "save_total_limit"), _KEEP),
    **dict.fromkeys(("every_n_train_steps", "interval", "save_every", "save_freq"), _INTERVAL),
    **dict.fromkeys(("checkpoint_interval", "save_interval", "save_steps", "step"), _INTERVAL),
    "every_n_epochs": _INTERVAL,
    **dict.fromkeys(("every_n_saves", "every_n_steps", "every_seconds"), _PERSIST),
    **dict.fromkeys(("flush", "persistent_time_interval", "to_storage"), _PERSIST),
    **dict.fromkeys(("async_mode", "asynchronous", "is_async", "use_async"), ("async_save",)),
    **dict.fromkeys(("enable_async_checkpointing", "async_checkpointing"), ("async_save",)),
    **dict.fromkeys(("copies", "num_replicas", "replication_factor"), ("replicas",)),
    **dict.fromkeys(("credentials", "fsspec_kwargs", "key", "secret"), ("storage_options",)),
    **dict.fromkeys(("name", "run", "run_id", "run_name"), ("job",)),
    **dict.fromkeys(("group", "pg", "device_mesh"), ("process_group",)),
    **dict.fromkeys(("checkpoint", "id", "name", "tag"), ("checkpoint_id",)),
    "force": ("force_persist", "overwrite"),
    "reader": ("storage_reader",),
    "writer": ("storage_writer",),
    "logger": ("trackers",),
    "lr_scheduler": ("scheduler",),
    "optim": ("optimizer",),
}
"""What is called otherwise by other checkpoint managers, or by a guess."""
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("broadcast", "record", "verify"), "MemoryStorageReader"),
    **dict.fromkeys(("async_save", "compare_replicas", "crash_loop_steps"), "CheckpointManager"),
    **dict.fromkeys(("on_crash_loop", "on_error", "preemption"), "CheckpointManager"),
    **dict.fromkeys(("preemption_deadline", "save_interval_steps"), "CheckpointManager"),
    **dict.fromkeys(("keep_memory", "keep_storage", "memory_limit"), "MemoryStorageWriter"),
    **dict.fromkeys(("persist", "replicas", "redundancy", "frozen"), "MemoryStorageWriter"),
    "trackers": "CheckpointManager",
    "skip": "dcp_mem.load",
    "weights_only": "dcp_mem.load",
}
"""Who takes an option that was given to somebody else."""
_NOT_NEEDED: Mapping[str, str] = {
    **dict.fromkeys(
        ("cache_staged_state_dict", "per_thread_copy_ahead", "single_file_per_rank", "sync_files"),
        "leave it out, each rank's file is staged in memory and synced when it is flushed",
    ),
    "thread_count": "leave it out, copies take the cores that the process may use",
    "timeout": "set DCP_MEM_TIMEOUT, the seconds that ranks wait for each other",
}


class UnknownOption(ConfigError, TypeError):
    """A call has an option, or a value without a name, that isn't taken; the text says which is."""


def takes(kind: type[Any] | None = None, defaults: Mapping[str, Any] = {}) -> Callable[[F], F]:
    """Have a function, or a class's `__init__`, refuse what it doesn't take, and show what it does.

    `kind`: a TypedDict of its `**options`, which `help`, and completion in notebooks, show like
    parameters of the function itself. Switches, seconds, choices and groups are checked by type.
    """

    def decorate(decorated: F) -> F:
        function = vars(decorated)["__init__"] if isinstance(decorated, type) else decorated
        signature = inspect.signature(function)
        own = {
            one.name: one
            for one in signature.parameters.values()
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        }
        known = own if kind is None else {**own, **_parameters(kind, defaults)}
        kinds = {name: (str(one.annotation), function.__module__) for name, one in own.items()}
        kinds |= {} if kind is None else _annotations(kind)
        checks = {name: check for name, of in kinds.items() if (check := _check(*of)) is not None}
        unnamed = [one.name for one in own.values() if one.kind is not one.KEYWORD_ONLY]
        is_method = unnamed[:1] == ["self"]
        checked_unnamed = [(at, one) for at, one in enumerate(unnamed) if one in checks]
        what = decorated.__qualname__

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            if len(args) > len(unnamed):
                raise UnknownOption(_too_many(what, unnamed[is_method:], known))
            for at, name in checked_unnamed:
                if at < len(args):
                    checks[name](name, args[at])
            for name, value in options.items():
                if name not in known:
                    raise UnknownOption(_unknown(what, name, known))
                if name in checks:
                    checks[name](name, value)
            return function(*args, **options)

        if kind is not None:
            shown = signature.replace(parameters=list(known.values()))
            checked.__signature__ = shown  # type: ignore[attr-defined]
            described = "\n".join(["Options:", *_descriptions(kind)])
            decorated.__doc__ = f"{inspect.cleandoc(decorated.__doc__ or '')}\n\n{described}"
            checked.__doc__ = decorated.__doc__
        if isinstance(decorated, type):
            decorated.__init__ = checked  # type: ignore[misc]
            return cast("F", decorated)
        return cast("F", checked)

    return decorate


# -- names -----------------------------------------------------------------------------------------


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    text = f"{what} has no option {name}="
    meant = [one for one in _NEIGHBOURS.get(name, ()) if one in known]
    meant = meant or get_close_matches(name, [one for one in known if one != "self"], 1)
    if meant:
        return f"{text}: did you mean {' or '.join(f'{one}=' for one in meant)}?"
    if name in _ELSEWHERE:
        return f"{text}: {_ELSEWHERE[name]} has it"
    if name in _NOT_NEEDED:
        return f"{text}: {_NOT_NEEDED[name]}"
    return f"{text}: help({what}) shows those it has"


def _too_many(what: str, unnamed: list[str], known: Mapping[str, Any]) -> str:
    named = [one for one in known if one not in (*unnamed, "self")]
    first = f"{' and '.join(unnamed)} without a name" if unnamed else "nothing without a name"
    others = f"{named[0]}=" + (f", {named[1]}=" if named[1:] else "") if named else ""
    return f"{what} takes {first}" + (f": name the others, as {others} …" if others else "")


# -- kinds -----------------------------------------------------------------------------------------


def one_of(name: str, value: object, choices: Any) -> None:
    """Refuse a value that isn't one of a `Literal`. Raises ConfigError."""
    known = get_args(choices)
    if value not in known:
        *first, last = map(repr, known)
        raise ConfigError(f"{name}={shown(value)}: choose {', '.join(first)} or {last}")


def shown(value: object) -> str:
    """Return a value for an error's text: its kind where that is shorter."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"<{kind_of(value)}>"


def _switch(name: str, value: object) -> None:
    try:
        is_switch = type(value).__name__ in ("bool", "bool_") or operator.index(value) in (0, 1)  # type: ignore[arg-type]
    except TypeError:
        is_switch = False
    if not is_switch:
        raise ConfigError(f"{name}={shown(value)}: give True or False")


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise ConfigError(f"{name}={shown(value)}: give a number of seconds")


def _group(name: str, value: object) -> None:
    import torch.distributed as dist

    if not isinstance(value, dist.ProcessGroup) and value != dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"{name}={shown(value)}: give what torch.distributed.new_group(…) returns, or "
            "mesh.get_group() of a device mesh"
        )


_KINDS: Mapping[str, Check] = {"bool": _switch, "float": _seconds, "dist.ProcessGroup": _group}


def _check(annotation: str, module: str) -> Check | None:
    """Return the check of what is annotated so in a module; None where there is none."""
    kinds = annotation.split(" | ")
    check = _KINDS.get(kinds[0])
    choices = getattr(sys.modules.get(module), annotation, None) if check is None else None
    if get_origin(choices) is Literal:
        return lambda name, value: one_of(name, value, choices)
    if check is None or kinds[1:] not in ([], ["None"]):
        return None
    return functools.partial(_unless_none, check) if kinds[1:] else check


def _unless_none(check: Check, name: str, value: object) -> None:
    if value is not None:
        check(name, value)


def _annotations(kind: type[Any]) -> dict[str, tuple[str, str]]:
    """Return each option's annotation, and the module in which it stands."""
    return {
        name: (
            getattr(annotation, "__forward_arg__", str(annotation)),
            getattr(annotation, "__forward_module__", None) or kind.__module__,
        )
        for name, annotation in kind.__annotations__.items()
    }


# -- what help shows -------------------------------------------------------------------------------


def _parameters(kind: type[Any], defaults: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    return {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation
        )
        for name, (annotation, _) in _annotations(kind).items()
    }


def _descriptions(kind: type[Any]) -> Iterator[str]:
    """Yield the lines that describe a kind's options."""
    for base in kind.__orig_bases__:
        if base is not TypedDict:
            yield from _descriptions(base)
    yield from inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].splitlines()
