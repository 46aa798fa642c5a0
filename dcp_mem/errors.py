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
  `SegmentCorrupt`, `ManifestInvalid`, `SizeRefused`, `StorageKeyMissing`, `EntriesMissing`.
- Decide whether to trust a checkpoint: `UntrustedMetadata`, `UntrustedObject`.
- Look at another rank: `RankFailed`.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

_MOST_LISTED = 10
"""Checkpoints that an error names."""
_MOST_ITEMS = 5
"""Items of a checkpoint that an error names."""
_MOST_MISSING, _MOST_COMPARED = 20, 2000
"""Missing entries that a text names, and the entries among which it looks for close names."""
MARK = "_dcp_mem_"
"""Prefix of attributes that say whether all ranks raise an error; `comm/agreement.py` sets them."""
F = TypeVar("F", bound=Callable[..., Any])


class DcpMemError(Exception):
    """Base of everything that dcp_mem raises on purpose."""

    # Most are dataclasses: their fields are `args`, by which they are pickled, and fill `_text`.
    _text: ClassVar[str] = ""

    def __post_init__(self) -> None:
        names = [one.name for one in fields(self) if one.init]  # type: ignore[arg-type]
        for name in names:
            if isinstance(value := getattr(self, name), list):
                setattr(self, name, tuple(value))
        self.args = tuple(getattr(self, name) for name in names)

    def __str__(self) -> str:
        return self._text.format(**vars(self)) if self._text else super().__str__()


# -- change the arguments or the machine ----------------------------------------------------------


class ConfigError(DcpMemError, ValueError):
    """An argument or an environment variable can't be used; the text says what to give instead."""


@dataclass(eq=False, repr=False)
class MemoryRootRefused(DcpMemError, PermissionError):
    """The memory root isn't safe to use: it is someone else's, a symlink, or writable by others.

    Give another `memory_root=`, on a tmpfs and reached without symlinks.
    """

    path: str
    reason: str
    _text = (
        "memory root {path} refused: {reason}. Give memory_root= (or DCP_MEM_ROOT) a directory of "
        "your own, reached without symlinks, on a tmpfs."
    )


@dataclass(eq=False, repr=False)
class MemoryUnavailable(DcpMemError, OSError):
    """There is no usable tmpfs for the memory root.

    Mount one there, or give another `memory_root=`.
    """

    path: str
    reason: str
    _text = (
        "memory root {path} can't be used: {reason}. Mount a tmpfs there "
        "(mount -t tmpfs -o size=…,huge=within_size tmpfs DIR), or give memory_root= a "
        "directory on one."
    )


@dataclass(eq=False, repr=False)
class JobInUse(DcpMemError, BlockingIOError):
    """Another running process group saves under this job's name on this node.

    End that run, or give this one another `job=` or path.
    """

    job: str
    holder: str  # the process that holds it
    _text = (
        "job {job!r} is in use by {holder}. End that run, or give this one another "
        "job= (or path). With dcp_mem.serve, have each program serve a directory of its own."
    )


@dataclass(eq=False, repr=False)
class CheckpointExists(DcpMemError, FileExistsError):
    """With `overwrite=False`, a checkpoint of this name exists already.

    Choose another checkpoint id, delete the old checkpoint, or pass `overwrite=True`.
    """

    checkpoint: str
    where: str  # "memory", or the storage's URL
    _text = (
        "Checkpoint already exists: {checkpoint!r} exists already in {where} and "
        "overwrite=False: choose another checkpoint_id, delete the old one, or pass "
        "overwrite=True."
    )


# -- save less, or give it more room --------------------------------------------------------------


@dataclass(eq=False, repr=False)
class MemoryBudgetExceeded(DcpMemError, MemoryError):
    """A checkpoint doesn't fit into the memory budget; no older one was harmed.

    Raise the limit, keep fewer checkpoints, save less often, or choose another `on_full=`; the text
    says which of these help.
    """

    needed_bytes: int  # what the save needs on this node
    limit_bytes: int  # what it may use
    what: str  # what was to be stored

    def __str__(self) -> str:
        if self.needed_bytes <= self.limit_bytes:
            return (
                f"{self.what}. Storage takes them more slowly than they come: save or persist less "
                "often (persist=every_n_saves(n)), raise keep_memory=, or choose on_full='wait' or "
                "'skip'."
            )
        return (
            f"{self.what}: {gib(self.needed_bytes)} needed, {gib(self.limit_bytes)} allowed. Raise "
            "memory_limit or the tmpfs size, lower keep_memory=, or choose on_full='skip', or "
            "'wait' where a flush will make room."
        )


# -- wait, or try again ---------------------------------------------------------------------------


