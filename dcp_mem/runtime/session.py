"""The state of a job that one process keeps between saves.

Writers are light, and `dcp.async_save`'s process executor pickles them into another process for
every save. What is worth keeping lives here instead, once for each process, memory root and job.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from dcp_mem.common import faults
from dcp_mem.common.gc_pause import GrownHeap
from dcp_mem.common.log import log
from dcp_mem.common.parallel import KeptThreads, before_pools_end, let_caller_return
from dcp_mem.config import Settings
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata_template import MetadataTemplate, template_of
from dcp_mem.memory.catalogs import Catalogs
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import JobLock, RunIdentity
from dcp_mem.memory.slots import SlotPool
from dcp_mem.replicating.replicator import Replicator
from dcp_mem.runtime.agent_link import AgentLink
from dcp_mem.runtime.frozen import FrozenTensors
from dcp_mem.runtime.last_saves import LastSaves, RunNumbers
from dcp_mem.runtime.layouts import Layouts
from dcp_mem.runtime.prefaulting import Prefaulting
from dcp_mem.runtime.topology import JobNodes
from dcp_mem.runtime.turns import Turn, Turns

T = TypeVar("T")

_DRAIN_AT_EXIT = _SHOW_AT_END = 60.0
_CANCEL_AT_EXIT = 5.0
_POLL_SECONDS = 0.005


class Session:
    """One process's hold on one job: opens the parts, closes them, and does what needs several.

    Threads of the process share it. What a save does, it does in its turn (`enter_session`), one
    save at a time: planning together, agreeing, sealing, publishing, retention, and all that is
    written into `last_saves`. `prepare` takes a turn as well, and so does the session's end.

    Beside a save that has its turn, other threads may, at any time:

    - claim, share and abandon slots, and copy into those that they have claimed;
    - look for layouts and catalogs, and learn layouts;
    - recognise state dicts by known plans (`OwnPlans.plan`);
    - start and stop prefaulting;
    - wake the agent, and look at `memory`, as `status` and `wait` do;
    - load, also where that repairs copies.

    No lock is held while bytes are copied, or while ranks are talked to.
    """

    def __init__(self, root: str, job: str, identity: RunIdentity) -> None:
        """Open the job's memory."""
        self.memory = JobMemory(root, job)
        self.lock = JobLock(self.memory.directory, job, identity)
        kept = _kept_slots.pop((os.getpid(), self.memory.slots), None)
        self.slots = kept if kept is not None else SlotPool(self.memory.slots)
        self.catalogs = Catalogs(self.memory.directory)
        self.layouts = Layouts()
        self.frozen = FrozenTensors(self.memory, self.slots, self.layouts)
        self.heap = GrownHeap()
        self.prefaulting = Prefaulting(self.memory, self.slots, self.heap)
        self.last_saves = LastSaves()
        self.numbers = RunNumbers(self.memory)
        self.replicator = Replicator(self.memory, self.slots)
        self.publisher = Publisher(self.memory, self.catalogs)
        self.nodes = JobNodes(self.memory.node)
        self.turns = Turns()
        self._end: threading.Event | None = None  # set once it is closed; None: it stays open
        self.agent = AgentLink(root)
        self._noted_run = ""

    def wake_agent(self, settings: Settings, *, now: bool = False, is_waiting: bool = False) -> str:
        """Have pending checkpoints flushed."""
        nodes, run = self.nodes.of_all_ranks, self.numbers.token
        return self.agent.wake(settings, nodes, run, now=now, is_waiting=is_waiting)

    def announce_run(self, settings: Settings, run: str, *, is_flushed: bool) -> None:
        """Have the flusher know a run's settings before it can find the run's first checkpoint.

        A flusher of an earlier run looks at memory by itself. It would flush the checkpoint as that
        run was to be flushed: with its credentials, retention and overwrite=.
        """
        if run != self._noted_run:
            self.lock.note_run(run, settings.url)
            self._noted_run = run
        if is_flushed and not self.agent.knows(run):
            self.wake_agent(settings)

    def tell_nodes(self, settings: Settings) -> None:
        """Tell the agent on which nodes the job runs now, if that is news and something is pending.

        The flush of a checkpoint of an earlier run may be waiting for nodes that are gone. An agent
        that was killed is followed by another one.
        """
        is_behind = self.agent.is_behind(self.nodes.of_all_ranks)
        if is_behind and any(checkpoint.pending for checkpoint in self.memory.checkpoints()):
            self.wake_agent(settings)

    def wait_for_threads(self) -> None:
        """Return once no thread copies into a slot any more. Call it in the turn of `close`.

        Where this is interrupted, the session can still be used.
        """
        self.prefaulting.close()
        self.frozen.wait()
        self.replicator.wait()
        self.publisher.close()

    def close(self, *, keep_slots: bool) -> None:
        """Give back slots, mappings and the job's lock. Call it in a turn of its own.

        Before it, in this turn, `wait_for_threads` has returned.
        """
        steps: list[Callable[[], object]] = [self.agent.stop]
        if keep_slots:
            steps += [self._keep_slots]
        else:
            steps += [
                self.slots.close,
                self.memory.sweep,
                self.memory.drop_free_slots,
                self.catalogs.clear,
                self.lock.note_end,
            ]
        with ExitStack() as stack:  # each step is taken, whatever an earlier one raises
            for step in reversed([*steps, self.lock.close]):
                stack.callback(step)

    def _keep_slots(self) -> None:
        self.slots.settle()
        _kept_slots[os.getpid(), self.memory.slots] = self.slots

    def drain(self) -> None:
        """Let this process's threads finish what is pending: first the saves that are under way."""
        behind, until = self.turns.take(), time.monotonic() + _DRAIN_AT_EXIT
        while not behind.is_next and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        behind.end()
        self.frozen.cancel()
        self.replicator.wait(_DRAIN_AT_EXIT)
        if self.replicator.is_busy:
            self.replicator.cancel()
            self.replicator.wait(_CANCEL_AT_EXIT)
        self.publisher.close()
        self.agent.drain()


