"""The ranks of one save or load talk to each other here, over a gloo group of dcp_mem's own.

DCP's group is never used: its next collective belongs to DCP, and a training loop may be using it at the same time.
The group is built directly on the default store, without registering with torch.distributed, so that building it in
a background thread (`dcp.async_save`) can't disturb the order in which the training script makes its groups.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import pickle
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from dcp_mem.errors import ConfigError, DcpMemError, RankFailed

T = TypeVar("T")
_LETTER = 4096
_HEAD = 8


class Ranks(Protocol):
    """A fixed set of ranks; all of them make the same calls in the same order.

    A call raises RankFailed where a rank is gone or stays away for longer than the time-out.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the set."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def key(self) -> str:
        """Tells this set of ranks from others that this process is in."""

    @property
    def notes(self) -> dict[str, Any]:
        """What its ranks have found out about each other; kept for as long as the set is."""

    @property
    def is_connected(self) -> bool:
        """Whether the ranks have talked to each other before."""

    def leave(self, why: str) -> None:
        """Part from the others, who are told so by an error in their next call: they must not wait for this rank."""

    def exchange(self, value: T) -> list[T]:
        """Every rank gets every rank's value, by rank."""

    def gather(self, value: T) -> list[T]:
        """Rank 0 gets every rank's value, by rank; the others get an empty list."""

    def broadcast(self, value: T) -> T:
        """Every rank gets rank 0's value."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank on its own: no process group, `no_dist`, or `use_collectives=False`."""

    rank: int = 0
    size: int = 1
    key: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    is_connected: bool = True

    def leave(self, why: str) -> None:
        return

    def exchange(self, value: T) -> list[T]:
        return [value]

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value


class GlooRanks:
    """Ranks of a process group, over a gloo group with the same members."""

    def __init__(self, group: dist.ProcessGroup | None, purpose: str) -> None:
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self.rank = dist.get_rank(group)
        self.size = len(members)
        self.notes: dict[str, Any] = {}
        self.key = self._name = "dcp_mem/" + hashlib.sha256(repr((purpose, attempt, members)).encode()).hexdigest()[:16]
        # torchrun's workers may get the same store again after a restart, with the addresses of the dead in it.
        self._store = dist.distributed_c10d._get_default_store()
        self._timeout = timedelta(seconds=exchange_timeout())
        self._generation = 0
        self._calls = 0
        self._group: dist.ProcessGroupGloo | None = None

    def exchange(self, value: T) -> list[T]:
        return self._guarded("exchange", lambda group: self._all_gather(group, value))

    def gather(self, value: T) -> list[T]:
        return self._guarded("gather", lambda group: self._gather(group, value))

    def broadcast(self, value: T) -> T:
        result: T = self._guarded("broadcast", lambda group: self._broadcast(group, value))
        return result

    def refresh(self) -> None:
        """Called as a save or load begins: leave a group that broke in an earlier one.

        Whoever saw it break said so in the store before it raised; DCP's own collective at the end of that call
        came later, so now every rank reads the same. Where there is none, whoever parts from the others says in which call.
        Raises RankFailed where that is this one.
        """
        self._calls += 1
        while self._store.check([self._broken_key()]):
            left = self._who_left()
            self._generation += 1
            self._group = None
            self.notes.clear()
            if left is not None and left[2] == self._calls:  # it was quick to leave the very call that begins here
                raise RankFailed("the call", [left[:2]])

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def leave(self, why: str) -> None:
        self._say_broken(json.dumps([self.rank, why, self._calls]))
        self.close()

    def close(self) -> None:
        """Leave the group. Its threads must end while the interpreter still runs, or they may abort the process."""
        self._group = None

    def _broken_key(self) -> str:
        return f"{self._name}/{self._generation}/broken"

    def _guarded(self, what: str, act: Callable[[Any], T]) -> T:
        try:
            if self._group is None:
                self._group = self._build()
            return act(self._group)
        except DcpMemError:
            raise
        except Exception as error:
            left = self._who_left()
            if left is not None:
                raise RankFailed(what, [left[:2]]) from None
            self._say_broken()
            text = str(error).split("\n")[0][:300]
            raise RankFailed(
                f"{what} between {self.size} ranks (a rank died or fell behind by {self._timeout.total_seconds():.0f} s; "
                f"DCP_MEM_TIMEOUT sets this)",
                [(self.rank, text)],
            ) from None

    def _who_left(self) -> tuple[int, str, int] | None:
        """The rank that broke the group on purpose, why it did, and in which call."""
        try:
            if self._store.check([self._broken_key()]):
                rank, why, call = json.loads(self._store.get(self._broken_key()))
                return int(rank), str(why), int(call)
        except (RuntimeError, ValueError, TypeError):  # the store is gone too, or nobody said why
            return None
        return None

    def _say_broken(self, why: str = "null") -> None:
        try:
            self._store.compare_set(self._broken_key(), "", why)  # the first one knows best
        except Exception as error:
            print(f"dcp_mem: the store is gone too: {error}", file=sys.stderr)

    def _build(self) -> dist.ProcessGroupGloo:
        prefix = dist.PrefixStore(f"{self._name}/{self._generation}", self._store)
        return dist.ProcessGroupGloo(prefix, self.rank, self.size, self._timeout)

    # torch declares no methods for a gloo group that isn't registered, hence Any.
    def _all_gather(self, group: Any, value: Any) -> list[Any]:
        """One collective for values that fit into a small letter, as almost all do; a second one where some don't."""
        mine = _dump(value)
        letters = [torch.empty(_LETTER, dtype=torch.uint8) for _ in range(self.size)]
        group.allgather([letters], [_letter(mine)]).wait()
        sizes = [_size(letter) for letter in letters]
        longest = max(sizes)
        if longest <= _LETTER - _HEAD:
            return [_load(letter[_HEAD:], size) for letter, size in zip(letters, sizes, strict=True)]
        outputs = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        group.allgather([outputs], [_padded(mine, longest)]).wait()
        return [_load(output, size) for output, size in zip(outputs, sizes, strict=True)]

    def _gather(self, group: Any, value: Any) -> list[Any]:
        mine = _dump(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        group.allgather([sizes], [torch.tensor([len(mine)])]).wait()
        longest = max(int(size) for size in sizes)
        root = self.rank == 0
        outputs = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if root else []
        options = dist.GatherOptions()
        options.rootRank = 0
        group.gather([outputs] if root else [], [_padded(mine, longest)], options).wait()
        return [_load(output, int(size)) for output, size in zip(outputs, sizes, strict=True)] if root else []

    def _broadcast(self, group: Any, value: Any) -> Any:
        mine = _dump(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(mine)])
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([size], options).wait()
        data = mine if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        group.broadcast([data], options).wait()
        return value if self.rank == 0 else _load(data, len(data))


