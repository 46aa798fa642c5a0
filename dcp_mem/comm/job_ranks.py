"""Ranks of a process group, over connections of dcp_mem's own.

DCP's group is never used: its next collective belongs to DCP, and the training loop may be using it
at the same time. Our ranks meet in the default store and aren't registered with torch.distributed.
So connecting them in a background thread (`dcp.async_save`) can't disturb the order in which the
training script makes its groups.

A rank connects to its parent and children in the tree.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from dcp_mem.comm import relay
from dcp_mem.comm.addresses import check_open_files
from dcp_mem.comm.collectives import Channel, Join, Ranks, Share, SingleRank
from dcp_mem.comm.peers import PeerLost, Peers, TcpWire
from dcp_mem.comm.relay import Tree, tree_of
from dcp_mem.comm.timed_store import BorrowedStore, MeetingPlace, TimedStore, own_connection
from dcp_mem.comm.transports import Pair, connected
from dcp_mem.comm.waits import Waits
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.config import Purpose, exchange_timeout
from dcp_mem.errors import ConfigError, DcpMemError, RankFailed

T = TypeVar("T")
_STORE_SECONDS = 30.0
"""The longest that a call to the store may take."""
_LAST_SECONDS = 5.0
"""The longest that a call to the store may take where an exchange has failed in the last moment."""
_MARGIN_SHARE, _MOST_MARGIN = 0.04, 5.0
"""By which part of the time-out a rank waits longer than its parent does; the most in seconds."""


class _Departure(NamedTuple):
    """Why a set of ranks is broken, as the first rank notes it that knows."""

    rank: int  # the rank that has left, or is lost
    why: str
    call: str  # the call that is in vain: its name, or its number
    is_lost: bool  # whether the rank is lost; else it has left by itself


class JobRanks:
    """Ranks of a process group, over connections of their own.

    Once a rank is lost, or leaves, every further exchange of the call fails at once: a call waits
    for a lost rank no more than once. Where a channel has waited for one already, the exchange
    behind it waits half as long: a call takes at most one and a half time-outs. The next call,
    which begins with `refresh`, uses new connections, of the next generation.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        purpose: Purpose | str,
        store: dist.Store | BorrowedStore,
        seconds: float,
        variable: str = "DCP_MEM_TIMEOUT",
    ) -> None:
        """Describe the ranks; they connect with the first call.

        `purpose`: who uses the ranks; each purpose has a group of its own. `seconds`: how long an
        exchange may wait for other ranks, connecting to them included. `variable`: the environment
        variable that sets this, for the texts of errors.
        """
        self.rank = rank
        self.size = len(members)
        self.cache: dict[str, Any] = {}
        self._members = members
        self._channels: dict[tuple[int, int, str], Channel] = {}
        self.key = self._name = (
            "dcp_mem/"
            + hashlib.sha256(
                repr((str(purpose), restart_count(), list(members))).encode()
            ).hexdigest()[:16]
        )
        self._timeout, self._variable = timedelta(seconds=seconds), variable
        self._timed_store = TimedStore(store, min(seconds, _STORE_SECONDS))
        self._waits = Waits(purpose, rank, members, self._timed_store, restart_count())
        self._generation = 0
        self._count, self._call = 0, ""
        self._has_met = False
        self._nodes: tuple[str, ...] | None = None
        self._layouts = 0  # how many trees there were
        self._in_tree: Peers | None = None
        self._failed: tuple[str, Sequence[tuple[int, str]]] | None = None  # in the call under way
        self._was_silent = False  # a rank, on a channel of the call under way
        self._tree = self._flat_tree()

    def set_nodes(self, nodes: Sequence[str]) -> None:
        if tuple(nodes) == self._nodes:
            return
        self._nodes, self._tree = tuple(nodes), tree_of(nodes, self.rank)
        self._layouts += 1
        self._leave_tree()

    def exchange(self, value: T) -> list[T]:
        return self._guarded("exchange", lambda wire: relay.exchange(wire, self._tree, value))

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        return self._guarded(
            "agreement", lambda wire: relay.all_reduce(wire, self._tree, value, join)
        )

    def gather(self, value: T, share: Share[T] = list) -> list[T]:
        return self._guarded("gather", lambda wire: relay.gather(wire, self._tree, value, share))

    def reduce(self, value: T, join: Join[T]) -> T | None:
        return self._guarded("reduction", lambda wire: relay.reduce(wire, self._tree, value, join))

    def broadcast(self, value: T) -> T:
        return self._guarded("broadcast", lambda wire: relay.broadcast(wire, self._tree, value))

    def scatter(self, values: Sequence[T]) -> T:
        return self._guarded("scatter", lambda wire: relay.scatter(wire, self._tree, values))

    def route(self, values: Mapping[int, T]) -> list[tuple[int, T]]:
        return self._guarded("routing", lambda wire: relay.route(wire, self._tree, values))

    def tell_leaders(self, data: bytes) -> Any:
        return self._guarded("broadcast", lambda wire: relay.tell_leaders(wire, self._tree, data))

    def dedicated(self, purpose: str, seconds: float, variable: str, call: str = "") -> Ranks:
        default = default_store()
        key = (purpose, weakref.ref(default), *self._members)
        ranks = _ranks.get(key)
        if ranks is None:
            # Without its prefixes, the store may have keys of other runs.
            purpose = f"{purpose} {run_token()}"
            with meeting(self.rank):
                store = _shared_connection(default, seconds)
            ranks = _ranks[key] = JobRanks(
                self.rank, self._members, purpose, store, seconds, variable
            )
        ranks.refresh(call)
        return ranks

    def channel(
        self, sender: int, receiver: int, once: str = "", transport: str = "tcp"
    ) -> Channel:
        if once:
            return self._connected(sender, receiver, f"{once}/", transport)
        key = sender, receiver, transport
        if key not in self._channels:
            self._channels[key] = self._connected(sender, receiver, "", transport)
        return self._channels[key]

    def _connected(self, sender: int, receiver: int, prefix: str, transport: str) -> Channel:
        name = f"{self._name}/{self._generation}/{prefix}{sender}-{receiver}"
        return connected(
            transport,
            Pair(
                store=MeetingPlace(self._timed_store, f"{name}/", self.look),
                is_sender=self.rank == sender,
                seconds=self._timeout.total_seconds(),
                on_silence=self._note_silence,
            ),
        )

    def look(self) -> None:
        if (in_tree := self._in_tree) is not None:
            in_tree.look()
        if self._others_gave_up() and (left := self._who_left(_LAST_SECONDS)):
            raise PeerLost(left.rank, left.why)

    def _note_silence(self) -> None:
        self._was_silent = True

    def refresh(self, call: str = "", method: str = "") -> None:
        """Replace connections that broke in an earlier call. Called as a save or load begins.

        A rank that saw one break noted it in the store before it raised. Where DCP's own
        collective came later, at the end of that call, every rank now reads the same. Most calls
        have none: they are told apart by a name, or their number, which a rank that leaves notes.

        `call`: the name of the call that begins, the same on all ranks and never used before; "":
        it is numbered. Raises RankFailed.
        """
        self._count += 1
        self._call = call or str(self._count)
        self._waits.enter(self._call, method)
        self._failed, self._was_silent = None, False
        while self._is_broken():
            left = self._who_left(self._timed_store.seconds)
            self._generation += 1
            self.close()
            self.cache.clear()
            self._nodes, self._tree = None, self._flat_tree()
            self._layouts = 0  # some ranks may have failed before they counted
            # A quick rank may have left the very call that begins here.
            if left is not None and left.call == self._call:
                raise RankFailed("the call", [left[:2]])

    @property
    def is_connected(self) -> bool:
        return self._has_met

    def leave(self, why: str) -> None:
        self._say_broken(
            self._timed_store.seconds, _Departure(self.rank, why, self._call, is_lost=False)
        )
        self._failed = ("the call", [(self.rank, why)])
        self.close()

    def close(self) -> None:
        """Close all connections, and the channels."""
        self._has_met = False
        self._leave_tree()
        self._channels.clear()  # a thread that still uses one goes on

    def _leave_tree(self) -> None:
        if self._in_tree is not None:
            self._in_tree.close()
            self._in_tree = None

    def _flat_tree(self) -> Tree:
        return tree_of(list(map(str, range(self.size))), self.rank)

    def _is_broken(self) -> bool:
        with meeting(self.rank):
            return self._timed_store.check(self._broken_key())

    def _others_gave_up(self) -> bool:
        with suppress(RuntimeError):  # the store's host may be the silent one
            return self._timed_store.check(self._broken_key(), _LAST_SECONDS)
        return False

    def _broken_key(self) -> str:
        return f"{self._name}/{self._generation}/broken"

    def _guarded(self, what: str, act: Callable[[TcpWire], T]) -> T:
        faults.point("ranks.exchange")
        if self._failed is not None:
            raise RankFailed(*self._failed)
        # Not at once: other ranks may be busy for a while, and the silent one behind a bad cable.
        patience = 0.5 if self._was_silent else 1.0
        deadline = time.monotonic() + patience * self._timeout.total_seconds()
        self._waits.begin()
        try:
            if self._was_silent and self._others_gave_up():
                raise RuntimeError("other ranks have given up meanwhile")
            found = act(self._wire(deadline))
        except ConfigError as error:  # roots that differ: ranks that talk to this one wait in vain
            self.leave(str(error))
            raise
        except DcpMemError:
            raise
        except Exception as error:
            # The error's frames would keep buffers for as long as someone keeps the error.
            traceback.clear_frames(error.__traceback__)
            self._failed = self._lost(what, error, deadline)
            raise RankFailed(*self._failed) from None
        except BaseException as error:
            # A message may have been read in part: no later one would be understood.
            self.leave(type(error).__name__)
            raise
        finally:
            self._waits.end()
        self._has_met = True
        return found

    def _lost(
        self, what: str, error: Exception, deadline: float
    ) -> tuple[str, Sequence[tuple[int, str]]]:
        """Note for all ranks who is lost, and close the connections, so that all learn of it.

        Returns what RankFailed says of it.
        """
        # The store's host may be the one that is lost.
        seconds = min(max(deadline - time.monotonic(), _LAST_SECONDS), _STORE_SECONDS)
        text = str(error).split("\n")[0][:300]
        rank, text = (error.rank, error.text) if isinstance(error, PeerLost) else (self.rank, text)
        left = self._who_left(seconds) or _Departure(rank, text, self._call, is_lost=True)
        self._say_broken(seconds, left)
        self.close()
        if left.is_lost:
            what = (
                f"{what} between {self.size} ranks (a rank died or fell behind by "
                f"{self._timeout.total_seconds():.0f} s; {self._variable} sets this)"
            )
            # Loads go on to exchanges of DCP's, which take as long as the user's group allows.
            log.warning("%s", RankFailed(what, [left[:2]]))
        return what, [left[:2]]

    def _wire(self, deadline: float) -> TcpWire:
        margin = min(_MARGIN_SHARE * self._timeout.total_seconds(), _MOST_MARGIN)
        if self._in_tree is None:
            self._in_tree = self._peers(f"layout {self._layouts}")
        return TcpWire(self._in_tree, self.rank, deadline, margin * self._tree.depth, self._look)

    def _look(self, rank: int) -> None:
        self._waits.look(rank, can_differ=not (self._has_met or self._generation))

    def _peers(self, purpose: str) -> Peers:
        check_open_files(self.size)
        name = f"{self._name}/{self._generation}/{purpose}"
        return Peers(name, self.rank, self._timed_store, self._others_gave_up, self._look)

    def _who_left(self, seconds: float) -> _Departure | None:
        """Return which rank has left, or is lost, as the first rank noted it; None for no rank."""
        store = self._timed_store
        try:
            if store.check(self._broken_key(), seconds):
                rank, why, call, is_lost = json.loads(store.get(self._broken_key(), seconds))
                return _Departure(int(rank), str(why), str(call), bool(is_lost))
        except (RuntimeError, ValueError, TypeError):  # the store is gone too
            return None
        return None

    def _say_broken(self, seconds: float, departure: _Departure) -> None:
        try:
            # The first entry stays: later ones only follow from it.
            self._timed_store.compare_set(self._broken_key(), "", json.dumps(departure), seconds)
        except Exception as error:
            print(f"dcp_mem: the store is gone too: {error}", file=sys.stderr)


