"""Every error that dcp_mem raises, by what the caller can do about it.

All of them derive from `DcpMemError`, have their arguments as attributes, and survive pickling: DCP
sends exceptions from rank to rank, and one that doesn't pickle would hang the others.

- Change the arguments or the machine: `ConfigError`, `MemoryRootRefused`, `MemoryUnavailable`,
  `JobInUse`, `CheckpointExists`.
- Save less, or give it more room: `MemoryBudgetExceeded`.
- Wait, or try again: `WaitTimeout`, `CheckpointInUse`, `StorageUnavailable`, `CredentialsExpired`.
- Mend storage or the network; training can go on: `StorageRefused`, `FlushFailed`,
  `ReplicationFailed`.
- Load another checkpoint: `NoRecoverableCheckpoint`, `CheckpointNotFound`, `NotOfOneSave`,
  `SegmentCorrupt`, `ManifestInvalid`, `SizeRefused`, `StorageKeyMissing`.
- Decide whether to trust a checkpoint: `UntrustedMetadata`, `UntrustedObject`.
- Look at another rank: `RankFailed`.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_MOST_LISTED = 10
"""Checkpoints that an error names."""
_MOST_ITEMS = 5
"""Items of a checkpoint that an error names."""
MARK = "_dcp_mem_"
"""Prefix of attributes that say whether all ranks raise an error; `comm/agreement.py` sets them."""
F = TypeVar("F", bound=Callable[..., Any])


class DcpMemError(Exception):
    """Base of everything that dcp_mem raises on purpose."""


# -- change the arguments or the machine ----------------------------------------------------------


class ConfigError(DcpMemError, ValueError):
    """An argument or an environment variable can't be used; the text says what to give instead."""


class MemoryRootRefused(DcpMemError, PermissionError):
    """The memory root isn't safe to use: it is someone else's, a symlink, or writable by others.

    Give another `memory_root=`, on a tmpfs and reached without symlinks.

    Args:
        path: The memory root.
        reason: Why it was refused.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"memory root {self.path} refused: {self.reason}. Give memory_root= (or DCP_MEM_ROOT) "
            "a directory of your own, "
            f"reached without symlinks, on a tmpfs."
        )


class MemoryUnavailable(DcpMemError, OSError):
    """There is no usable tmpfs for the memory root.

    Mount one there, or give another `memory_root=`.

    Args:
        path: The memory root.
        reason: Why it can't be used.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"memory root {self.path} can't be used: {self.reason}. Mount a tmpfs there "
            "(mount -t tmpfs -o size=…,huge=within_size tmpfs DIR), or give memory_root= a "
            "directory on one."
        )


class JobInUse(DcpMemError, BlockingIOError):
    """Another running process group saves under this job's name on this node.

    End that run, or give this one another `job=` or path.

    Args:
        job: The job.
        holder: The process that holds it.
    """

    def __init__(self, job: str, holder: str) -> None:
        super().__init__(job, holder)
        self.job, self.holder = job, holder

    def __str__(self) -> str:
        return (
            f"job {self.job!r} is in use by {self.holder}. End that run, or give this one another "
            "job= (or path). With dcp_mem.serve, have each program serve a directory of its own."
        )


class CheckpointExists(DcpMemError, FileExistsError):
    """With `overwrite=False`, a checkpoint of this name exists already.

    Choose another checkpoint id, delete the old checkpoint, or pass `overwrite=True`.

    Args:
        checkpoint: The checkpoint id.
        where: "memory", or the storage's URL.
    """

    def __init__(self, checkpoint: str, where: str) -> None:
        super().__init__(checkpoint, where)
        self.checkpoint, self.where = checkpoint, where

    def __str__(self) -> str:
        return (
            f"Checkpoint already exists: {self.checkpoint!r} exists already in {self.where} and "
            "overwrite=False: choose another checkpoint_id, delete the old one, or pass "
            "overwrite=True."
        )


# -- save less, or give it more room --------------------------------------------------------------


