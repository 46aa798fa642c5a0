"""The process that makes one export: `python -m dcp_mem.operations.export_process DESCRIPTOR`.

The agent starts it (`flushing/exporter.py`) when an export is due. It makes that one, and writes
down what has become of it. It ends as well when its standard input does: the agent has died, and a
successor begins the export again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import replace

from dcp_mem.common.log import log
from dcp_mem.common.values import ExportState
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound, DcpMemError
from dcp_mem.export import HuggingFaceExport, export_of
from dcp_mem.flushing.metering import Throttle
from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.exports import ExportRecord, ExportRecords, read_exports, write_exports
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import is_leased
from dcp_mem.operations.huggingface_directory import make_directory
from dcp_mem.options import settings
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import committed_under
from dcp_mem.storage.retry import RETRIES_OF_A_FLUSH
from dcp_mem.storage.routes import open_storage

_NICENESS = 4
"""Above the agent's."""
_PAUSE = 0.1
_ENDING_SECONDS = 5.0
_AGENT_DIED = 3


class AgentDied(Exception):
    """Nobody waits for the export any more."""


class Rejected(DcpMemError):
    """The checkpoint has been rejected since it was chosen."""


class FlushGate:
    """Lets the export through while no checkpoint of the job is flushed, at the job's speed."""

    def __init__(self, memory: JobMemory, bytes_per_second: int | None) -> None:
        self._memory = memory
        self._has_ended = threading.Event()
        self._throttle = Throttle(bytes_per_second)

    def wait(self, nbytes: int) -> None:
        """Wait while a flush is under way, and until so many bytes may be sent; raise AgentDied."""
        while self._is_flushing() and not self._has_ended.wait(_PAUSE):
            pass
        if nbytes:
            self._throttle.wait(nbytes, self._has_ended)
        if self._has_ended.is_set():
            raise AgentDied

    def _is_flushing(self) -> bool:
        for one in self._memory.checkpoints():
            with contextlib.suppress(FileNotFoundError):
                if one.pending and is_leased(one.flushing_path):
                    return True
        return False

    def end_with_agent(self) -> None:
        """Wait for the agent's end; then end this process, soon at the latest."""
        os.read(sys.stdin.fileno(), 1)  # unbuffered: a buffer has a lock at the end of the process
        self._has_ended.set()
        time.sleep(_ENDING_SECONDS)
        os._exit(_AGENT_DIED)


def run(root: str, registration: Registration) -> None:
    """Make the export that is due, and write down what has become of it."""
    assert registration.export is not None
    export = export_of(registration.export.request)
    os.umask(export.umask)
    memory = JobMemory(root, registration.job)
    gate = FlushGate(memory, registration.upload_limit)
    threading.Thread(target=gate.end_with_agent, daemon=True).start()
    records = read_exports(memory.directory)
    record = records.next_due()
    if record is None:
        return
    record = replace(record, state=ExportState.RUNNING)
    write_exports(memory.directory, records.updated(record))
    chosen = settings(
        registration.url,
        memory_root=root,
        job=registration.job,
        storage_options=registration.storage_options,
    )
    begun = time.monotonic()
    try:
        _refuse_rejected(memory, chosen, record)
        storage = _target(chosen, export)
        target = make_directory(chosen, record, export, storage, gate.wait)
    except DcpMemError as error:
        records = _after_error(records, record, error)
    except AgentDied:
        sys.exit(_AGENT_DIED)
    except Exception as error:
        log.exception("%s can't be exported", record.name)
        records = records.failed(record, f"{type(error).__name__}: {error}")
    else:
        seconds = time.monotonic() - begun
        log.info("%s is exported to %s (%.1f s)", record.name, target, seconds)
        made = replace(record, state=ExportState.EXPORTED, target=target, error="")
        records = records.updated(made)
    write_exports(memory.directory, records)


def _after_error(records: ExportRecords, record: ExportRecord, error: DcpMemError) -> ExportRecords:
    """Return the records; another try is of no use where the checkpoint was rejected, or is gone:
    neither in memory nor on storage, as far as both answer.
    """
    is_gone = isinstance(error, CheckpointNotFound) and not error.reasons
    if not is_gone and not isinstance(error, Rejected):
        return records.failed(record, str(error))
    log.warning("%s isn't exported: %s", record.name, error)
    return records.updated(replace(record, state=ExportState.SKIPPED, error=str(error)))


def _refuse_rejected(memory: JobMemory, chosen: Settings, record: ExportRecord) -> None:
    """Raise Rejected where memory says so, or storage."""
    assert chosen.url is not None
    storage = open_storage(chosen.url, chosen.storage_options, RETRIES_OF_A_FLUSH)
    here = [(one.manifest.save_id, one.rejected) for one in memory.find(record.name)]
    there = ((one.save_id, one.rejected) for one in committed_under(storage, record.name))
    for save_id, why in (*here, *there):
        if save_id == record.save_id and why:
            raise Rejected(f"rejected: {why}")


def _target(chosen: Settings, export: HuggingFaceExport) -> Storage:
    options, url = export.storage_options, chosen.url or ""
    if options is None:
        is_same = export.to.partition("://")[0] == url.partition("://")[0]
        options = chosen.storage_options if is_same and "://" in export.to else {}
    return open_storage(export.to, options, RETRIES_OF_A_FLUSH)


def main() -> None:
    """Read the job, and make its next export."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the agent: only SIGKILL ends it
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    logging.basicConfig(format="%(asctime)s %(levelname)s export: %(message)s")
    log.setLevel(logging.INFO)
    with open(int(sys.argv[1]), "rb") as stream:
        root, registration = pickle.load(stream)  # of the agent, a process of this user
    run(root, registration)


if __name__ == "__main__":
    main()