@contextmanager
def meeting(rank: int) -> Iterator[None]:
    """Raise RankFailed where the store is gone, or silent."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailed(
            "meeting the other ranks", [(rank, str(error).split("\n")[0][:300])]
        ) from None


def restart_count() -> str:
    """Return torchrun's restart count, "" where it doesn't matter.

    After a restart, ranks may meet in the same store, which has the dead ranks' addresses in it;
    the count keeps the two apart. But each torchrun counts its own failures alone: one that joined
    later, or whose ranks were restarted because of others', has another number. So it matters only
    where the store can be the same, which is one that torchrun serves.
    """
    is_served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if is_served_by_torchrun else ""


def run_token() -> str:
    """Return a token that all processes of this run's default group have in common; "" without one.

    This is no collective: no rank waits for another.

    Raises RankFailed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    store = TimedStore(default_store(), min(exchange_timeout(), _STORE_SECONDS))
    with meeting(dist.get_rank()):
        return store.compare_set("dcp_mem/run", "", uuid.uuid4().hex).decode()


_ranks: dict[tuple[object, ...], JobRanks] = {}
_connections = weakref.WeakValueDictionary[object, dist.Store]()
"""By a default group's store: the connection to it that sets of ranks share, while one is there."""


def _shared_connection(default: dist.Store, seconds: float) -> dist.Store:
    key = weakref.ref(default)
    store = _connections.get(key)
    if store is None:
        store = _connections[key] = own_connection(default, seconds)
    return store


