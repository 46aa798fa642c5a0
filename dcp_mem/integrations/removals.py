"""What adapters to Lightning share: deletions behind training, and how a training has ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from dcp_mem.common.log import log
from dcp_mem.common.values import State
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointInUse
from dcp_mem.operations import housekeeping
from dcp_mem.runtime import states

_PAUSE = 0.2


class Removals:
    """One thread that removes checkpoints from this node's memory and from storage, in order."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: dict[str, Future[None]] = {}
        self._is_ending = threading.Event()
        self._newest = set[str]()  # to be removed once storage has newer ones

    def begin(self, name: str, *, from_storage: bool) -> None:
        """Begin to remove a checkpoint, once nobody reads or flushes it any more; log failures.

        From storage it goes once that has a newer one, too: the checkpoint that replaces it may lie
        in memory alone.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "dcp_mem-removals")
        self._under_way[name] = self._thread.submit(self._remove, name, from_storage)

    def wait_for(self, name: str) -> None:
        """Wait until a checkpoint of this name is gone, or is to be replaced on storage."""
        future = self._under_way.pop(name, None)
        if future is not None:
            future.result()
        self._newest.discard(name)

    def close(self, *, keep_newest: bool = False) -> None:
        """Try once more to remove what is left, and end the thread.

        `keep_newest`: leave on storage what is the newest there: training was broken off, or what
        replaces it hasn't been flushed.
        """
        self._is_ending.set()
        if self._thread is not None:
            if not keep_newest:
                self._thread.submit(self._remove_left, may_be_newest=True)
            self._thread.shutdown(wait=True)
        self._thread, self._under_way, self._newest = None, {}, set()
        self._is_ending.clear()

    def __reduce__(self) -> tuple[type[Removals], tuple[Settings]]:
        # For strategies that spawn their processes: each process has its own thread.
        return Removals, (self._settings,)

    def _remove(self, name: str, from_storage: bool) -> None:
        self._remove_left()
        with _logged(name):
            while True:
                is_last = self._is_ending.is_set()
                _, why_not = housekeeping.evict(self._settings, name)
                if not why_not and from_storage:
                    why_not = self._delete(name)
                if not why_not or is_last:
                    break
                self._is_ending.wait(_PAUSE)
            if why_not:
                log.warning("%s is not removed: %s", name, why_not)

    def _remove_left(self, *, may_be_newest: bool = False) -> None:
        """Delete what was left on storage as the newest there, if that has a newer one by now."""
        for name in sorted(self._newest):
            with _logged(name):
                self._newest.discard(name)
                self._delete(name, may_be_newest=may_be_newest)

    def _delete(self, name: str, *, may_be_newest: bool = False) -> str:
        """Delete the checkpoint from storage; return why it can't be deleted now, or ""."""
        known = states.status(self._settings) if not may_be_newest else ()
        if name == next((one.name for one in known if one.state is State.DURABLE), None):
            self._newest.add(name)
            return ""
        try:
            housekeeping.delete_stored(self._settings, name)
        except CheckpointInUse as error:
            return str(error)
        return ""


class Ending:
    """Tells an exception that ends a training from one that is handled around all of it.

    A second attempt is often made where the exception of the first one is handled.
    """

    def __init__(self) -> None:
        self._handled_at_begin: int | None = None

    def begin(self) -> None:
        """Note which exception is being handled; once for each training, whenever it is called."""
        if self._handled_at_begin is None:
            self._handled_at_begin = id(sys.exc_info()[1])

    def is_broken_off(self) -> bool:
        """Return whether an exception is being handled that wasn't at the beginning; end there."""
        handled, self._handled_at_begin = self._handled_at_begin, None
        error = sys.exc_info()[1]
        return error is not None and id(error) != handled


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """Log what goes wrong: training goes on, with one checkpoint too many."""
    try:
        yield
    except Exception as error:
        log.warning("%s is not removed: %s: %s", name, type(error).__name__, error)
