"""Delete checkpoints behind training, which doesn't wait for flushes or for storage."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from dcp_mem.common.log import log
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointInUse, CheckpointNotFound
from dcp_mem.operations import housekeeping

_PAUSE = 0.2


class Removals:
    """One thread that removes checkpoints from this node's memory and from storage, in order.

    Args:
        settings: The job's: where its memory and storage are.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: dict[str, Future[None]] = {}
        self._is_ending = threading.Event()

    def begin(self, name: str, *, from_storage: bool) -> None:
        """Begin to remove a checkpoint, once nobody reads or flushes it any more; log failures.

        Args:
            name: The checkpoint's name.
            from_storage: Whether storage's copy goes as well as memory's.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "dcp_mem-removals")
        self._under_way[name] = self._thread.submit(self._remove, name, from_storage)

    def wait_for(self, name: str) -> None:
        """Wait until a checkpoint of this name is gone, if it is being removed.

        Args:
            name: The checkpoint's name.
        """
        future = self._under_way.pop(name, None)
        if future is not None:
            future.result()

    def close(self) -> None:
        """Try once more to remove what is left, and end the thread."""
        self._is_ending.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread, self._under_way = None, {}
        self._is_ending.clear()

    def __reduce__(self) -> tuple[type[Removals], tuple[Settings]]:
        # For strategies that spawn their processes: each process has its own thread.
        return Removals, (self._settings,)

    def _remove(self, name: str, from_storage: bool) -> None:
        try:
            while True:
                _, why_not = housekeeping.evict(self._settings, name)
                if not why_not and from_storage:
                    why_not = self._delete(name)
                if not why_not or self._is_ending.wait(_PAUSE):
                    break
            if why_not:
                log.warning("%s is not removed: %s", name, why_not)
        except Exception as error:  # Training goes on, with one checkpoint too many.
            log.warning("%s is not removed: %s: %s", name, type(error).__name__, error)

    def _delete(self, name: str) -> str:
        """Delete the checkpoint from storage; return why it is still there, or ""."""
        if self._settings.url is None:
            return ""
        try:
            housekeeping.delete(
                self._settings.url, name, storage_options=self._settings.storage_options
            )
        except CheckpointNotFound:
            pass
        except CheckpointInUse as error:
            return str(error)
        return ""
