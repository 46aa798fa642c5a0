"""Ranks over a gloo group of dcp_mem's own.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_mem.errors import ConfigError, DcpMemError, RankFailed
from dcp_mem.ranks import passing
from dcp_mem.ranks.base import Alone, Line, Message, Ranks, Share
from dcp_mem.ranks.lines import GlooLine
from dcp_mem.ranks.passing import dumped
from dcp_mem.ranks.prompt import PromptStore, connected, connection_of_its_own
from dcp_mem.ranks.tree import Tree, tree_of

T = TypeVar("T")
_HEAD = 8
_LETTER = 128
"""Bytes that every message begins with; most of them are not longer."""
_WIDE_LETTER = 4096
"""The same where every rank writes to every other one."""
_TAG = 0x64637
_STORE_SECONDS = 30.0
"""Seconds that a question to the store may take, at most."""


class GlooRanks:
    """Ranks of a process group, over a gloo group with the same members. store: where they meet."""

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        purpose: str,
        store: dist.Store,
        seconds: float,
        variable: str = "DCP_MEM_TIMEOUT",
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self.notes: dict[str, Any] = {}
        self._members = members
        self._lines: dict[tuple[int, int], GlooLine] = {}
        self.key = self._name = (
            "dcp_mem/" + hashlib.sha256(repr((purpose, attempt(), list(members))).encode()).hexdigest()[:16]
        )
        self._store = store
        self._timeout, self._variable = timedelta(seconds=seconds), variable
        self._asked = PromptStore(store, min(seconds, _STORE_SECONDS))
        self._generation = 0
        self._calls = 0
        self._group: dist.ProcessGroupGloo | None = None
        self._tree = self._unarranged()

    def arrange(self, nodes: Sequence[str]) -> None:
        self._tree = tree_of(nodes, self.rank)

    def exchange(self, value: T) -> list[T]:
        return self._guarded("exchange", lambda group: _all_gather(group, value, self.size))

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        return self._guarded("agreement", lambda group: passing.all_reduce(_GlooWire(group), self._tree, value, join))

    def gather(self, value: T, share: Share[T] = list) -> list[T]:
        return self._guarded("gather", lambda group: passing.gather(_GlooWire(group), self._tree, value, share))

    def broadcast(self, value: T) -> T:
        return self._guarded("broadcast", lambda group: passing.broadcast(_GlooWire(group), self._tree, value))

    def scatter(self, values: Sequence[T]) -> T:
        return self._guarded("scatter", lambda group: passing.scatter(_GlooWire(group), self._tree, values))

    def tell_leaders(self, data: bytes) -> Any:
        return self._guarded("broadcast", lambda group: passing.tell_leaders(_GlooWire(group), self._tree, data))

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        self._guarded("swap", lambda group: _swap(group, outgoing, incoming))

    def apart(self, purpose: str, seconds: float, variable: str) -> Ranks:
        default = dist.distributed_c10d._get_default_store()
        key = (purpose, id(default), *self._members)
        ranks = _ranks.get(key)
        if ranks is None:
            purpose = f"{purpose} {run_token()}"  # the store may have seen other runs' keys, without its prefixes
            with _meeting(self.rank):
                store = connection_of_its_own(default, min(seconds, _STORE_SECONDS))
            ranks = _ranks[key] = GlooRanks(self.rank, self._members, purpose, store, seconds, variable)
        ranks.refresh()
        return ranks

    def line(self, sender: int, receiver: int, once: str = "") -> Line:
        if once:
            return self._connected(sender, receiver, f"{once}/")
        if (sender, receiver) not in self._lines:
            self._lines[sender, receiver] = self._connected(sender, receiver, "")
        return self._lines[sender, receiver]

    def _connected(self, sender: int, receiver: int, prefix: str) -> GlooLine:
        name = f"{self._name}/{self._generation}/{prefix}{sender}-{receiver}"
        seconds = self._timeout.total_seconds()
        store = dist.PrefixStore(name, connection_of_its_own(self._store, min(seconds, _STORE_SECONDS)))
        return GlooLine(store, self.rank == sender, seconds)

    def refresh(self) -> None:
        """Called as a save or load begins: leave a group that broke in an earlier one.

        Whoever saw it break said so in the store before it raised; DCP's own collective at the end of that call
        came later, so now every rank reads the same. Where there is none, whoever parts from the others says in which call.
        Raises RankFailed where that is this one, or where the store is gone or silent.
        """
        self._calls += 1
        while self._is_broken():
            left = self._who_left()
            self._generation += 1
            self.close()
            self.notes.clear()
            self._tree = self._unarranged()
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
        self._lines.clear()

    def _unarranged(self) -> Tree:
        return tree_of(list(map(str, range(self.size))), self.rank)

    def _is_broken(self) -> bool:
        with _meeting(self.rank):
            return self._asked.check(self._broken_key())

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
            self._say_broken()
            self.close()  # whoever waits for this rank learns it from that
            if left is not None:
                raise RankFailed(what, [left[:2]]) from None
            text = str(error).split("\n")[0][:300]
            raise RankFailed(
                f"{what} between {self.size} ranks (a rank died or fell behind by {self._timeout.total_seconds():.0f} s; "
                f"{self._variable} sets this)",
                [(self.rank, text)],
            ) from None

    def _who_left(self) -> tuple[int, str, int] | None:
        """The rank that broke the group on purpose, why it did, and in which call."""
        try:
            if self._asked.check(self._broken_key()):
                rank, why, call = json.loads(self._asked.get(self._broken_key()))
                return int(rank), str(why), int(call)
        except (RuntimeError, ValueError, TypeError):  # the store is gone too, or nobody said why
            return None
        return None

    def _say_broken(self, why: str = "null") -> None:
        try:
            self._asked.compare_set(self._broken_key(), "", why)  # the first one knows best
        except Exception as error:
            print(f"dcp_mem: the store is gone too: {error}", file=sys.stderr)

    def _build(self) -> dist.ProcessGroupGloo:
        prefix = dist.PrefixStore(f"{self._name}/{self._generation}", self._store)
        return connected(prefix, self.rank, self.size, self._timeout.total_seconds())


@contextmanager
def _meeting(rank: int) -> Iterator[None]:
    """A rank asks the store; RankFailed says so where that is gone, or silent."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailed("meeting the other ranks", [(rank, str(error).split("\n")[0][:300])]) from None