def ranks_of(group: dist.ProcessGroup | None, purpose: Purpose | str, method: str = "") -> Ranks:
    """Return the ranks of a process group, on connections that this process keeps and reuses.

    `group`: None for the default group. `purpose`: who uses the ranks. Saves and loads, and
    different jobs, may run at the same time and must not share connections, so each purpose has its
    own. `method`: what the user has called, for texts; by default what the purpose is for. Raises
    RankFailed.
    """
    members = _members(group)
    if len(members) < 2:
        return SingleRank()
    key = _key_of(members, purpose)
    ranks = _ranks.get(key)
    if ranks is None:
        store = default_store()
        _forget_earlier_groups(store)
        ranks = _ranks[key] = JobRanks(
            dist.get_rank(group), members, purpose, BorrowedStore(store), exchange_timeout()
        )
    ranks.refresh(method=method)
    return ranks


def known_ranks(group: dist.ProcessGroup | None, purpose: Purpose | str) -> Ranks | None:
    """Return the ranks that `ranks_of` has made before; None where it hasn't. No communication."""
    members = _members(group)
    return SingleRank() if len(members) < 2 else _ranks.get(_key_of(members, purpose))


def _members(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of a process group; none without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def refuse_missing_group() -> None:
    """Make sure that ranks which a launcher has started together don't save each on its own.

    They would all make the same checkpoint of the same job.

    Raises ConfigError.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if (dist.is_available() and dist.is_initialized()) or not size.isdecimal() or int(size) < 2:
        return
    if "RANK" not in os.environ:  # launchers set both
        return
    raise ConfigError(
        f"WORLD_SIZE is {size}, but torch.distributed isn't initialised: call "
        "torch.distributed.init_process_group first, on all ranks; where this process alone saves, "
        "unset WORLD_SIZE or pass no_dist=True to dcp_mem.save"
    )


def _forget_earlier_groups(default: dist.Store) -> None:
    """Close what belongs to an earlier default group: the process has been restarted within."""
    for key in [key for key in list(_ranks) if key[1] != weakref.ref(default)]:
        _ranks.pop(key).close()


def _key_of(members: tuple[int, ...], purpose: Purpose | str) -> tuple[Any, ...]:
    return (purpose, weakref.ref(default_store()), *members)


def default_store() -> dist.Store:
    """Return the store that the ranks met in, which torch gives under a private name alone."""
    return dist.distributed_c10d._get_default_store()


def held_store() -> object:
    """Return what keeps the store served that the ranks met in; None without one.

    For work that goes on behind training, and may outlive the groups.
    """
    return default_store() if dist.is_available() and dist.is_initialized() else None


def has_groups() -> bool:
    """Return whether the process has process groups."""
    return dist.is_available() and dist.is_initialized()


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in a group, or of all, whether they take part in a call or not."""
    return dist.get_world_size(group) if has_groups() else 1


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """Return this rank's number in a group, or among all; 0 without process groups."""
    return dist.get_rank(group) if has_groups() else 0


def is_first_of_node() -> bool:
    """Return whether this process is its node's first, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK") or 0) == 0


def _leave_groups() -> None:
    for ranks in list(_ranks.values()):  # a thread may still begin a call
        ranks.close()


atexit.register(_leave_groups)