def exchange_timeout() -> float:
    """Seconds that a rank waits for the others: $DCP_MEM_TIMEOUT, else 600. Raises ConfigError."""
    text = os.environ.get("DCP_MEM_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(f"DCP_MEM_TIMEOUT={text!r}: give a number of seconds above 0")
    return seconds


def _dump(value: Any) -> torch.Tensor:
    # Peers are the ranks of this very job; DCP pickles between them as well.
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=4)), dtype=torch.uint8)


def _letter(data: torch.Tensor) -> torch.Tensor:
    head = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    return _padded(torch.cat([head, data[: _LETTER - _HEAD]]), _LETTER)


def _size(letter: torch.Tensor) -> int:
    return int(letter[:_HEAD].view(torch.int64))


def _load(data: torch.Tensor, size: int) -> Any:
    return pickle.loads(data[:size].numpy().tobytes())


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    return data if len(data) == size else torch.cat([data, torch.zeros(size - len(data), dtype=torch.uint8)])


def run_token() -> str:
    """What the processes of this run's default process group have in common ("" where there is no group).

    Any one may ask at any time: nobody waits for the others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    store = dist.distributed_c10d._get_default_store()
    token: bytes = store.compare_set("dcp_mem/run", "", uuid.uuid4().hex)
    return token.decode()


_ranks: dict[tuple[object, ...], GlooRanks] = {}


def ranks_of(group: dist.ProcessGroup | None, purpose: str) -> Ranks:
    """The ranks of a process group (None: the default one), on a gloo group that this process keeps and reuses.

    purpose: who uses it. Saves and loads, and different jobs, may run at the same time and must not share one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    if len(members) == 1:
        return Alone()
    key = (purpose, id(dist.distributed_c10d._get_default_store()), *members)
    ranks = _ranks.get(key)
    if ranks is None:
        ranks = _ranks[key] = GlooRanks(group, purpose)
    ranks.refresh()
    return ranks


def _leave_groups() -> None:
    for ranks in _ranks.values():
        ranks.close()


atexit.register(_leave_groups)