class Publisher:
    """Makes checkpoints COMPLETE on this node, in turn, and visible to stock readers."""

    def __init__(self, memory: JobMemory, catalogs: Catalogs) -> None:
        self._memory, self._catalogs = memory, catalogs
        self._thread = KeptThreads(1, "dcp_mem-show")
        self._last: Future[None] | None = None
        self._template: tuple[str, MetadataTemplate] | None = None
        self._guard = threading.Lock()  # not held while the thread ends

    def publish(self, manifest: Manifest, *, sealed: bool = False) -> None:
        """Make a checkpoint COMPLETE, in the place of an older one of its name.

        Its catalog is there already, and so are its segments if they are `sealed`, with their
        directory: the manifest comes last.
        """
        directory = self._memory.checkpoint_directory(manifest.name)
        if not sealed:
            self._memory.make_checkpoint_directory(manifest.name)
        replaced = [
            checkpoint
            for checkpoint in self._memory.find(manifest.name)
            if checkpoint.manifest.scope == manifest.scope
        ]
        self._catalogs.link(manifest.catalog, directory)
        faults.point("complete.catalog")
        self._memory.publish(manifest, sealed=sealed)
        faults.point("complete.manifest")
        for checkpoint in replaced:
            self._memory.retire_replaced(checkpoint)

    def show(self, manifest: Manifest) -> None:
        """Put `.metadata` beside a complete checkpoint, if it lies on one node alone, behind it."""
        if len(manifest.nodes) == 1:
            with self._guard:
                self._last = self._thread.submit(partial(self._show, manifest))

    def close(self) -> None:
        """Finish what is being put there; a later checkpoint starts another thread."""
        with self._guard:
            last, self._last = self._last, None
            self._thread.close()
        if last is not None:
            wait_for([last], _SHOW_AT_END)

    def _show(self, manifest: Manifest) -> None:
        let_caller_return()
        try:
            if self._template is None or self._template[0] != manifest.catalog:
                template = template_of(self._catalogs.get(manifest.catalog))
                self._template = manifest.catalog, template
            self._memory.put_stock_metadata(manifest, self._template[1])
        except Exception as error:  # the checkpoints behind it have their turn all the same
            log.warning(
                "%s has no .metadata in memory, for torch's own readers: %r", manifest.name, error
            )


