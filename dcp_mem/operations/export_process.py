"""The process that makes one export: `python -m dcp_mem.operations.export_process AGENT`.

The agent (`flushing/exporter.py`) starts it with the job on standard input. It answers on standard
output with the directory that it has made, or with why it hasn't, and exit code 1 or SKIPPED. It
ends as well when the agent does: a successor begins the export again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time

from dcp_mem.common.log import log
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound, DcpMemError
from dcp_mem.export import HuggingFaceExport, export_of
from dcp_mem.flushing.exporter import SKIPPED
from dcp_mem.flushing.metering import Throttle
from dcp_mem.flushing.registration import Registration
from dcp_mem.memory.exports import ExportRecord
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
_ENDING_SECONDS = 5
_PR_SET_PDEATHSIG = 1


class Rejected(DcpMemError):
    """The checkpoint has been rejected since it was chosen."""


def export(
    root: str, registration: Registration, record: ExportRecord, has_ended: threading.Event
) -> str:
    """Make an export; return its path or URL. `has_ended`: whether the agent has."""
    assert registration.export is not None
    order = export_of(registration.export.request)
    os.umask(order.umask)
    memory = JobMemory(root, registration.job)
    throttle = Throttle(registration.upload_limit)

    def wait(nbytes: int) -> None:
        while _is_flushing(memory) and not has_ended.wait(_PAUSE):
            pass
        if nbytes:
            throttle.wait(nbytes, has_ended)
        if has_ended.is_set():
            sys.exit("the agent has ended")

    chosen = settings(
        registration.url,
        memory_root=root,
        job=registration.job,
        storage_options=registration.storage_options,
    )
    _refuse_rejected(memory, chosen, record)
    return make_directory(chosen, record, order, _target(chosen, order), wait)


def _is_flushing(memory: JobMemory) -> bool:
    for one in memory.checkpoints():
        with contextlib.suppress(FileNotFoundError):
            if one.pending and is_leased(one.flushing_path):
                return True
    return False


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


def _end_with_agent(agent: int) -> threading.Event:
    """Return what is set once the agent ends; this process then ends soon."""
    has_ended = threading.Event()

    def end(*_: object) -> None:
        has_ended.set()
        signal.alarm(_ENDING_SECONDS)  # where it is busy with something else

    signal.signal(signal.SIGHUP, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != agent:
        sys.exit("the agent has ended")
    return has_ended


def main() -> None:
    """Read the job, make the export, and answer."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what the user's function prints goes to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the agent: only SIGKILL ends it
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    logging.basicConfig(format="%(asctime)s %(levelname)s export: %(message)s")
    log.setLevel(logging.INFO)
    has_ended, begun = _end_with_agent(int(sys.argv[1])), time.monotonic()
    root, registration, record = pickle.load(sys.stdin.buffer)  # of the agent, of this user
    code = 1
    try:
        text, code = export(root, registration, record, has_ended), 0
        log.info("%s is exported to %s (%.1f s)", record.name, text, time.monotonic() - begun)
    except DcpMemError as error:
        # Neither in memory nor on storage, as far as both answer: another try is of no use.
        is_gone = isinstance(error, CheckpointNotFound) and not error.reasons
        code = SKIPPED if is_gone or isinstance(error, Rejected) else 1
        text = str(error)
    except Exception as error:
        log.exception("%s can't be exported", record.name)
        text = f"{type(error).__name__}: {error}"
    os.write(answer, text.encode())
    sys.exit(code)


if __name__ == "__main__":
    main()
