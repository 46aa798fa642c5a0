"""NIXL agents: they register memory for a peer to read, and read the memory of a peer.

NIXL moves bytes by UCX: over InfiniBand or RoCE, between processes of one machine, or over TCP.
What was learned of it (nixl 1.5.1, with UCX inside), and why it is used as it is here:

- Releasing a read that is under way doesn't stop it, nor does removing the remote agent: bytes
  still come into memory (NIXL's pull request 2044 measures that too). Only an agent that is gone
  writes nothing any more. So each end of a channel has agents of its own.
- A progress thread takes half a core, also where nothing is moved. So there is none: whoever waits
  makes progress.
- An agent takes memory that is registered again, at the same address, for what it knew before. So
  a source is made anew after memory has been deregistered.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from dcp_mem.common.releases import warn_if_untested

_BACKEND, _MEMORY = "UCX", "DRAM"
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
"""Each error is raised here, with its text; printed as well, it would look like one of the job."""


class Extent(NamedTuple):
    """Bytes of this process's memory."""

    address: int
    nbytes: int

    def covers(self, other: Extent) -> bool:
        """Return whether all of another extent lies in this one."""
        end = other.address + other.nbytes
        return self.address <= other.address and end <= self.address + self.nbytes


def extent_of(data: Any) -> Extent:
    """Return where a buffer lies.

    `data`: a contiguous buffer of at least one byte.
    """
    array = np.frombuffer(data, np.uint8)
    return Extent(array.ctypes.data, array.nbytes)


class PeerSilent(RuntimeError):
    """The peer's process doesn't answer in time."""


def import_trouble() -> str:
    """Return why NIXL can't be imported here; "" if it can."""
    try:
        _api()
    except Exception as error:  # whatever its libraries don't find
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return ""


def _api() -> Any:
    warn_if_untested("nixl")
    with _environment({} if "nixl" in sys.modules else _QUIET):
        return importlib.import_module("nixl")


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set variables that aren't set, for what is read while a library is loaded."""
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


class _Agent:
    """An agent of NIXL's, and the memory that it has registered."""

    def __init__(self) -> None:
        """Make the agent.

        Raises RuntimeError.
        """
        nixl = _api()
        self.name = secrets.token_hex(8)
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        with _as_runtime_error("NIXL has no agent"), _environment(_QUIET):
            self._agent: Any = nixl.nixl_agent(self.name, config)
            self._agent.create_backend(_BACKEND)

    def registered(self, extent: Extent) -> Any:
        """Register memory; return what deregisters it."""
        with _as_runtime_error(f"{extent.nbytes} bytes can't be registered"):
            return self._agent.register_memory([(*extent, 0, "")], _MEMORY)

    def deregister(self, registered: Any) -> None:
        """Deregister memory of which nothing is read any more."""
        with _as_runtime_error("memory can't be deregistered"):
            self._agent.deregister_memory(registered)

    def progress(self) -> None:
        """Let UCX answer other processes."""
        with suppress(Exception):  # a peer that is gone; whoever waits for it notices
            self._agent.get_new_notifs()

    def close(self) -> None:
        """End the agent. None of this process's memory is written to any more."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.agent = None  # an error may keep frames that have the Python object

    def leak(self) -> None:
        """Never end the agent: a forked child would end its parent's connections."""
        _keep_for_ever(self._agent)


class Source(_Agent):
    """Memory that another process may read, until the source is closed.

    `name`: tells this source from all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._extents: list[tuple[Extent, Any]] = []
        self.kept_nbytes = 0

    def offer(self, extent: Extent, keep: Any) -> bytes:
        """Let memory be read; return what the reader needs for it, once for each registration."""
        if any(known.covers(extent) for known, _ in self._extents):
            return b""
        registered = self.registered(extent)
        self._extents.append((extent, keep))
        self.kept_nbytes += extent.nbytes
        with _as_runtime_error("NIXL can't describe memory"):
            is_first = len(self._extents) == 1
            described: bytes = self._agent.get_partial_agent_metadata(
                registered, is_first, [_BACKEND]
            )
        return described

    def close(self) -> None:
        super().close()
        self._extents.clear()


class Sink(_Agent):
    """Reads the memory of another process's sources."""

    def __init__(self) -> None:
        super().__init__()
        self._source = ""

    def learn(self, source: str, described: bytes, seconds: float) -> None:
        """Take what a source said of its memory; forget an earlier source, which nothing reads.

        Raises PeerSilent.
        """
        if source == self._source:  # is connected
            with _as_runtime_error("NIXL can't take the sender's memory"):
                self._agent.add_remote_agent(described)
            return
        agent, earlier, self._source = self._agent, self._source, source

        def connect() -> None:
            if earlier:
                agent.remove_remote_agent(earlier)
            agent.add_remote_agent(described)

        # NIXL waits for ever for a peer that has stopped, or whose cable is pulled.
        with _as_runtime_error("NIXL can't take the sender's memory"):
            _in_time(connect, seconds)

    def read(self, own: Extent, remote: Extent, is_registered: bool) -> Read:
        """Begin to read."""
        return Read(self, self._agent, self._source, own, remote, is_registered)


def _in_time(act: Callable[[], None], seconds: float) -> None:
    """Call `act` in a thread, which is left behind, with what it uses, where it takes too long."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            act()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="dcp_mem-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise PeerSilent("it doesn't answer")


class Read:
    """A read that is under way. Closing its sink ends it; letting go of it doesn't."""

    def __init__(
        self, sink: Sink, agent: Any, source: str, own: Extent, remote: Extent, is_registered: bool
    ) -> None:
        self._agent = agent
        self._registered = None if is_registered else sink.registered(own)
        with _as_runtime_error("reading the sender's memory"):
            self._handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(*own, 0)], _MEMORY),
                agent.get_xfer_descs([(*remote, 0)], _MEMORY),
                source,
            )
            self._state = agent.transfer(self._handle)
        self._end_if_done()

    def is_done(self) -> bool:
        """Make progress; return whether all bytes have come.

        Raises RuntimeError.
        """
        if self._state == "PROC":
            with _as_runtime_error("reading the sender's memory"):
                self._state = self._agent.check_xfer_state(self._handle)
            self._end_if_done()
        return bool(self._state == "DONE")

    def _end_if_done(self) -> None:
        if self._state == "PROC":
            return
        with suppress(Exception):
            self._handle.release()
            if self._registered is not None:
                self._agent.deregister_memory(self._registered)
        self._agent = self._handle = None
        if self._state != "DONE":
            raise RuntimeError(f"reading the sender's memory: NIXL says {self._state}")

    def leak(self) -> None:
        """Never let go of the read, which is one of the parent of this forked child."""
        _keep_for_ever(self._handle)

    def forget(self) -> None:
        """Let go of the read: its sink is about to be closed."""
        if self._handle is not None:
            with suppress(Exception):
                self._handle.release()
        self._agent = self._handle = None


def _keep_for_ever(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextmanager
def _as_runtime_error(what: str) -> Iterator[None]:
    try:
        yield
    except PeerSilent:
        raise
    except Exception as error:
        text = str(error) or type(error).__name__
        raise RuntimeError(f"{what}: {text}") from None