class WaitTimeout(DcpMemError, TimeoutError):
    """The awaited state wasn't reached in time; the work goes on, and can be waited for again."""


@dataclass(eq=False, repr=False)
class CheckpointInUse(DcpMemError, BlockingIOError):
    """A checkpoint that was to be deleted is being read.

    Try again when the reader is done, or pass `force=True`.
    """

    checkpoint: str
    where: str
    _text = (
        "somebody is reading checkpoint {checkpoint!r} in {where}: try again when that is done, or "
        "pass force=True (a reader that was killed counts for a day)"
    )


@dataclass(eq=False, repr=False)
class StorageUnavailable(DcpMemError, ConnectionError):
    """Storage didn't answer, or answered that it can't now; trying again later may help.

    The agent tries again by itself.
    """

    url: str
    reason: str
    retry_after: float = 0.0  # seconds for which storage asked for no requests
    _text = "storage {url} is unavailable: {reason}"


class CredentialsExpired(StorageUnavailable):
    """Storage no longer accepts these credentials; the same request may succeed with new ones."""


# -- mend storage or the network; training can go on ----------------------------------------------


@dataclass(eq=False, repr=False)
class StorageRefused(DcpMemError, PermissionError):
    """Storage said no: credentials, missing bucket, read-only, already there. Retrying won't help.

    Change what storage objects to, then try again.
    """

    url: str
    reason: str
    _text = "storage {url} refused: {reason}"


@dataclass(eq=False, repr=False)
class StorageTaken(StorageRefused):
    """A newer run of the job has taken the storage; this one neither commits nor deletes there.

    Its checkpoints stay in memory. End one of the two runs; the one that starts last has the
    storage.
    """

    reason: str = field(init=False)
    generation: int  # the newer run's
    holder: str

    def __post_init__(self) -> None:
        self.reason = (
            f"a newer run has taken it (generation {self.generation}: {self.holder}). This run "
            "stays in memory. Give each run a root of its own, or end one of them. With "
            "dcp_mem.serve, have each program serve a directory of its own"
        )
        super().__post_init__()


@dataclass(eq=False, repr=False)
class FlushFailed(DcpMemError):
    """A checkpoint didn't become durable; it is still in memory unless the text says otherwise.

    Training can go on; the text says what to mend.
    """

    checkpoint: str
    reason: str
    _text = "checkpoint {checkpoint!r} did not reach storage: {reason}"


@dataclass(eq=False, repr=False)
class ReplicationFailed(DcpMemError):
    """A checkpoint didn't get its copies on other nodes.

    Its own nodes hold all of it unless the text says otherwise. Training can go on; the next
    checkpoint gets copies of its own.
    """

    checkpoint: str
    reason: str
    _text = "checkpoint {checkpoint!r} was not replicated: {reason}"


# -- load another checkpoint ----------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class NoRecoverableCheckpoint(DcpMemError, FileNotFoundError):
    """No checkpoint could be proved whole, so there is none to load.

    Check that path, job and memory root are those of the writer, or start anew.
    """

    where: str  # where the checkpoints were looked for
    reasons: Sequence[str]  # a line for each candidate that was passed over, newest first

    def __str__(self) -> str:
        nothing = (
            "nothing was found at all: path=, job= and memory_root= must be those that the writer "
            "was given"
        )
        return f"no recoverable checkpoint in {self.where}:{_lines(self.reasons or [nothing])}"


class CheckpointNotFound(NoRecoverableCheckpoint):
    """The checkpoint that was asked for can't be loaded; `available` can, newest first."""

    def __init__(
        self, checkpoint: str, where: str, available: Sequence[str], reasons: Sequence[str]
    ) -> None:
        super().__init__(where, reasons)
        # Two attempts of a name may be there.
        self.checkpoint, self.available = checkpoint, tuple(dict.fromkeys(available))
        self.args = (checkpoint, where, self.available, tuple(reasons))

    def __str__(self) -> str:
        there = _some(self.available, _MOST_LISTED) or "none"
        if not self.reasons:
            return f"no {self.checkpoint} in {self.where} (there are, newest first: {there})"
        return (
            f"checkpoint {self.checkpoint!r} can't be loaded from {self.where} (loadable, newest "
            f"first: {there}){_lines(self.reasons)}"
        )


_RANKS = 1 << 24
"""As `names.FROZEN`: a segment's number modulo this is its rank."""


@dataclass(eq=False, repr=False)
class NotOfOneSave(DcpMemError):
    """A checkpoint turned out damaged while it was read, and an older one can't replace all of it.

    The state dict has values of the damaged one. Load into a new one, or without
    `allow_partial_load`.
    """

    name: str  # the older checkpoint
    lacking: Sequence[str]  # what it doesn't have

    def __str__(self) -> str:
        return (
            f"{self.name} lacks {_some(self.lacking, _MOST_ITEMS)}, which may have been read of a "
            "checkpoint that turned out to be damaged: the state dict isn't of one save. Load into "
            "a new one, or without allow_partial_load"
        )


