"""Completing checkpoints: once every rank has committed, or once enough files have been saved.

Ranks save files at any time, and some save none. But a checkpoint is completed by a save of all
ranks. So the rank that finds that one is due adds a notice, and a thread of every rank takes part
in that save, beside training, in the order of the notices.
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

from dcp_mem.comm.gloo import exchange_timeout
from dcp_mem.comm.notices import Notices
from dcp_mem.common.log import log
from dcp_mem.errors import DcpMemError, WaitTimeout
from dcp_mem.format import names
from dcp_mem.format.catalog import Extent
from dcp_mem.integrations.nebula.peers import Peers
from dcp_mem.saving.streams import Streams
from dcp_mem.writer import MemoryStorageWriter

ON_COMMIT = -2
EACH_FILE = -1
_END_SECONDS = 30.0
_KEPT = 64


class Completion(Protocol):
    """Takes the files of checkpoints that aren't complete yet, and completes them."""

    @property
    def peers(self) -> Peers | None:
        """Other nodes' memory; None where there are no other ranks."""

    def new_tag(self) -> str:
        """Return a tag that no checkpoint has; the n-th call returns the same on all ranks."""

    def save(
        self, tag: str, name: str, write: Callable[[IO[bytes]], None], num_of_files: int
    ) -> None:
        """Save a file, and complete its checkpoint if that is due.

        Args:
            tag: The checkpoint.
            name: The file's name.
            write: Writes the file.
            num_of_files: When the checkpoint is complete, as in `Checkpoint`.

        Raises:
            DcpMemError: The file can't be saved, or the checkpoint can't be completed.
        """

    def commit(self, tag: str) -> None:
        """Complete a checkpoint; return once it is complete on all ranks.

        Args:
            tag: The checkpoint's tag.

        Raises:
            DcpMemError: It can't be completed.
        """

    def close(self) -> None:
        """Take part in what is due by now, then stop."""


class _Files:
    """This rank's files of checkpoints, by tag."""

    def __init__(self, writer: MemoryStorageWriter, rank: int, *, is_alone: bool) -> None:
        self._writer, self._rank, self._is_alone = writer, rank, is_alone
        self._guard = threading.Lock()
        self._open: dict[str, Streams] = {}
        self._grows: set[str] = set()
        self._complete: dict[str, tuple[str, dict[str, Extent]]] = {}

    def add(self, tag: str, name: str, write: Callable[[IO[bytes]], None], *, grows: bool) -> None:
        """Write a file. If the checkpoint `grows`, the files of its complete version stay in it."""
        with self._guard:
            if tag not in self._open:
                self._open[tag] = self._writer._new_streams()
            self._grows = self._grows | {tag} if grows else self._grows - {tag}
            self._open[tag].add(name, write)

    def complete(self, tag: str) -> None:
        """Complete a checkpoint together with all ranks; errors are raised on all of them."""
        extents: dict[str, Extent] = {}

        def streams() -> Streams:
            found = self._open.pop(tag, None) or self._writer._new_streams()
            if tag in self._complete:
                found.add_copies(*self._complete[tag])
            extents.update(found.extents)
            return found

        with self._guard:
            if tag not in self._grows:
                self._complete.pop(tag, None)
            manifest = self._writer._save_streams(streams, tag, no_dist=self._is_alone)
            self._complete.clear()  # only the newest one grows
            if manifest is None:
                raise DcpMemError(f"{tag} is skipped: memory was full")
            file = names.segment_file(self._rank, manifest.save_id)
            chosen = self._writer.settings
            self._complete[tag] = os.path.join(chosen.memory_root, chosen.job, tag, file), extents


class SoloCompletion:
    """Completes checkpoints of one process, without any other.

    Args:
        writer: The writer whose checkpoints are completed.
    """

    def __init__(self, writer: MemoryStorageWriter) -> None:
        self.peers: Peers | None = None
        self._files = _Files(writer, 0, is_alone=True)
        self._counts: dict[str, int] = {}

    def new_tag(self) -> str:
        return _new_tag()

    def save(
        self, tag: str, name: str, write: Callable[[IO[bytes]], None], num_of_files: int
    ) -> None:
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


class JointCompletion:
    """Completes checkpoints of all ranks, each in the thread of every rank that reads notices.

    Args:
        writer: The writer whose checkpoints are completed.
    """

    def __init__(self, writer: MemoryStorageWriter) -> None:
        self._files = _Files(writer, dist.get_rank(), is_alone=False)
        self._notices = Notices(f"nebula {writer.settings.job}")
        self.peers: Peers | None = Peers(writer.settings, self._notices)
        self._changed = threading.Condition()
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

    def save(
        self, tag: str, name: str, write: Callable[[IO[bytes]], None], num_of_files: int
    ) -> None:
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
        """Return once this rank has taken part in a turn; raise what the turn raised here."""
        seconds = exchange_timeout()
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: turn in self._ended or self._broken is not None, seconds)
            self._waiting -= 1
            if turn not in self._ended:
                raise self._broken or WaitTimeout(
                    f"{turn}: not every rank came within {seconds:.0f} s "
                    "(DCP_MEM_TIMEOUT sets this)"
                )
            error = self._ended.pop(turn)
        if error is not None:
            raise error

    def _listen(self) -> None:
        try:
            while True:
                text = self._notices.next(lambda: self._waiting > 0 or self._is_closing.is_set())
                notice = None if text is None else json.loads(text)
                if isinstance(notice, dict):
                    self._answer(notice)
                elif notice is not None:
                    self._take_part(*notice)
                elif self._is_closing.is_set():
                    return
        except Exception as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

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
        with self._changed:
            while len(self._ended) >= _KEPT:  # no call waits for these
                self._ended.pop(next(iter(self._ended)))
            self._ended[turn] = error
            self._changed.notify_all()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._is_closing.set()
        self._thread.join(_END_SECONDS)


def _new_tag() -> str:
    return f"checkpoint-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