class MemoryBudgetExceeded(DcpMemError, MemoryError):
    """A checkpoint doesn't fit into the memory budget; no older one was harmed.

    Raise the limit, keep fewer checkpoints, save less often, or choose another `on_full=`; the text
    says which of these help.

    Args:
        needed_bytes: What the save needs on this node.
        limit_bytes: What it may use.
        what: What was to be stored.
    """

    def __init__(self, needed_bytes: int, limit_bytes: int, what: str) -> None:
        super().__init__(needed_bytes, limit_bytes, what)
        self.needed_bytes, self.limit_bytes, self.what = needed_bytes, limit_bytes, what

    def __str__(self) -> str:
        if self.needed_bytes <= self.limit_bytes:
            return (
                f"{self.what}. Storage takes them more slowly than they come: save or persist less "
                "often "
                "(persist=every_n_saves(n)), raise keep_memory=, or choose on_full='wait' or "
                "'skip'."
            )
        return (
            f"{self.what}: {gib(self.needed_bytes)} needed, {gib(self.limit_bytes)} allowed. Raise "
            "memory_limit or the "
            "tmpfs size, lower keep_memory=, or choose on_full='skip', or 'wait' where a flush "
            "will make room."
        )


# -- wait, or try again ---------------------------------------------------------------------------


class WaitTimeout(DcpMemError, TimeoutError):
    """The awaited state wasn't reached in time; the work goes on, and can be waited for again."""


class CheckpointInUse(DcpMemError, BlockingIOError):
    """A checkpoint that was to be deleted is being read.

    Try again when the reader is done, or pass `force=True`.

    Args:
        checkpoint: The checkpoint id.
        where: The storage's URL.
    """

    def __init__(self, checkpoint: str, where: str) -> None:
        super().__init__(checkpoint, where)
        self.checkpoint, self.where = checkpoint, where

    def __str__(self) -> str:
        return (
            f"somebody is reading checkpoint {self.checkpoint!r} in {self.where}: try again when "
            "that is done, or pass "
            f"force=True (a reader that was killed counts for a day)"
        )


