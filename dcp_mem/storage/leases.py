"""Read leases: a reader of a checkpoint says so on storage, so that retention doesn't delete it.

A lease is an object with the checkpoint's name in its own. A killed reader leaves it behind; it
counts for a day.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError
from dcp_mem.storage import Storage

_DIRECTORY = ".dcp_mem"
_READER = r"reader-[0-9a-f]{12}-(.+)\.json"
_LONGEST_SECONDS = 86_400.0


@value_class
class ReadLease:
    """A lease on a checkpoint, until it is closed."""

    storage: Storage
    key: str

    def close(self) -> None:
        """Remove the lease; where that fails, it counts for a day."""
        try:
            self.storage.delete(self.key)
        except (DcpMemError, OSError) as error:
            log.info("%s in %s stays for a day: %s", self.key, self.storage.url, error)


def read_lease(storage: Storage, name: str) -> ReadLease | None:
    """Put a lease: this process reads a checkpoint; None where the storage doesn't take it."""
    key = f"{_DIRECTORY}/reader-{uuid.uuid4().hex[:12]}-{name}.json"
    reader = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    try:
        storage.put(key, json.dumps(reader).encode())
    except (DcpMemError, OSError) as error:
        log.info("that %s is being read can't be noted in %s: %s", name, storage.url, error)
        return None
    return ReadLease(storage, key)


@contextmanager
def being_read(storage: Storage, name: str) -> Iterator[None]:
    """Hold a lease, as `read_lease` puts it, for as long as the block takes."""
    lease = read_lease(storage, name)
    try:
        yield
    finally:
        if lease is not None:
            lease.close()


def is_being_read(storage: Storage, name: str) -> bool:
    """Return whether a checkpoint has a lease; leases that are too old are removed."""
    found = False
    for entry in storage.ls(_DIRECTORY):
        match = re.fullmatch(_READER, entry.name)
        if match is None:
            continue
        if 0.0 < entry.modified < time.time() - _LONGEST_SECONDS:
            storage.delete(f"{_DIRECTORY}/{entry.name}")
        elif match[1] == name:
            found = True
    return found
