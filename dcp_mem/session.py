"""What one process keeps of a job between saves: its slots and mappings, layouts, catalogs and agent.

Writers are light and may be pickled into another process for every save (`dcp.async_save`'s process executor); what is
worth keeping lives here, once for each process, memory root and job.
"""

from __future__ import annotations

import atexit
import ctypes
import operator
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dcp_mem import faults
from dcp_mem.agent import AgentHandle
from dcp_mem.config import Settings
from dcp_mem.errors import DcpMemError
from dcp_mem.events import log
from dcp_mem.flushing.flusher import Flusher, Registration, registration_of
from dcp_mem.format.frames import QUANTISED, Spec, Specs, frame_pieces, frames_key, lay_out
from dcp_mem.format.layout import Layout
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.segments import Segments
from dcp_mem.heap import give_back_heap
from dcp_mem.memory import pinning
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import JobLock, RunIdentity
from dcp_mem.memory.shows import Shows
from dcp_mem.memory.slots import Slot, SlotPool
from dcp_mem.ranks import Ranks, world_size
from dcp_mem.replicating.replicator import Replicator
from dcp_mem.replicating.transfers import Making

_LAYOUTS_KEPT = 8
_DRAIN_AT_EXIT = 60.0
_CANCEL_AT_EXIT = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class PlanLayout:
    """A plan's layout.

    expected: dtypes and shapes as the plan has them. dense: as the tensors really have them, None for the slow road.
    is_plain: whether that is the same for every tensor. described: the layout as the catalog has it, for readers that go by
    the plan. frames: names the heads and tails; other shapes or dtypes may well lie at the same offsets.
    """

    expected: Specs
    dense: Sequence[Spec | None]
    layout: Layout
    described: Layout
    frames: str
    is_plain: bool


class Home(NamedTuple):
    """Where a rank runs: its node, and what fails together with that."""

    node: str
    domain: str


@dataclass(frozen=True, slots=True)
class Topology:
    """Who shares a node with whom, and which nodes fail together.

    nodes: node id of each rank. domains: what fails together with each rank's node.
    """

    nodes: tuple[str, ...]
    domains: tuple[str, ...]
    rank: int

    @property
    def is_leader(self) -> bool:
        return self.nodes.index(self.nodes[self.rank]) == self.rank

    def neighbours(self, node: str) -> list[int]:
        return [rank for rank, other in enumerate(self.nodes) if other == node]


@dataclass(slots=True)
class PersistCounter:
    """How long ago a save last went to storage."""

    saves: int | None = None
    at: float | None = None

    def note(self, persisted: bool) -> None:
        if persisted:
            self.saves, self.at = 1, time.monotonic()
        elif self.saves is not None:
            self.saves += 1

    def seconds(self) -> float | None:
        return None if self.at is None else time.monotonic() - self.at


@dataclass(slots=True)
class SavedPlan:
    """What the last complete save of a plan was made of; while it stays the same, the catalog does.

    catalog: its key. items: fingerprint of this rank's items, by name and offset. segments: of all ranks. save_id: of that save.
    """

    catalog: str
    items: int
    segments: Segments
    save_id: str = ""


