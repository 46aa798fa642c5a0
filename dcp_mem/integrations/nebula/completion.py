"""Completing checkpoints: once every rank has committed, or once enough files have been saved.

Ranks save files at any time, and some save none. But a checkpoint is completed by a save of all
ranks. So the rank that finds that one is due adds a notice, and a thread of every rank takes part
in that save, beside training, in the order of the notices.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import IO
from weakref import WeakSet

import torch.distributed as dist

from dcp_mem.comm.notices import Notices
from dcp_mem.common.log import log
from dcp_mem.common.parallel import before_pools_end
from dcp_mem.config import exchange_timeout
from dcp_mem.errors import DcpMemError, WaitTimeout
from dcp_mem.format import names
from dcp_mem.format.catalog import Extent
from dcp_mem.integrations.nebula.peers import Peers
from dcp_mem.saving.streams import NothingNew, Streams
from dcp_mem.writer import MemoryStorageWriter

ON_COMMIT = -2
EACH_FILE = -1
_END_SECONDS = 30.0
_KEPT = 64
_MOST_KNOWN = 1000
"""Complete checkpoints of which it is known what files they have."""


class Due(Enum):
    """The part of a checkpoint that is about to complete it.

    `WAITING`: files that waited for the others; they are all that the checkpoint has. `FILE`: a
    file that completes it at once; what the checkpoint has in memory stays in it. `FURTHER`: as
    FILE, of a checkpoint that is complete already, and must not lose anything.
    """

    WAITING = "waiting"
    FILE = "file"
    FURTHER = "further"


class Completion:
    """Takes files of checkpoints that aren't complete yet, and completes them, without ranks."""

    peers: Peers | None = None

    def __init__(
        self, writer: MemoryStorageWriter, rank: int = 0, *, is_alone: bool = True
    ) -> None:
        self._writer, self._rank, self._is_alone = writer, rank, is_alone
        self._guard = threading.Lock()
        self._waiting_files: dict[str, Streams] = {}
        self._added_files: dict[str, Streams] = {}  # these complete their checkpoint at once
        self._kept: set[str] = set()  # complete checkpoints that waiting files are to add to
        self._known: dict[str, tuple[str, dict[str, Extent]]] = {}  # of complete checkpoints
        self._counts: Counter[str] = Counter()
        self.times_completed: Counter[str] = Counter()

    def new_tag(self) -> str:
        """Return a tag that no checkpoint has; the n-th call returns the same on all ranks."""
        return f"checkpoint-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"

    def save(
        self,
        tag: str,
        name: str,
        write: Callable[[IO[bytes]], None],
        num_of_files: int,
        *,
        is_complete: bool = False,
    ) -> None:
        """Save a file, and complete its checkpoint if that is due.

        `num_of_files`: as in `Checkpoint`. `is_complete`: whether the checkpoint is complete
        already, so that the file is a further one. Raises DcpMemError.
        """
        with self._guard:
            due = self._due(tag, name, num_of_files, is_complete)
            if due is Due.WAITING:
                self._keep(tag, is_complete)
            streams = self._streams_for(due)
            if tag not in streams:
                streams[tag] = self._writer._saver.new_streams()
            streams[tag].add(name, write)
        if due is not Due.WAITING:
            self._complete_with_added(tag, due)
        elif num_of_files != ON_COMMIT:
            self._count_file(tag, num_of_files, is_complete)

    def commit(self, tag: str, *, is_complete: bool = False) -> None:
        """Complete a checkpoint; return once it is complete on all ranks.

        `is_complete`: whether it is complete already, so that what it has stays in it. Raises
        NothingNew where no rank has saved anything since, DcpMemError.
        """
        self._counts.pop(tag, None)
        with self._guard:
            self._keep(tag, is_complete)
        self._complete(tag, Due.WAITING)

    def close(self) -> None:
        """Take part in what is due by now, then stop."""

    def _complete_with_added(self, tag: str, due: Due) -> None:
        self._complete(tag, due)

    def _count_file(self, tag: str, num_of_files: int, is_complete: bool) -> None:
        self._counts[tag] += 1
        if self._counts[tag] >= num_of_files:
            self.commit(tag, is_complete=is_complete)

    def _due(self, tag: str, name: str, num_of_files: int, is_complete: bool) -> Due:
        """Tell a further file of a complete checkpoint from one that is saved anew.

        A name that the checkpoint has begins the next version of it, which waits for its other
        files: one that has old and new files would be neither.
        """
        if num_of_files == EACH_FILE:
            return Due.FURTHER if is_complete else Due.FILE
        is_further = is_complete and name not in self._known.get(tag, ("", {}))[1]
        return Due.FURTHER if is_further and num_of_files > 0 else Due.WAITING

    def _streams_for(self, due: Due) -> dict[str, Streams]:
        return self._waiting_files if due is Due.WAITING else self._added_files

    def _keep(self, tag: str, is_kept: bool) -> None:
        """Set whether files that are waiting add to the complete checkpoint of their tag."""
        self._kept = self._kept | {tag} if is_kept else self._kept - {tag}

    def _complete(self, tag: str, due: Due) -> None:
        """Complete a checkpoint together with all ranks; errors are raised on all of them."""
        extents: dict[str, Extent] = {}
        new = self._streams_for(due)

        def streams() -> Streams:
            found = new.pop(tag, None) or self._writer._saver.new_streams()
            try:
                if due is not Due.WAITING or tag in self._kept:
                    self._add_complete_files(found, tag, must=due is not Due.FILE)
            except BaseException:
                found.close()
                raise
            extents.update(found.extents)
            return found

        with self._guard:
            manifest = self._writer._saver.save_streams(
                streams, tag, has_new=tag in new, no_dist=self._is_alone
            )
            self._kept.discard(tag)
            if manifest is None:
                raise DcpMemError(f"{tag} is skipped: memory was full")
            file = names.segment_file(self._rank, manifest.save_id)
            chosen = self._writer.settings
            self._known.pop(tag, None)  # it becomes the newest
            self._known[tag] = os.path.join(chosen.memory_root, chosen.job, tag, file), extents
            while len(self._known) > _MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            self.times_completed[tag] += 1

    def _add_complete_files(self, streams: Streams, tag: str, *, must: bool) -> None:
        path, extents = self._known.get(tag, ("", {}))
        try:
            if not extents.keys() <= streams.extents.keys():
                streams.add_copies(path, extents)
        except FileNotFoundError:
            if must:
                raise DcpMemError(
                    f"{tag} is complete, and has left this node's memory: nothing can be added to "
                    "it. Save under another tag, or save all files again by a new Checkpoint"
                ) from None


