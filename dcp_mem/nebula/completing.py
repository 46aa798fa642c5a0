"""When a checkpoint is complete: once every rank has committed, once so many files are saved, or with each of them.

Ranks save files when they please, and not all of them save any. What makes a checkpoint of them is a save of all ranks. So a
rank tells the others, through the store they met in, when one has become due, and a thread of each takes part in it: in the
order in which they became due, and while training goes on.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import IO, Any, Protocol

import torch.distributed as dist

from dcp_mem.errors import DcpMemError, WaitTimeout
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.catalog import Extent
from dcp_mem.nebula.peers import Peers
from dcp_mem.ranks.gloo import exchange_timeout
from dcp_mem.ranks.notices import Notices
from dcp_mem.saving.streams import Streams
from dcp_mem.writer import MemoryStorageWriter

ON_COMMIT = -2
EACH_FILE = -1
_END_SECONDS = 30.0
_KEPT = 64


class Completing(Protocol):
    """Files of checkpoints that aren't complete yet, and what completes them."""

    @property
    def peers(self) -> Peers | None:
        """Other nodes' memory, where there are other ranks to ask."""

    def new_tag(self) -> str:
        """A tag that no checkpoint has; the n-th is the same on all ranks."""

    def save(self, tag: str, name: str, write: Callable[[IO[bytes]], None], num_of_files: int) -> None:
        """Have a file written, and complete its checkpoint where that is due. Raises what speaks against it."""

    def commit(self, tag: str) -> None:
        """Complete a checkpoint; returns once it is, on all ranks. Raises what speaks against it."""

    def close(self) -> None:
        """Take part in what is due by now, and in nothing more."""


class _Files:
    """This rank's files, by tag."""

    def __init__(self, writer: MemoryStorageWriter, rank: int, *, is_alone: bool) -> None:
        self._writer, self._rank, self._is_alone = writer, rank, is_alone
        self._guard = threading.Lock()
        self._open: dict[str, Streams] = {}
        self._grows: set[str] = set()
        self._complete: dict[str, tuple[str, dict[str, Extent]]] = {}

    def add(self, tag: str, name: str, write: Callable[[IO[bytes]], None], *, grows: bool) -> None:
        """grows: what is complete under this tag by now stays part of the checkpoint."""
        with self._guard:
            if tag not in self._open:
                self._open[tag] = self._writer.streams()
            self._grows = self._grows | {tag} if grows else self._grows - {tag}
            self._open[tag].add(name, write)

    def complete(self, tag: str) -> None:
        """Make a checkpoint of them, together with all other ranks. Raises what speaks against it, on all ranks."""
        extents: dict[str, Extent] = {}

        def streams() -> Streams:
            found = self._open.pop(tag, None) or self._writer.streams()
            if tag in self._complete:
                found.add_copies(*self._complete[tag])
            extents.update(found.extents)
            return found

        with self._guard:
            if tag not in self._grows:
                self._complete.pop(tag, None)
            manifest = self._writer.save_streams(streams, tag, no_dist=self._is_alone)
            self._complete.clear()  # only the newest one grows
            if manifest is None:
                raise DcpMemError(f"{tag} is skipped: memory was full")
            file = names.segment_file(self._rank, manifest.save_id)
            chosen = self._writer.settings
            self._complete[tag] = os.path.join(chosen.memory_root, chosen.job, tag, file), extents


class Alone:
    """One process, which completes checkpoints as it goes, and without any other."""

    def __init__(self, writer: MemoryStorageWriter) -> None:
        self.peers: Peers | None = None
        self._files = _Files(writer, 0, is_alone=True)
        self._counts: dict[str, int] = {}

    def new_tag(self) -> str:
        return _new_tag()

    def save(self, tag: str, name: str, write: Callable[[IO[bytes]], None], num_of_files: int) -> None:
        self._files.add(tag, name, write, grows=num_of_files == EACH_FILE)
        if num_of_files == ON_COMMIT:
            return
        self._counts[tag] = self._counts.get(tag, 0) + 1
        if self._counts[tag] % max(num_of_files, 1) == 0:
            self._files.complete(tag)

    def commit(self, tag: str) -> None:
        self._files.complete(tag)

    def close(self) -> None:
        return


class Together:
    """One of several ranks."""

    def __init__(self, writer: MemoryStorageWriter) -> None:
        self._files = _Files(writer, dist.get_rank(), is_alone=False)
        self._notices = Notices(f"nebula {writer.settings.job}")
        self.peers: Peers | None = Peers(writer.settings, self._notices)
        self._news = threading.Condition()
        self._ended: dict[str, Exception | None] = {}
        self._broken: Exception | None = None
        self._is_closing = threading.Event()
        self._waiting = 0
        self._tags = 0
        self._thread = threading.Thread(target=self._listen, name="dcp_mem-complete", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def new_tag(self) -> str:
        self._tags += 1
        return self._notices.settle(f"tag {self._tags}", _new_tag())

    def save(self, tag: str, name: str, write: Callable[[IO[bytes]], None], num_of_files: int) -> None:
        self._files.add(tag, name, write, grows=num_of_files == EACH_FILE)
        if num_of_files == ON_COMMIT:
            return
        count = self._notices.count(f"files of {tag}")
        if count % max(num_of_files, 1) == 0:
            turn = f"{tag}, file {count}"
            self._notices.add(json.dumps([tag, turn]))
            self._wait(turn)

    def commit(self, tag: str) -> None:
        count, size = self._notices.count(f"commits of {tag}"), self._notices.size
        turn = f"{tag}, commit {-(-count // size)}"
        if count % size == 0:
            self._notices.add(json.dumps([tag, turn]))
        self._wait(turn)

    def _wait(self, turn: str) -> None:
        """Return once this rank has taken part in it. Raises what came of it, if that was nothing good."""
        seconds = exchange_timeout()
        with self._news:
            self._waiting += 1
            self._news.wait_for(lambda: turn in self._ended or self._broken is not None, seconds)
            self._waiting -= 1
            if turn not in self._ended:
                raise self._broken or WaitTimeout(
                    f"{turn}: not every rank came within {seconds:.0f} s (DCP_MEM_TIMEOUT sets this)"
                )
            error = self._ended.pop(turn)
        if error is not None:
            raise error

    def _listen(self) -> None:
        try:
            while True:
                found = self._notices.next(lambda: self._waiting > 0 or self._is_closing.is_set())
                told = None if found is None else json.loads(found)
                if isinstance(told, dict):
                    self._answer(told)
                elif told is not None:
                    self._take_part(*told)
                elif self._is_closing.is_set():
                    return
        except Exception as error:
            with self._news:
                self._broken = error
                self._news.notify_all()

    def _answer(self, request: dict[str, Any]) -> None:
        if self.peers is not None:
            self.peers.answer(request)

    def _take_part(self, tag: str, turn: str) -> None:
        error: Exception | None = None
        try:
            self._files.complete(tag)
        except Exception as failure:
            error = failure
            log.warning("%s is not complete: %s", tag, failure)
        with self._news:
            while len(self._ended) >= _KEPT:  # of which nobody has asked
                self._ended.pop(next(iter(self._ended)))
            self._ended[turn] = error
            self._news.notify_all()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._is_closing.set()
        self._thread.join(_END_SECONDS)


def _new_tag() -> str:
    return f"checkpoint-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