class _GlooWire:
    """Point-to-point messages: a letter of a fixed size, which says how much is still to come, and the rest."""

    def __init__(self, group: Any) -> None:
        self._group = group  # Any: torch declares no methods for a gloo group that isn't registered

    def send(self, ranks: Sequence[int], data: Any) -> None:
        if not ranks:
            return
        view = memoryview(data)
        parts = [torch.frombuffer(_letter(view, _LETTER), dtype=torch.uint8)]
        if len(view) > _LETTER - _HEAD:
            rest = view[_LETTER - _HEAD :]
            parts.append(torch.frombuffer(bytearray(rest) if rest.readonly else rest, dtype=torch.uint8))
        for work in [self._group.send([part], rank, _TAG) for part in parts for rank in ranks]:
            work.wait()

    def receive(self, ranks: Sequence[int]) -> list[Any]:
        letters = [bytearray(_LETTER) for _ in ranks]
        works = [
            self._group.recv([torch.frombuffer(letter, dtype=torch.uint8)], rank, _TAG)
            for letter, rank in zip(letters, ranks, strict=True)
        ]
        for work in works:
            work.wait()
        return [self._whole(letter, rank) for letter, rank in zip(letters, ranks, strict=True)]

    def _whole(self, letter: bytearray, rank: int) -> Any:
        nbytes = _size(letter)
        if nbytes <= _LETTER - _HEAD:
            return memoryview(letter)[_HEAD : _HEAD + nbytes]
        message = bytearray(nbytes)
        begun = _LETTER - _HEAD
        message[:begun] = letter[_HEAD:]
        self._group.recv([torch.frombuffer(message, dtype=torch.uint8, offset=begun)], rank, _TAG).wait()
        return memoryview(message)


def _swap(group: Any, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
    works = [group.recv([torch.frombuffer(view, dtype=torch.uint8)], rank, _TAG) for rank, view in incoming]
    works += [group.send([torch.frombuffer(view, dtype=torch.uint8)], rank, _TAG) for rank, view in outgoing]
    for work in works:
        work.wait()


def _all_gather(group: Any, value: Any, size: int) -> list[Any]:
    """One collective for values that fit into a letter, as almost all do; a second one where some don't."""
    mine = dumped(value)
    letters = _gathered(group, _letter(mine, _WIDE_LETTER), size)
    sizes = list(map(_size, letters))
    longest = max(sizes)
    if longest <= _WIDE_LETTER - _HEAD:
        return [
            pickle.loads(memoryview(letter)[_HEAD : _HEAD + nbytes])
            for letter, nbytes in zip(letters, sizes, strict=True)
        ]
    padded = bytearray(longest)
    padded[: len(mine)] = mine
    outputs = _gathered(group, padded, size)
    return [pickle.loads(memoryview(output)[:nbytes]) for output, nbytes in zip(outputs, sizes, strict=True)]


def _gathered(group: Any, mine: bytearray, size: int) -> list[bytearray]:
    """Bytes of all ranks, who give as many each."""
    outputs = [bytearray(len(mine)) for _ in range(size)]
    tensors = [torch.frombuffer(output, dtype=torch.uint8) for output in outputs]
    group.allgather([tensors], [torch.frombuffer(mine, dtype=torch.uint8)]).wait()
    return outputs


def _letter(message: memoryview, nbytes: int) -> bytearray:
    letter = bytearray(nbytes)
    begun = message[: nbytes - _HEAD]
    letter[:_HEAD] = len(message).to_bytes(_HEAD, "little")
    letter[_HEAD : _HEAD + len(begun)] = begun
    return letter


def _size(letter: bytearray) -> int:
    return int.from_bytes(letter[:_HEAD], "little")


def attempt() -> str:
    """Tells this life of torchrun's ranks from an earlier one that met in the same store, with the addresses of the dead in it.

    Each torchrun counts by itself, its own failures alone: an agent that joined later, or whose ranks were only restarted with
    others', tells another number. So it counts only where the store can be the same, which is one that torchrun serves.
    """
    is_served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if is_served_by_torchrun else ""


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


def run_token() -> str:
    """What the processes of this run's default process group have in common ("" where there is no group).

    Any one may ask at any time: nobody waits for the others. Raises RankFailed where the store is gone, or silent.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    store = PromptStore(dist.distributed_c10d._get_default_store(), min(exchange_timeout(), _STORE_SECONDS))
    with _meeting(dist.get_rank()):
        return store.compare_set("dcp_mem/run", "", uuid.uuid4().hex).decode()


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
        store = dist.distributed_c10d._get_default_store()
        ranks = _ranks[key] = GlooRanks(dist.get_rank(group), members, purpose, store, exchange_timeout())
    ranks.refresh()
    return ranks


def world_size() -> int:
    """How many ranks the job of this process has, also those that take no part in a save or load."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _leave_groups() -> None:
    for ranks in _ranks.values():
        ranks.close()


atexit.register(_leave_groups)
