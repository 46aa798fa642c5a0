"""The replica that has the state: listens, and gives the staged state to those that ask."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import WeakSet

import torch.distributed as dist

from dcp_mem.comm.addresses import listening_socket
from dcp_mem.comm.control_line import ControlLine
from dcp_mem.comm.greetings import Door, accepted
from dcp_mem.comm.transfer import send
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.errors import DcpMemError
from dcp_mem.integrations.torchft.staged import StagedState
from dcp_mem.integrations.torchft.talk import Say, Talk, met

_POLL_SECONDS = 0.2
_FIRST_SECONDS = 10.0
"""The longest that a peer may take to say what it wants."""
_LOOK_SECONDS = 0.05
"""How often a thread that waits for a step looks whether its peer is still there."""


class Server:
    """Gives the newest staged state to the replicas that ask for it."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._door = Door(listening_socket())
        self._host, port = self._door.address
        token = self._door.token.hex()
        self.metadata = json.dumps({"host": self._host, "port": port, "token": token})
        self._changed = threading.Condition()
        self._staged: StagedState | None = None
        self._expires, self._left = 0.0, 0
        self._lines = WeakSet[ControlLine]()
        self._meeting: dist.TCPStore | None = None
        self._is_closed, self._home = False, os.getpid()
        _all_servers.add(self)
        self._thread = daemon(self._listen, "dcp_mem-torchft")

    def offer(self, staged: StagedState, peers: int, seconds: float) -> None:
        """Give out this state in place of the last, until all peers have it or time is over."""
        with self._changed:
            last, self._staged = self._staged, staged
            self._expires, self._left = time.monotonic() + seconds, peers
            self._changed.notify_all()
        if last is not None:
            last.drop()

    def close(self, *, wait: bool = True) -> None:
        """Stop, drop what is staged, and break off what is under way. Closing twice is fine."""
        if os.getpid() != self._home:
            return  # all of it is the parent's
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if wait:
            self._thread.join()
        for line in list(self._lines):
            line.close()
        self.drop()
        self._meeting = None

    def drop(self) -> None:
        """Give nothing out any more; who reads it goes on."""
        self._drop_if(lambda staged: True)

    def _drop_if(self, is_unwanted: Callable[[StagedState], bool]) -> None:
        with self._changed:
            staged = self._staged
            if staged is None or not is_unwanted(staged):
                return
            self._staged = None
        staged.drop()

    # -- the thread that listens -------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._is_closed:
            with suppress(RuntimeError):  # nobody has come
                _, connection = accepted(self._door, time.monotonic() + _POLL_SECONDS)
                line = ControlLine(connection)
                self._lines.add(line)
                # A thread of its own: one peer must not wait for another.
                daemon(partial(self._serve, line), "dcp_mem-torchft-peer")
            self._drop_if(lambda staged: time.monotonic() > self._expires)
        self._door.close()

    # -- a thread for each peer --------------------------------------------------------------------

    def _serve(self, line: ControlLine) -> None:
        talk = Talk(line, "the replica that heals", time.monotonic() + _FIRST_SECONDS)
        try:
            wanted = talk.heard(Say.WANTED)
            talk.deadline = time.monotonic() + float(wanted["seconds"])
            self._give(talk, int(wanted["step"]))
        except (DcpMemError, RuntimeError, OSError, ValueError, KeyError) as error:
            log.warning("another replica doesn't get the state from here: %s", error)
        finally:
            talk.close()

    def _give(self, talk: Talk, step: int) -> None:
        staged = self._staged_at(talk, step)
        if isinstance(staged, str):
            talk.say(Say.REFUSED, why=staged)
            return
        with staged.read() as is_there:
            if not is_there:
                talk.say(Say.REFUSED, why=f"the state of step {step} is there no more")
                return
            self._hand_over(talk, staged)
        with self._changed:
            self._left -= staged is self._staged
        self._drop_if(lambda offered: offered is staged and self._left <= 0)

    def _staged_at(self, talk: Talk, step: int) -> StagedState | str:
        """Return the state of that step once it is staged, or why it won't be."""
        with self._changed:
            while not self._is_closed and not talk.is_over() and talk.seconds_left():
                staged = self._staged
                if staged is not None and staged.step == step:
                    return staged
                if staged is not None and staged.step > step:
                    return f"step {step} was asked for, and step {staged.step} is staged here"
                self._changed.wait(_LOOK_SECONDS)
        return "the transport has been shut down"

    def _hand_over(self, talk: Talk, staged: StagedState) -> None:
        talk.say(
            Say.OFFER,
            nbytes=staged.nbytes,
            mark=staged.mark.hex(),
            file=f"/proc/{os.getpid()}/fd/{staged.descriptor}",
            inode=staged.inode,
        )
        talk.say_bytes(Say.STRUCTURE, staged.structure)
        if talk.heard(Say.ROAD)["is_file"]:
            talk.say_bytes(Say.CHECKSUMS, staged.checksums().tobytes())
            talk.heard(Say.GOT)
            return
        meeting = {"host": self._host, "port": self._meeting_port(), "name": uuid.uuid4().hex}
        talk.say(Say.MEETING, **meeting)
        channel = met(meeting, talk, self._transport, is_sender=True)
        try:
            send(channel, staged.chunks(), talk.check)
            talk.heard(Say.GOT)
        finally:
            channel.close()

    def _meeting_port(self) -> int:
        """Return the port of a store in which the ends of channels find each other."""
        with self._changed:
            if self._meeting is None:
                self._meeting = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            return int(self._meeting.port)

    def forget(self) -> None:
        """Close a forked child's copies, which would keep a dead replica's connections open."""
        self._door.close()


_all_servers = WeakSet[Server]()


def _forget_in_child() -> None:
    for server in list(_all_servers):
        server.forget()


def _close_all() -> None:
    # Gloo's threads must end while the interpreter still runs, or they may abort the process.
    for server in list(_all_servers):
        server.close()


atexit.register(_close_all)


os.register_at_fork(after_in_child=_forget_in_child)