class StorageUnavailable(DcpMemError, ConnectionError):
    """Storage didn't answer, or answered that it can't now; trying again later may help.

    The agent tries again by itself.

    Args:
        url: The storage.
        reason: What happened.
        retry_after: Seconds for which storage asked for no requests; 0.0 where it didn't say.
    """

    def __init__(self, url: str, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(url, reason)
        self.args = (url, reason, retry_after)
        self.url, self.reason, self.retry_after = url, reason, retry_after

    def __str__(self) -> str:
        return f"storage {self.url} is unavailable: {self.reason}"


class CredentialsExpired(StorageUnavailable):
    """Storage no longer accepts these credentials; the same request may succeed with new ones."""


# -- mend storage or the network; training can go on ----------------------------------------------


class StorageRefused(DcpMemError, PermissionError):
    """Storage said no: credentials, missing bucket, read-only, already there. Retrying won't help.

    Change what storage objects to, then try again.

    Args:
        url: The storage.
        reason: What it said.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"storage {self.url} refused: {self.reason}"


class StorageTaken(StorageRefused):
    """A newer run of the job has taken the storage; this one neither commits nor deletes there.

    Its checkpoints stay in memory. End one of the two runs; the one that starts last has the
    storage.

    Args:
        url: The storage.
        generation: The newer run's.
        holder: Who that is.
    """

    def __init__(self, url: str, generation: int, holder: str) -> None:
        reason = (
            f"a newer run has taken it (generation {generation}: {holder}). This run stays in "
            "memory. Give each run a root of its own, or end one of them. With dcp_mem.serve, have "
            "each program serve a directory of its own"
        )
        super().__init__(url, reason)
        self.args = (url, generation, holder)
        self.generation, self.holder = generation, holder


class FlushFailed(DcpMemError):
    """A checkpoint didn't become durable; it is still in memory unless the text says otherwise.

    Training can go on; the text says what to mend.

    Args:
        checkpoint: The checkpoint id.
        reason: What happened.
    """

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint!r} did not reach storage: {self.reason}"


class ReplicationFailed(DcpMemError):
    """A checkpoint didn't get its copies on other nodes.

    Its own nodes hold all of it unless the text says otherwise. Training can go on; the next
    checkpoint gets copies of its own.

    Args:
        checkpoint: The checkpoint id.
        reason: What happened.
    """

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint!r} was not replicated: {self.reason}"


# -- load another checkpoint ----------------------------------------------------------------------


class NoRecoverableCheckpoint(DcpMemError, FileNotFoundError):
    """No checkpoint could be proved whole, so there is none to load.

    Check that path, job and memory root are those of the writer, or start anew.

    Args:
        where: Where the checkpoints were looked for.
        reasons: A line for each candidate that was passed over, newest first.
    """

    def __init__(self, where: str, reasons: Sequence[str]) -> None:
        super().__init__(where, tuple(reasons))
        self.where, self.reasons = where, tuple(reasons)

    def __str__(self) -> str:
        nothing = (
            "\n  - nothing was found at all: path=, job= and memory_root= must be those that the "
            "writer was given"
        )
        passed = "".join(f"\n  - {reason}" for reason in self.reasons) or nothing
        return f"no recoverable checkpoint in {self.where}:{passed}"


class CheckpointNotFound(NoRecoverableCheckpoint):
    """The checkpoint that was asked for can't be loaded; choose one of `available`.

    Args:
        checkpoint: The checkpoint id.
        where: Where it was looked for.
        available: Names of the checkpoints that can be loaded, newest first.
        reasons: Why it can't be loaded.
    """

    def __init__(
        self, checkpoint: str, where: str, available: Sequence[str], reasons: Sequence[str]
    ) -> None:
        super().__init__(where, reasons)
        # Two attempts of a name may be there.
        self.checkpoint, self.available = checkpoint, tuple(dict.fromkeys(available))
        self.args = (checkpoint, where, self.available, tuple(reasons))

    def __str__(self) -> str:
        some = ", ".join(self.available[:_MOST_LISTED]) or "none"
        more = len(self.available) - _MOST_LISTED
        there = some + (f" and {more} more" if more > 0 else "")
        if not self.reasons:
            return f"no {self.checkpoint} in {self.where} (there are, newest first: {there})"
        passed = "".join(f"\n  - {reason}" for reason in self.reasons)
        return (
            f"checkpoint {self.checkpoint!r} can't be loaded from {self.where} (loadable, newest "
            f"first: {there}){passed}"
        )


_RANKS = 1 << 24
"""As `names.FROZEN`: a segment's number modulo this is its rank."""


class NotOfOneSave(DcpMemError):
    """A checkpoint turned out damaged while it was read, and an older one can't replace all of it.

    The state dict has values of the damaged one. Load into a new one, or without
    `allow_partial_load`.

    Args:
        name: The older checkpoint.
        lacking: What it doesn't have.
    """

    def __init__(self, name: str, lacking: Sequence[str]) -> None:
        super().__init__(name, tuple(lacking))
        self.name, self.lacking = name, tuple(lacking)

    def __str__(self) -> str:
        some, left = ", ".join(self.lacking[:_MOST_ITEMS]), len(self.lacking) - _MOST_ITEMS
        more = f" and {left} more" if left > 0 else ""
        return (
            f"{self.name} lacks {some}{more}, which may have been read of a checkpoint that turned "
            f"out to be damaged: the state dict isn't of one save. Load into a new one, or without "
            f"allow_partial_load"
        )


class SegmentCorrupt(DcpMemError):
    """Bytes that were read aren't those that were saved.

    A load goes on with another source, or with an older checkpoint, where there is one.

    Args:
        checkpoint: The checkpoint id.
        rank: The segment's number: the rank that saved it, with 2**24 added for the second segment.
        source: Where the bytes were read: "memory", a node, or the storage's URL.
        detail: What is wrong.
    """

    def __init__(self, checkpoint: str, rank: int, source: str, detail: str) -> None:
        super().__init__(checkpoint, rank, source, detail)
        self.checkpoint, self.rank, self.source, self.detail = checkpoint, rank, source, detail
        self.may_pass = False  # whether they couldn't be read just now, and may be whole

    def __str__(self) -> str:
        return (
            f"checkpoint {self.checkpoint!r}, segment of rank {self.rank % _RANKS} in "
            f"{self.source}: "
            f"{self.detail}"
        )


class ManifestInvalid(DcpMemError, ValueError):
    """A manifest or catalog is damaged, or of a format version that this release doesn't know.

    Use a newer release if the text says so; otherwise load another checkpoint.
    """


class SizeRefused(DcpMemError):
    """A checkpoint claims sizes that what holds it can't have; no memory was taken for them.

    It is damaged, or made to exhaust memory. Load another checkpoint.

    Args:
        what: What claims a size.
        claimed_bytes: What it claims.
        held_bytes: What there is.
    """

    def __init__(self, what: str, claimed_bytes: int, held_bytes: int) -> None:
        super().__init__(what, claimed_bytes, held_bytes)
        self.what, self.claimed_bytes, self.held_bytes = what, claimed_bytes, held_bytes

    def __str__(self) -> str:
        return (
            f"{self.what}: {gib(self.claimed_bytes)} are claimed where {gib(self.held_bytes)} are "
            "there: it is damaged, or made to exhaust memory"
        )


class StorageKeyMissing(DcpMemError, FileNotFoundError):
    """Storage has no object of this name.

    Args:
        url: The storage.
        key: The object's name under it.
    """

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.url, self.key = url, key

    def __str__(self) -> str:
        return f"{self.url.rstrip('/')}/{self.key} does not exist"


# -- decide whether to trust a checkpoint ---------------------------------------------------------


class UntrustedMetadata(DcpMemError):
    """A `.metadata` pickle names something that isn't in DCP metadata; nothing of it was run.

    If you trust the checkpoint, load it with torch's own readers and save it again.

    Args:
        what: What the pickle names.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"refused to unpickle {self.what}: DCP metadata doesn't contain it. If you trust this "
            "checkpoint, load it "
            f"with torch's own FileSystemReader or FsspecReader and save it again."
        )


class UntrustedObject(DcpMemError):
    """An item holds more than loading with `weights_only=True` admits.

    If you trust the checkpoint, pass `weights_only=False` or admit the item's classes.

    Args:
        fqn: The item's flattened name.
        reason: What torch said.
    """

    def __init__(self, fqn: str, reason: str) -> None:
        super().__init__(fqn, reason)
        self.fqn, self.reason = fqn, reason

    def __str__(self) -> str:
        return (
            f"{self.fqn} isn't loaded: unpickling it could run code ({self.reason}). If you trust "
            "whoever wrote the checkpoint, "
            "pass weights_only=False to dcp_mem.load, or admit its classes by "
            "torch.serialization.add_safe_globals."
        )


# -- look at another rank -------------------------------------------------------------------------


class RankFailed(DcpMemError):
    """Another rank failed, so this one stopped too; the failed ranks' own logs say more.

    Args:
        what: What was being done.
        failures: (rank, text) for each rank that failed.
    """

    def __init__(self, what: str, failures: Sequence[tuple[int, str]]) -> None:
        super().__init__(what, tuple(failures))
        self.what, self.failures = what, tuple(failures)

    def __str__(self) -> str:
        return f"{self.what} failed: " + "; ".join(
            f"rank {rank}: {text}" for rank, text in self.failures
        )


# -- helpers --------------------------------------------------------------------------------------


def kind_of(value: object) -> str:
    """Return what a value is, for texts: "an int", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def gib(nbytes: int) -> str:
    """Return a size as people read it.

    `nbytes`: the size in bytes; GiB is the largest unit.
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def picklable(method: F) -> F:
    """Return the method, such that it only raises exceptions that survive pickling.

    DCP sends exceptions to the other ranks, which would hang on any other.
    """

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if plain_error(error) is error:
                raise
            raise plain_error(error) from error

    return guarded  # type: ignore[return-value]


def plain_error(error: Exception) -> Exception:
    """Return an error that survives pickling: this one, or else one with its text."""
    if _survives_pickling(error):
        return error
    plain = DcpMemError(f"{type(error).__name__}: {error}")
    # Whether all ranks raise it decides what this rank exchanges with them.
    plain.__dict__.update({key: of for key, of in vars(error).items() if key.startswith(MARK)})
    return plain


def _survives_pickling(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
