"""Every error that dcp_mem raises, by what the caller can do about it.

All of them derive from `DcpMemError`, carry their facts as plain values and survive pickling: DCP sends
exceptions from rank to rank, and one that doesn't pickle would hang the others.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar


class DcpMemError(Exception):
    """Base of everything that dcp_mem raises on purpose."""


class ConfigError(DcpMemError, ValueError):
    """An argument or an environment variable can't be used; the text says what to give instead."""


class MemoryRootRefused(DcpMemError, PermissionError):
    """The memory root isn't safe to use (someone else's, a symlink, writable by others)."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"memory root {self.path} refused: {self.reason}. Give memory= (or DCP_MEM_ROOT) a directory of your own, "
            f"reached without symlinks, on a tmpfs."
        )


class MemoryUnavailable(DcpMemError, OSError):
    """There is no usable tmpfs where the memory root should lie."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"memory root {self.path} can't be used: {self.reason}. Mount a tmpfs there "
            f"(mount -t tmpfs -o size=…,huge=within_size tmpfs DIR), or give memory= a directory on one."
        )


class MemoryBudgetExceeded(DcpMemError, MemoryError):
    """A checkpoint doesn't fit into the memory budget; nothing older was harmed.

    needed_bytes: what the save needs on this node; limit_bytes: what it may have.
    """

    def __init__(self, needed_bytes: int, limit_bytes: int, what: str) -> None:
        super().__init__(needed_bytes, limit_bytes, what)
        self.needed_bytes, self.limit_bytes, self.what = needed_bytes, limit_bytes, what

    def __str__(self) -> str:
        if self.needed_bytes <= self.limit_bytes:
            return (
                f"{self.what}. Storage takes them more slowly than they come: save or persist less often "
                f"(persist=every(n)), raise keep=, or choose on_full='wait' or 'skip'."
            )
        return (
            f"{self.what}: {gib(self.needed_bytes)} needed, {gib(self.limit_bytes)} allowed. Raise memory_limit or the "
            f"tmpfs size, lower keep=, or choose on_full='skip', or 'wait' where a flush will make room."
        )


class JobInUse(DcpMemError, BlockingIOError):
    """Another live process group saves under this job's name on this node."""

    def __init__(self, job: str, holder: str) -> None:
        super().__init__(job, holder)
        self.job, self.holder = job, holder

    def __str__(self) -> str:
        return f"job {self.job!r} is in use by {self.holder}. End that run, or give this one another job= (or path)."


class CheckpointInUse(DcpMemError, BlockingIOError):
    """Somebody reads the checkpoint that was to be deleted."""

    def __init__(self, checkpoint: str, where: str) -> None:
        super().__init__(checkpoint, where)
        self.checkpoint, self.where = checkpoint, where

    def __str__(self) -> str:
        return (
            f"somebody is reading checkpoint {self.checkpoint!r} in {self.where}: try again when that is done, or pass "
            f"force=True (a reader that was killed counts for a day)"
        )


class StorageUnavailable(DcpMemError, ConnectionError):
    """Storage didn't answer, or answered that it can't just now; a retry may help.

    retry_after: seconds that storage asked to be left alone for, 0.0 where it didn't say.
    """

    def __init__(self, url: str, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(url, reason)
        self.args = (url, reason, retry_after)
        self.url, self.reason, self.retry_after = url, reason, retry_after

    def __str__(self) -> str:
        return f"storage {self.url} is unavailable: {self.reason}"


class CredentialsExpired(StorageUnavailable):
    """Storage takes these credentials no more; with new ones the same request may succeed."""


class StorageRefused(DcpMemError, PermissionError):
    """Storage said no (credentials, missing bucket, read-only, already there); a retry won't help."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"storage {self.url} refused: {self.reason}"


class StorageKeyMissing(DcpMemError, FileNotFoundError):
    """Storage has no object of that name."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.url, self.key = url, key

    def __str__(self) -> str:
        return f"{self.url.rstrip('/')}/{self.key} does not exist"


class FlushFailed(DcpMemError):
    """A checkpoint didn't become durable; it is still in memory unless the text says otherwise."""

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint!r} did not reach storage: {self.reason}"


class ReplicationFailed(DcpMemError):
    """A checkpoint didn't get its copies on other nodes; on its own nodes it is whole unless the text says otherwise."""

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint!r} was not replicated: {self.reason}"