class Session:
    """One process's part in saving one job. Not thread-safe but for the threads that it runs itself."""

    def __init__(self, root: str, job: str, identity: RunIdentity) -> None:
        self.memory = JobMemory(root, job)
        self.lock = JobLock(self.memory.directory, job, identity)
        self.slots = SlotPool(self.memory.slots)
        self.persisted = PersistCounter()
        self.saved: dict[tuple[str, str, str], SavedPlan] = {}
        self.collective: object = None  # what saving/collective.py keeps
        self.replicator = Replicator(self.memory, self.slots)
        self.expected_copies: dict[tuple[str, str], tuple[int, ...]] = {}  # by group: what came to this rank last
        self.swept = False
        self.heap_grew = False
        self._layouts: OrderedDict[int, PlanLayout] = OrderedDict()
        self.catalogs = Catalogs(self.memory.directory)
        self._prefaulting: threading.Thread | None = None
        self._prefault_wanted = threading.Event()
        self._agent = AgentHandle(root)
        self._nodes: frozenset[str] | None = None  # on which the job's ranks run, where a save of all of them has told
        self._seen_nodes: tuple[str, ...] = ()  # by rank, what these were made of
        self._told_nodes: frozenset[str] | None = None
        self._thread: _FlushThread | None = None
        self._shows: Shows | None = None
        self.warned: set[str] = set()  # what need not be said again

    # -- layouts ------------------------------------------------------------------------------------------------

    def plan_layout(self, expected: Specs) -> PlanLayout:
        """The layout of a plan with these dtypes and shapes: the one used last time if there was one."""
        for key, known in reversed(self._layouts.items()):
            if known.expected == expected:
                self._layouts.move_to_end(key)
                return known
        return self.learn_layout(expected, [spec if spec[0] not in QUANTISED else None for spec in expected])

    def learn_layout(self, expected: Specs, dense: Sequence[Spec | None]) -> PlanLayout:
        """Lay a plan out anew: its tensors turned out to have other dtypes or shapes than it says, or no dense form."""
        layout = lay_out([spec for spec in dense if spec is not None])
        is_as_planned = [spec == plan for spec, plan in zip(dense, expected, strict=True) if spec is not None]
        for key in [key for key, known in self._layouts.items() if known.expected == expected]:
            del self._layouts[key]
        frames = frames_key([spec for spec in dense if spec is not None])
        plan_layout = PlanLayout(
            expected, dense, layout, layout.describing(is_as_planned), frames, is_plain=list(expected) == dense
        )
        self._layouts[id(plan_layout)] = plan_layout
        while len(self._layouts) > _LAYOUTS_KEPT:
            self._layouts.popitem(last=False)
        return plan_layout

    def put_frames(self, slot: Slot, plan_layout: PlanLayout) -> None:
        """Write heads and tails into a mapped slot, unless it holds this layout's already."""
        if slot.frames != plan_layout.frames:
            slot.frames = ""
            specs = [spec for spec in plan_layout.dense if spec is not None]
            for offset, piece in frame_pieces(plan_layout.layout, specs):
                ctypes.memmove(slot.address + offset, piece, len(piece))
            slot.frames = plan_layout.frames
        pinning.pin(slot)

    # -- prefaulting --------------------------------------------------------------------------------------------

    def prefault(
        self, plan_layout: PlanLayout, nbytes: int, checkpoints: int, copies: Sequence[int] = ()
    ) -> threading.Thread:
        """Make free slots for so many checkpoints in the background.

        For each, one of `nbytes` that is ready to be copied into by this layout, and one for each of these copies' sizes.
        """
        self.stop_prefaulting()
        self._prefault_wanted.set()

        def work() -> None:
            wanted = self._prefault_wanted.is_set
            try:
                for count in range(1, checkpoints * (1 + len(copies)) + 1):  # one checkpoint's after the other's
                    kind = (count - 1) % (1 + len(copies))
                    if kind:
                        self.slots.prefault(count, copies[kind - 1], lambda slot: None, wanted)
                    else:
                        self.slots.prefault(count, nbytes, lambda slot: self.put_frames(slot, plan_layout), wanted)
            except Exception:
                log.warning("prefaulting failed; saves will fault their pages in themselves", exc_info=True)
            if self.heap_grew:
                give_back_heap()

        self._prefaulting = threading.Thread(target=work, name="dcp_mem-prefault", daemon=True)
        self._prefaulting.start()
        return self._prefaulting

    def stop_prefaulting(self) -> None:
        """End the background work where it is; what it has done by then isn't lost."""
        self._prefault_wanted.clear()
        if self._prefaulting is not None:
            self._prefaulting.join()
            self._prefaulting = None

    def prefault_spares(
        self,
        settings: Settings,
        plan_layout: PlanLayout,
        nbytes: int,
        rank: int,
        node_nbytes: int,
        copies: Sequence[int] = (),
        pending: int = 0,
    ) -> None:
        """Bring this rank's slots up to what `keep` + 1 checkpoints take, in the background, as far as the memory budget goes.

        nbytes: of this rank's slot. node_nbytes: what one checkpoint takes on this node, copies included. copies: the sizes of
        those that come to this rank. pending: bytes that are about to be taken on this node for copies.
        """
        # In this order: a segment that retires in between is counted twice, and never overlooked.
        in_use = self.memory.count_segments(rank)
        free = self.slots.free_count() // (1 + len(copies))
        room = (self.memory.free_bytes() - pending) // max(node_nbytes, 1) - 1
        if settings.memory_limit is not None:
            room = min(room, (settings.memory_limit - self.memory.allocated_bytes() - pending) // max(node_nbytes, 1))
        wanted = min(settings.keep + 1 - in_use, free + max(room, 0))
        if wanted > free:
            self.prefault(plan_layout, nbytes, wanted, copies)

    def give_back_heap(self) -> None:
        """Once after a plan was described: what that took is free by now, and tens of megabytes."""
        if self.heap_grew:
            self.heap_grew = False
            give_back_heap()

    def slots_for(self, makings: Iterable[Making]) -> dict[str, Slot | str]:
        """By file, a slot for what comes about here, with nothing populated yet; or why there is none."""
        return {making.file: self._slot_for(making) for making in makings}

    def _slot_for(self, making: Making) -> Slot | str:
        try:
            return self.slots.take(making.room, "")
        except (DcpMemError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    # -- neighbours and agent -----------------------------------------------------------------------------------

    def topology(self, ranks: Ranks, failure_domain: str = "") -> Topology:
        """Who shares a node; asked once for each group of ranks. failure_domain: of this node, where it isn't one of its own."""
        known = ranks.notes.get(self.memory.node)
        if known is None:
            domain = f"domain {failure_domain}" if failure_domain else f"node {self.memory.node}"
            found = ranks.all_reduce({ranks.rank: Home(self.memory.node, domain)}, operator.or_)
            nodes, domains = zip(*(found[rank] for rank in range(ranks.size)), strict=True)
            known = ranks.notes[self.memory.node] = nodes, domains
            ranks.arrange(nodes)
        if known[0] is not self._seen_nodes and ranks.size == world_size():
            self._seen_nodes, self._nodes = known[0], frozenset(known[0])
        return Topology(known[0], known[1], ranks.rank)

    def wake_agent(self, settings: Settings, *, now: bool = False) -> None:
        """Have pending checkpoints flushed, by the agent or by this process's own thread.

        now: those that failed too, which otherwise have their time.
        """
        if settings.url is None:
            return
        registration = registration_of(settings, now=now, nodes=self._nodes)
        self._told_nodes = self._nodes
        if settings.agent == "process":
            try:
                self._agent.wake(registration)
            except OSError as error:
                log.error(
                    "the agent can't be started, so nothing reaches storage (agent='thread' needs none): %s", error
                )
            return
        if self._thread is None:
            self._thread = _FlushThread(self.memory.root)
        self._thread.wake(replace(registration, environment=None))

    def tell_nodes(self, settings: Settings) -> None:
        """Have the agent know on which nodes the job runs now, once, where something is pending: it may wait for other ones."""
        if self._nodes != self._told_nodes:
            self._told_nodes = self._nodes
            if any(held.pending for held in self.memory.held()):
                self.wake_agent(settings)

    def publish(self, manifest: Manifest) -> None:
        """Make a checkpoint COMPLETE on this node, in the place of an older one of its name. Its catalog is known here."""
        directory = self.memory.make_checkpoint_directory(manifest.name)
        replaced = [held for held in self.memory.find(manifest.name) if held.manifest.scope == manifest.scope]
        self.catalogs.link(manifest.catalog, directory)
        faults.point("complete.catalog")
        self.memory.publish(manifest)
        faults.point("complete.manifest")
        for held in replaced:
            self.memory.retire_replaced(held)

    def show(self, manifest: Manifest) -> None:
        """Put `.metadata` beside a complete checkpoint, in the background."""
        if self._shows is None:
            self._shows = Shows(self.memory, self.catalogs)
        self._shows.add(manifest)

    def close(self, *, drop_free: bool) -> None:
        """Give back slots, mappings and the job's lock. drop_free: and the memory of free slots."""
        self.stop_prefaulting()
        self.replicator.wait()
        if self._shows is not None:
            self._shows.close()
            self._shows = None
        if self._thread is not None:
            self._thread.stop()
        self.slots.close(keep_free=not drop_free)
        if drop_free:
            self.memory.sweep()
            self.memory.drop_free_slots()
            self.catalogs.clear()
        self.lock.close()

    def drain(self) -> None:
        """Let this process's threads finish what is pending."""
        self.replicator.wait(_DRAIN_AT_EXIT)
        if self.replicator.is_busy:
            self.replicator.cancel()
            self.replicator.wait(_CANCEL_AT_EXIT)
        if self._shows is not None:
            self._shows.close()
        if self._thread is not None:
            self._thread.drain()


class _FlushThread:
    """The flusher inside the trainer, for platforms that allow no second process."""

    def __init__(self, root: str) -> None:
        self._flusher = Flusher(root)
        self._woken, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="dcp_mem-flush", daemon=True)
        self._thread.start()

    def wake(self, registration: Registration) -> None:
        self._flusher.register(registration)
        self._woken.set()

    def stop(self) -> None:
        """End it after the checkpoint that it is at."""
        self._stopping = True
        self._woken.set()
        self._thread.join(timeout=_DRAIN_AT_EXIT)

    def drain(self) -> None:
        """Give what is pending a last chance as the process ends; what stays is flushed by the job's next start."""
        deadline = time.monotonic() + _DRAIN_AT_EXIT
        self._flusher.retry()
        self._woken.set()
        while time.monotonic() < deadline and self._flusher.is_busy():
            time.sleep(0.05)

    def _work(self) -> None:
        while not self._stopping:
            self._woken.clear()
            if self._flusher.flush_next():
                continue
            due = self._flusher.seconds_until_next()
            self._woken.wait(1.0 if due is None else min(due, 1.0))


_sessions: dict[tuple[int, str, str], Session] = {}
_guard = threading.Lock()


def session_for(settings: Settings, identity: RunIdentity) -> Session:
    """This process's session of the job, opened now if need be. Raises JobInUse, MemoryRootRefused, MemoryUnavailable."""
    key = (os.getpid(), settings.memory_root, settings.job)
    with _guard:
        session = _sessions.get(key)
        if session is None or not os.path.isdir(session.memory.directory):
            if session is not None:
                session.lock.close()
            session = _sessions[key] = Session(settings.memory_root, settings.job, identity)
        return session


def open_session(settings: Settings) -> Session | None:
    """This process's session of the job if it has one."""
    return _sessions.get((os.getpid(), settings.memory_root, settings.job))


def close_session(settings: Settings, *, drop_free: bool) -> None:
    with _guard:
        session = _sessions.pop((os.getpid(), settings.memory_root, settings.job), None)
    if session is not None:
        session.close(drop_free=drop_free)


def _drain_flush_threads() -> None:
    for (pid, _, _), session in list(_sessions.items()):
        if pid == os.getpid():
            session.drain()


# Before concurrent.futures ends its pools, which plain atexit functions come too late for.
getattr(threading, "_register_atexit", atexit.register)(_drain_flush_threads)