@dataclass(eq=False, repr=False)
class EntriesMissing(DcpMemError, RuntimeError):
    """The checkpoint lacks entries that this rank's state dict asks for; nothing was loaded.

    Mend the names, load another checkpoint, or pass `strict=False`, which loads the others.
    """

    missing: Sequence[str]  # names that the state dict has and the checkpoint lacks; all of them
    left_out: Sequence[str]  # names that the checkpoint has and the state dict lacks

    def __str__(self) -> str:
        text = f"Missing key in checkpoint state_dict: {_some(self.missing, _MOST_MISSING)}."
        known = self.left_out[:_MOST_COMPARED]
        for name in self.missing[:_MOST_ITEMS]:
            if close := get_close_matches(name, known, 1):
                text += f" Did you mean {close[0]} in place of {name}?"
        return f"{text} strict=False loads what there is, and leaves these as they are."


@dataclass(eq=False, repr=False)
class SegmentCorrupt(DcpMemError):
    """Bytes that were read aren't those that were saved.

    A load goes on with another source, or with an older checkpoint, where there is one.
    """

    checkpoint: str
    rank: int  # the rank that saved the segment; with 2**24 added, its second segment
    source: str  # where the bytes were read: "memory", a node, or the storage's URL
    detail: str
    may_pass = False  # whether the bytes may be whole, and can't be read just now

    def __str__(self) -> str:
        return (
            f"checkpoint {self.checkpoint!r}, segment of rank {self.rank % _RANKS} in "
            f"{self.source}: {self.detail}"
        )


class ManifestInvalid(DcpMemError, ValueError):
    """A manifest or catalog is damaged, or of a format version that this release doesn't know.

    Use the release that wrote it if the text says so; otherwise load another checkpoint.
    """


@dataclass(eq=False, repr=False)
class SizeRefused(DcpMemError):
    """A checkpoint claims sizes that what holds it can't have; no memory was taken for them.

    It is damaged, or made to exhaust memory. Load another checkpoint.
    """

    what: str  # what claims a size
    claimed_bytes: int  # what it claims
    held_bytes: int  # what there is

    def __str__(self) -> str:
        return (
            f"{self.what}: {gib(self.claimed_bytes)} are claimed where {gib(self.held_bytes)} are "
            "there: it is damaged, or made to exhaust memory"
        )


@dataclass(eq=False, repr=False)
class StorageKeyMissing(DcpMemError, FileNotFoundError):
    """Storage has no object of this name."""

    url: str
    key: str  # the object's name under it

    def __str__(self) -> str:
        return f"{self.url.rstrip('/')}/{self.key} does not exist"


# -- decide whether to trust a checkpoint ---------------------------------------------------------


@dataclass(eq=False, repr=False)
class UntrustedMetadata(DcpMemError):
    """A `.metadata` pickle names something that isn't in DCP metadata; nothing of it was run.

    If you trust the checkpoint, load it with torch's own readers and save it again.
    """

    what: str
    _text = (
        "refused to unpickle {what}: DCP metadata doesn't contain it. If you trust this "
        "checkpoint, load it with torch's own FileSystemReader or FsspecReader and save it again."
    )


@dataclass(eq=False, repr=False)
class UntrustedObject(DcpMemError):
    """An item holds more than loading with `weights_only=True` admits.

    If you trust the checkpoint, pass `weights_only=False` or admit the item's classes.
    """

    fqn: str
    reason: str  # what torch said
    _text = (
        "{fqn} isn't loaded: unpickling it could run code ({reason}). If you trust whoever "
        "wrote the checkpoint, pass weights_only=False to dcp_mem.load, or admit its classes by "
        "torch.serialization.add_safe_globals."
    )


# -- look at another rank -------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class RankFailed(DcpMemError):
    """Another rank failed, so this one stopped too; the failed ranks' own logs say more."""

    what: str  # what was being done
    failures: Sequence[tuple[int, str]]  # (rank, text) for each rank that failed

    def __str__(self) -> str:
        return f"{self.what} failed: " + "; ".join(
            f"rank {rank}: {text}" for rank, text in self.failures
        )


# -- helpers --------------------------------------------------------------------------------------


def _lines(reasons: Sequence[str]) -> str:
    return "".join(f"\n  - {reason}" for reason in reasons)


def _some(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def kind_of(value: object) -> str:
    """Return what a value is, for texts: "an int", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def gib(nbytes: float) -> str:
    """Return a size as people read it."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and units[1:]:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


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