class WaitTimeout(DcpMemError, TimeoutError):
    """The awaited state wasn't reached in time; the work goes on."""


class CheckpointExists(DcpMemError, FileExistsError):
    """overwrite=False and a checkpoint of that name is there already."""

    def __init__(self, checkpoint: str, where: str) -> None:
        super().__init__(checkpoint, where)
        self.checkpoint, self.where = checkpoint, where

    def __str__(self) -> str:
        return (
            f"checkpoint {self.checkpoint!r} exists already in {self.where} and overwrite=False: choose another "
            f"checkpoint_id, delete the old one, or pass overwrite=True."
        )


class NoRecoverableCheckpoint(DcpMemError, FileNotFoundError):
    """No checkpoint could be proved whole.

    reasons: a line for each candidate that was passed over, newest first.
    """

    def __init__(self, where: str, reasons: Sequence[str]) -> None:
        super().__init__(where, tuple(reasons))
        self.where, self.reasons = where, tuple(reasons)

    def __str__(self) -> str:
        nothing = "\n  - nothing was found at all: path=, job= and memory= must be those that the writer was given"
        passed = "".join(f"\n  - {reason}" for reason in self.reasons) or nothing
        return f"no recoverable checkpoint in {self.where}:{passed}"


class CheckpointNotFound(NoRecoverableCheckpoint):
    """The checkpoint that was asked for can't be loaded.

    available: names of those that can.
    """

    def __init__(self, checkpoint: str, where: str, available: Sequence[str], reasons: Sequence[str]) -> None:
        super().__init__(where, reasons)
        self.args = (checkpoint, where, tuple(available), tuple(reasons))
        self.checkpoint, self.available = checkpoint, tuple(available)

    def __str__(self) -> str:
        there = ", ".join(self.available) or "none"
        passed = "".join(f"\n  - {reason}" for reason in self.reasons)
        return f"checkpoint {self.checkpoint!r} can't be loaded from {self.where} (loadable, newest first: {there}){passed}"


class SegmentCorrupt(DcpMemError):
    """Bytes that were read aren't those that were saved."""

    def __init__(self, checkpoint: str, rank: int, source: str, detail: str) -> None:
        super().__init__(checkpoint, rank, source, detail)
        self.checkpoint, self.rank, self.source, self.detail = checkpoint, rank, source, detail

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint!r}, segment of rank {self.rank} in {self.source}: {self.detail}"


class ManifestInvalid(DcpMemError, ValueError):
    """A manifest is damaged, or of a format version that this release doesn't know."""


class UntrustedMetadata(DcpMemError):
    """A `.metadata` pickle names something that no DCP metadata is made of; nothing of it was run."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"refused to unpickle {self.what}: DCP metadata doesn't contain it. If you trust this checkpoint, load it "
            f"with torch's own FileSystemReader or FsspecReader and save it again."
        )


class RankFailed(DcpMemError):
    """Another rank failed, so this one stopped too.

    failures: (rank, text) of each that failed.
    """

    def __init__(self, what: str, failures: Sequence[tuple[int, str]]) -> None:
        super().__init__(what, tuple(failures))
        self.what, self.failures = what, tuple(failures)

    def __str__(self) -> str:
        return f"{self.what} failed: " + "; ".join(f"rank {rank}: {text}" for rank, text in self.failures)


def gib(nbytes: int) -> str:
    """A size as people read it."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


F = TypeVar("F", bound=Callable[..., Any])


class UntrustedObject(DcpMemError):
    """A byte item holds more than weights_only loading admits."""

    def __init__(self, fqn: str, reason: str) -> None:
        super().__init__(fqn, reason)
        self.fqn, self.reason = fqn, reason

    def __str__(self) -> str:
        return (
            f"{self.fqn} isn't loaded: unpickling it could run code ({self.reason}). If you trust whoever wrote the checkpoint, "
            f"pass weights_only=False to dcp_mem.load, or admit its classes by torch.serialization.add_safe_globals."
        )


def picklable(method: F) -> F:
    """Let only exceptions out that survive pickling: DCP sends them to the other ranks, and another kind hangs those."""

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if _survives_pickling(error):
                raise
            raise DcpMemError(f"{type(error).__name__}: {error}") from error

    return guarded  # type: ignore[return-value]


def _survives_pickling(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