_sessions: dict[tuple[int, str, str], Session] = {}
_kept_slots: dict[tuple[int, str], SlotPool] = {}
"""By process and directory, slots that a session has left to the next one."""
_guard = threading.Lock()  # held while a session is opened, not while one is closed


def session_for(settings: Settings, identity: RunIdentity) -> Session:
    """Return this process's session of the job, opened now if need be.

    A session that another thread closes is waited for, and followed by a new one; but a thread that
    has its turn in it goes on with it.
    """
    return _session_and(lambda session: session, settings, identity, is_next=False)


def enter_session(settings: Settings, identity: RunIdentity) -> tuple[Session, Turn]:
    """Return this process's session of the job, as `session_for` does, with a turn in it.

    The session stays open until the turn is over. The turn isn't waited for here. Earlier turns
    that the calling thread holds are over: a thread makes one save at a time.
    """
    return _session_and(
        lambda session: (session, session.turns.take()), settings, identity, is_next=True
    )


def _session_and(
    take: Callable[[Session], T], settings: Settings, identity: RunIdentity, *, is_next: bool
) -> T:
    """Return what is taken of the job's session, before anybody can close that."""
    key = (os.getpid(), settings.memory_root, settings.job)
    while True:
        with _guard:
            session = _sessions.get(key)
            end = None if session is None else session._end
            if session is None or (end is None and not os.path.isdir(session.memory.directory)):
                if session is not None:
                    session.lock.close()
                session = _sessions[key] = Session(settings.memory_root, settings.job, identity)
            if is_next:
                session.turns.abandon_here()
            if end is None or session.turns.has_here():
                return take(session)
        end.wait()


def open_session(settings: Settings) -> Session | None:
    """Return this process's session of the job if it has one."""
    return _sessions.get((os.getpid(), settings.memory_root, settings.job))


def close_session(settings: Settings, *, keep_slots: bool = False) -> None:
    """Close this process's session of the job, if it has one, once all saves are over.

    Saves that have asked for their turn by now come first; those of threads that have died don't
    count. Where another thread closes the session already, this waits for it.
    """
    key = (os.getpid(), settings.memory_root, settings.job)
    with _guard:
        session = _sessions.get(key)
        if session is None:
            return
        session.turns.abandon_here()
        earlier = session._end
        if earlier is None:
            session._end, turn = threading.Event(), session.turns.take()
    if earlier is not None:
        earlier.wait()
        return
    _close(key, session, turn, keep_slots=keep_slots)


def _close(key: tuple[int, str, str], session: Session, turn: Turn, *, keep_slots: bool) -> None:
    """Close a session in this turn, and let those go on who wait for that.

    Where the wait for the turn, or for the session's threads, is interrupted, it stays open.
    """
    end, is_closing = session._end, False
    assert end is not None
    try:
        with turn:
            session.wait_for_threads()
            is_closing = True
            session.close(keep_slots=keep_slots)
    finally:
        with _guard:
            session._end = None
            if is_closing and _sessions.get(key) is session:
                del _sessions[key]
        end.set()


def _forget_parent() -> None:
    """After a fork: another thread of the parent may have had the guard."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)


def _drain_sessions() -> None:
    for (pid, _, _), session in list(_sessions.items()):
        if pid == os.getpid():
            session.drain()


before_pools_end(_drain_sessions)
