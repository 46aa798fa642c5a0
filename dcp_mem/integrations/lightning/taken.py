"""Which names are taken, so that a callback that doesn't replace checkpoints gives another one."""

from __future__ import annotations

from dcp_mem.common.log import log
from dcp_mem.common.values import State
from dcp_mem.config import Settings
from dcp_mem.errors import DcpMemError
from dcp_mem.operations.inventory import in_memory
from dcp_mem.runtime.states import status
from dcp_mem.storage.listing import checkpoint_names
from dcp_mem.storage.retry import RetryPolicy
from dcp_mem.storage.routes import open_storage

_RETRIES = RetryPolicy(tries=3, deadline_seconds=10.0)


class TakenNames:
    """The names of this node's checkpoints and of those on storage, as Lightning knows them.

    A name is free once Lightning has removed its checkpoint, even if the removal is still under
    way. Storage is listed once; what is saved or removed later is known here.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_taken: dict[str, bool] = {}  # what this process has saved, or removed
        self._in_memory = set[str]()  # when storage was listed
        self._on_storage: set[str] | None = None

    def add(self, name: str) -> None:
        """Note that a checkpoint of this name has been saved."""
        self._is_taken[name] = True

    def free(self, name: str) -> None:
        """Note that the checkpoint of this name is removed."""
        self._is_taken[name] = False

    def __contains__(self, name: str) -> bool:
        if not self._is_taken.get(name, True):
            return False
        if self._on_storage is None:
            self._list()
        if name in (self._on_storage or ()) and name not in self._is_taken:
            return True
        followed = name in self._is_taken or name in self._in_memory or self._on_storage is None
        return any(
            one.name == name and (one.in_memory or (followed and one.state is State.DURABLE))
            for one in status(self._settings)
        )

    def _list(self) -> None:
        """List storage; if it doesn't answer, say so, and go by memory and its history."""
        self._in_memory = {one.name for one in in_memory(self._settings)}
        if self._settings.url is None:
            self._on_storage = set()
            return
        try:
            storage = open_storage(self._settings.url, self._settings.storage_options, _RETRIES)
            self._on_storage = set(checkpoint_names(storage))
        except (DcpMemError, OSError) as error:
            log.warning(
                "%s can't be listed, so a checkpoint there that this node has never saved is "
                "replaced by a new one of its name: %s",
                self._settings.url,
                error,
            )
