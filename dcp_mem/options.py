"""Every option of writers, readers, managers and followers: its type, what it does, its check.

`config.Settings` has the defaults of those that outlive the call. Who takes options takes them as
`**options: Unpack[…]` of a class below, decorated with `takes` of `common/arguments.py`; `settings`
checks them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import TypedDict, Unpack

from dcp_mem.config import (
    AgentKind,
    ExportOrder,
    OnFull,
    OnNonfinite,
    OnReplication,
    OnSlowStorage,
    Parity,
    Settings,
    job_name,
    memory_root_path,
    parity,
    parse_bytes,
    root_url,
    seconds_from,
    transport_point,
)
from dcp_mem.errors import ConfigError, kind_of
from dcp_mem.export import HuggingFaceExport, order_of
from dcp_mem.policy.persistence import Persist, persist_policy
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.policy.retention import Retention, retention, with_newest

if TYPE_CHECKING:
    import torch.distributed as dist

    from dcp_mem.planning.tensor_choice import TensorChoice

T = TypeVar("T")


class PlaceOptions(TypedDict, total=False):
    """Options of whatever finds a job's checkpoints.

    Attributes:
        memory_root: The memory root; default DCP_MEM_ROOT, else /dev/shm/dcp_mem-<uid>.
        job: Name of the job's memory directory; by default from path, else from TORCHELASTIC_RUN_ID
            or SLURM_JOB_ID.
        storage_options: Passed to fsspec as they are. They reach the agent over a pipe, and are
            never written down.
        transport: What moves bytes between nodes: "tcp"; "nixl" (RDMA, or the memory of one
            machine), or TCP where that doesn't work; "auto", which is nixl where both nodes have a
            card that does RDMA; or another package's. Default DCP_MEM_TRANSPORT, else "tcp". The
            same on all ranks.
    """

    memory_root: str | os.PathLike[str] | None
    job: str | None
    storage_options: Mapping[str, Any] | None
    transport: str | None


class SaveOptions(PlaceOptions, total=False):
    """Options of whatever saves.

    Attributes:
        persist: Which saves go to storage: True (the default), False, every_n_saves(n),
            every_n_steps(n) or every_seconds(seconds). The coordinator decides.
        replicas: Copies of each segment in other nodes' memory, made behind training; default
            DCP_MEM_REPLICAS, else 0. Where there are fewer other nodes, as many as there are.
        redundancy: parity(k) instead of replicas: parity over groups of k + 1 nodes, from which any
            one node of a group comes back, at 1/k of the memory of a copy.
        failure_domain: What fails together with this node (a rack, say), as a text or a callable
            that returns one; default DCP_MEM_FAILURE_DOMAIN, else the node alone. Copies go to
            other domains where there are any.
        on_replication: What a save does while an older checkpoint's copies are still under way:
            "wait" for them (the default), "skip" its own, or "cancel" them. The same on all ranks.
        keep_memory: Complete checkpoints that stay in memory: a number (default 2), or a policy of
            `keep_last`, `keep_best`, `any_of`. One more is staged beside them.
        keep_storage: Checkpoints that stay on storage: the same, where `keep_for` and `keep_every`
            may be among them; None, the default, keeps all. Applied after each commit, to what
            dcp_mem wrote under path; never to the newest checkpoint, nor to one that is being read.
        memory_limit: Bytes (or "64GiB") that the job may occupy on a node; default
            DCP_MEM_MEMORY_LIMIT, else what the tmpfs has room for; how many checkpoints stay is up
            to keep_memory.
        on_full: What a save does when memory is full: "wait" (the default) for the flush to free a
            slot, "skip" the save, or "raise" MemoryBudgetExceeded. The same on all ranks. Where no
            flush could free a slot, "wait" raises too.
        on_slow_storage: What happens where saves come faster than flushes: "newest" (the default)
            leaves out of storage what newer checkpoints overtake; with "all" none is left out, and
            a save waits for room within the memory budget (or does what on_full says). What storage
            refuses doesn't hold up saves.
        overwrite: False refuses a checkpoint id that is there already; default True.
        agent: "process" (the default), or "thread" for platforms that allow no second process and
            for file systems that live in one.
        upload_limit: Bytes (or "200MiB") per second that a node sends of this job; default
            DCP_MEM_UPLOAD_LIMIT, else no limit.
        on_nonfinite: "reject" marks a checkpoint with NaN or infinity in its tensors as not to be
            resumed from, as `CheckpointManager.reject` does; "warn" logs it, "ignore" (the default)
            doesn't look. Looked at behind training, beside the checksums.
        reuse_stored: What hasn't changed since the newest checkpoint on storage isn't sent again:
            storage copies it, as far as it can (S3, directories, Azure). False sends all of each
            checkpoint; default True.
        export: What is made of checkpoints for other programs, behind training and in the agent's
            free time: a `HuggingFaceExport`.
        storage_mode: Mode of the files that the agent makes in a directory on storage, as 0o640;
            directories get x where files get r. By default as this process's umask has it.
    """

    persist: bool | Persist
    replicas: int | None
    redundancy: Parity | None
    failure_domain: str | Callable[[], str] | None
    on_replication: OnReplication
    keep_memory: int | Retention
    keep_storage: int | Retention | None
    memory_limit: int | str | None
    on_full: OnFull
    on_slow_storage: OnSlowStorage
    overwrite: bool
    agent: AgentKind
    upload_limit: int | str | None
    on_nonfinite: OnNonfinite
    reuse_stored: bool
    export: HuggingFaceExport | None
    storage_mode: int | None


class FrozenOptions(TypedDict, total=False):
    """What a writer is told of a state.

    Attributes:
        frozen: Tensors that don't change from save to save: names or patterns ("model.base.*") of
            the flattened state dict, or a function of name and tensor. Checkpoints share one copy
            of them in memory, and on other nodes with `replicas`. Each save checks whether they
            still are as they were, and copies them again where they aren't. With parity it has no
            effect.
    """

    frozen: TensorChoice | None


class GroupOptions(TypedDict, total=False):
    """Options of whatever ranks do together.

    Attributes:
        process_group: The ranks that save or load together; by default those of the DCP call, else
            all ranks.
    """

    process_group: dist.ProcessGroup | None


class ReadOptions(TypedDict, total=False):
    """How checkpoints are read.

    Attributes:
        verify: Hold what is read, from wherever, against its checksums, where they have been made;
            default True.
        broadcast: Have storage give each byte once, instead of once for each node; nodes send each
            other what several of them need. Default False.
    """

    verify: bool
    broadcast: bool


class RecordOptions(TypedDict, total=False):
    """What a load leaves.

    Attributes:
        record: Leave a line about each load in `recoveries.jsonl`; default True.
    """

    record: bool


class WriterOptions(SaveOptions, FrozenOptions, GroupOptions, total=False):
    """Options of `MemoryStorageWriter`."""


class FollowOptions(PlaceOptions, ReadOptions, total=False):
    """Options of `follow`, beside its own."""


class ReaderOptions(FollowOptions, RecordOptions, GroupOptions, total=False):
    """Options of `MemoryStorageReader`."""


class ServeOptions(WriterOptions, ReadOptions, RecordOptions, total=False):
    """Options of `serve`."""


def of_kind(kind: type[T], options: Mapping[str, Any]) -> T:
    """Return those options that a kind has."""
    return cast("T", {name: options[name] for name in options if name in kind.__annotations__})


def settings(path: str | os.PathLike[str] | None, **options: Unpack[SaveOptions]) -> Settings:
    """Check a job's root and options, and take what isn't given from the environment.

    Raises ConfigError.
    """
    given: dict[str, Any] = dict(options)
    url = root_url(path)
    made = {name: check(given.pop(name, DEFAULTS[name])) for name, check in _CHECKS.items()}
    persist = given.pop("persist", True)
    job, replicas, redundancy = (given.pop(one, None) for one in ("job", "replicas", "redundancy"))
    found = Settings(
        url=url,
        job=job_name(job, url),
        persist=persist_policy(persist if url is not None else False),
        redundancy=_redundancy(replicas, redundancy),
        replication_timeout=seconds_from("DCP_MEM_REPLICATION_TIMEOUT", 120.0),
        **made,
        **given,
    )
    if found.storage_mode is not None and found.agent != "process":
        raise ConfigError("storage_mode= needs agent='process': a thread has its process's umask")
    if found.export is not None:
        _refuse_unexportable(url, found.agent, found.export)
    return found


def _bytes(name: str, given: int | str | None) -> int | None:
    """Return the bytes of an argument, else of its environment variable, else None."""
    limit = given if given is not None else os.environ.get(f"DCP_MEM_{name.upper()}") or None
    return None if limit is None else parse_bytes(limit, name)


def _failure_domain(given: str | Callable[[], str] | None) -> str:
    domain = given() if callable(given) else given
    if domain is None:
        domain = os.environ.get("DCP_MEM_FAILURE_DOMAIN", "")
    if not isinstance(domain, str):
        raise ConfigError(
            f"failure_domain={domain!r}: give a text, such as the name of the rack, or a callable "
            "that returns one"
        )
    return domain


def _transport(given: str | None) -> str:
    choice = given if given is not None else os.environ.get("DCP_MEM_TRANSPORT") or "tcp"
    # Its name while gloo carried the bytes.
    return transport_point("tcp" if choice == "gloo" else choice).name


def _keep_memory(given: int | Retention) -> Retention:
    """Refuse a policy that keeps ever more checkpoints; let others also keep the newest."""
    policy = retention(given, "keep_memory")
    if policy.most is None:
        raise ConfigError(
            f"keep_memory={policy}: memory would fill up with what nothing bounds; give "
            "that to keep_storage, and a number, keep_last(n) or keep_best(metric, n) here"
        )
    return with_newest(policy)


def _keep_storage(given: int | Retention | None) -> Retention | None:
    return None if given is None else retention(given, "keep_storage")


def _storage_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"storage_options is {kind_of(given)}: give a mapping, as fsspec takes it"
        )
    return dict(given or {})


def _storage_mode(mode: int | None) -> int | None:
    if mode is not None and (type(mode) is not int or mode & 0o600 != 0o600 or mode & ~0o666):
        given = oct(mode) if type(mode) is int else repr(mode)
        raise ConfigError(f"storage_mode={given}: give a mode of files, as 0o640 or 0o664")
    return mode


def _export(given: HuggingFaceExport | None) -> ExportOrder | None:
    if given is None:
        return None
    if not isinstance(given, HuggingFaceExport):
        raise ConfigError(f"export={given!r}: give a dcp_mem.HuggingFaceExport")
    return order_of(given)


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "memory_root": memory_root_path,
    "keep_memory": _keep_memory,
    "keep_storage": _keep_storage,
    "memory_limit": functools.partial(_bytes, "memory_limit"),
    "upload_limit": functools.partial(_bytes, "upload_limit"),
    "failure_domain": _failure_domain,
    "transport": _transport,
    "storage_options": _storage_options,
    "storage_mode": _storage_mode,
    "export": _export,
}
"""What makes a setting of an option, or of the environment where the option is None."""
DEFAULTS: dict[str, Any] = {
    **{one.name: one.default for one in fields(Settings) if one.default is not MISSING},
    **dict.fromkeys(_CHECKS),
    "persist": True,
    "keep_memory": 2,
    "verify": True,
    "broadcast": False,
    "record": True,
}
"""As `help` shows them; None for all others."""


def _refuse_unexportable(url: str | None, agent: str, export: ExportOrder) -> None:
    """Refuse an export that nobody would make: a process beside the agent makes it."""
    if agent != "process":
        raise ConfigError("export= needs agent='process': a process beside the agent exports")
    if url is None:
        raise ConfigError(
            "export= needs a path: give one, and persist=False with of='complete' for checkpoints "
            "that are to stay in memory"
        )
    if url.rstrip("/") == export.to.rstrip("/"):
        raise ConfigError(f"export= to {export.to}, the job's own root: give another directory")


def _redundancy(replicas: int | None, redundancy: object) -> Redundancy:
    """Return the parity, or the copies: of the argument, else of $DCP_MEM_REPLICAS, else none."""
    if redundancy is not None:
        if not isinstance(redundancy, Parity) or replicas:
            raise ConfigError(
                f"redundancy={redundancy!r}: give dcp_mem.parity(k), and no replicas= beside it"
            )
        return Redundancy(parity=parity(redundancy.k).k)
    if replicas is None:
        text = os.environ.get("DCP_MEM_REPLICAS") or "0"
        replicas = int(text) if text.isdecimal() else -1
    if type(replicas) is not int or replicas < 0:
        raise ConfigError(
            f"replicas={replicas!r} (or DCP_MEM_REPLICAS): give a whole number of copies on other "
            "nodes, 0 for none"
        )
    return Redundancy(copies=replicas)
