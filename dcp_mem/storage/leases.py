"""Whoever reads a checkpoint on storage says so there, lest retention takes it away meanwhile.

A lease is an object with the checkpoint's name in its own. A killed reader leaves it behind; after a day it counts no more.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass

from dcp_mem.errors import DcpMemError
from dcp_mem.events import log
from dcp_mem.storage import Storage

_PLACE = ".dcp_mem"
_READER = re.compile(r"reader-[0-9a-f]{12}-(.+)\.json")
_LONGEST = 86_400.0


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Says that a checkpoint is being read, until it is closed."""

    storage: Storage
    key: str

    def close(self) -> None:
        try:
            self.storage.delete(self.key)
        except (DcpMemError, OSError) as error:
            log.info("%s in %s stays for a day: %s", self.key, self.storage.url, error)


def read_lease(storage: Storage, name: str) -> ReadLease | None:
    """Say that this process reads a checkpoint from now on; None where storage doesn't take that (it may be read only)."""
    key = f"{_PLACE}/reader-{uuid.uuid4().hex[:12]}-{name}.json"
    reader = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    try:
        storage.put(key, json.dumps(reader).encode())
    except (DcpMemError, OSError) as error:
        log.info("that %s is being read can't be noted in %s: %s", name, storage.url, error)
        return None
    return ReadLease(storage, key)


def is_being_read(storage: Storage, name: str) -> bool:
    """Whether somebody reads it, as far as is known there; leases that are too old are removed."""
    found = False
    for entry in storage.ls(_PLACE):
        match = _READER.fullmatch(entry.name)
        if match is None:
            continue
        if 0.0 < entry.modified < time.time() - _LONGEST:
            storage.delete(f"{_PLACE}/{entry.name}")
        elif match[1] == name:
            found = True
    return found