class JointCompletion(Completion):
    """Completes checkpoints of all ranks, each in the thread of every rank that reads notices."""

    peers: Peers

    def __init__(self, writer: MemoryStorageWriter) -> None:
        super().__init__(writer, dist.get_rank(), is_alone=False)
        self._notices = Notices(f"nebula {writer.settings.job}")
        self.peers = Peers(writer.settings, self._notices)
        self._changed = threading.Condition()
        self._ended: dict[str, Exception | None] = {}
        self._broken: Exception | None = None
        self._is_closing = threading.Event()
        self._waiting = 0
        self._tags = 0
        self._thread = threading.Thread(target=self._listen, name="dcp_mem-complete", daemon=True)
        self._thread.start()
        _open.add(self)

    def new_tag(self) -> str:
        self._tags += 1
        return self._notices.settle(f"tag {self._tags}", super().new_tag())

    def _complete_with_added(self, tag: str, due: Due) -> None:
        number = self._notices.count(f"added files of {tag}")
        self._complete_by(tag, f"{tag}, added file {number}", due)

    def _count_file(self, tag: str, num_of_files: int, is_complete: bool) -> None:
        count = self._notices.count(f"files of {tag}")
        if count % num_of_files == 0:
            self._complete_by(tag, f"{tag}, file {count}", Due.WAITING)

    def _complete_by(self, tag: str, turn: str, due: Due) -> None:
        self._notices.add(json.dumps([tag, turn, due.value]))
        with suppress(NothingNew):  # another turn has completed the file's checkpoint
            self._wait(turn)

    def commit(self, tag: str, *, is_complete: bool = False) -> None:
        with self._guard:
            self._keep(tag, is_complete)
        count, size = self._notices.count(f"commits of {tag}"), self._notices.size
        turn = f"{tag}, commit {-(-count // size)}"
        if count % size == 0:
            self._notices.reset(f"files of {tag}")  # no rank is saving: all of them commit
            self._notices.add(json.dumps([tag, turn, Due.WAITING.value]))
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
                    self.peers.answer(notice)
                elif notice is not None:
                    self._take_part(*notice)
                elif self._is_closing.is_set():
                    return
        except Exception as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _take_part(self, tag: str, turn: str, due: str) -> None:
        error: Exception | None = None
        try:
            self._complete(tag, Due(due))
        except NothingNew as nothing:
            error = nothing
        except Exception as failure:
            error = failure
            log.warning("%s is not complete: %s", tag, failure)
        with self._changed:
            while len(self._ended) >= _KEPT:  # no call waits for these
                self._ended.pop(next(iter(self._ended)))
            self._ended[turn] = error
            self._changed.notify_all()

    def close(self) -> None:
        _open.discard(self)
        self._is_closing.set()
        self._thread.join(_END_SECONDS)


_open = WeakSet[JointCompletion]()


def _close_all() -> None:
    for completion in list(_open):
        completion.close()


before_pools_end(_close_all)
