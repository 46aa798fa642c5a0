"""The process that makes one export: `python -m dcp_mem.operations.export_process DESCRIPTOR`.

The agent starts it (`flushing/exporter.py`), pauses it for flushes, and reads its answer. It ends
when its standard input does: the agent has died, and a successor begins the export again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
from typing import IO

from dcp_mem.common.log import log
from dcp_mem.common.values import ExportState
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound, DcpMemError
from dcp_mem.export import HuggingFaceExport, export_of
from dcp_mem.flushing.exporter import PAUSE, ExportTask
from dcp_mem.flushing.metering import Throttle
from dcp_mem.format.exports import LONGEST_ERROR, ExportRecord
from dcp_mem.operations.huggingface_directory import Made, make_directory
from dcp_mem.options import settings
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import committed_under
from dcp_mem.storage.retry import RetryPolicy
from dcp_mem.storage.routes import open_storage

_RETRY_POLICY = RetryPolicy(tries=4, first_pause_seconds=0.2, longest_pause_seconds=3.0)
_NICENESS = 4
"""Above the agent's."""
_ENDING_SECONDS = 5.0
_AGENT_DIED = 3


class AgentDied(Exception):
    """Nobody waits for the export any more."""


class Rejected(DcpMemError):
    """The checkpoint has been rejected since it was chosen."""


class AgentsGate:
    """Lets the export through while the agent doesn't flush, at the job's speed.

    `bytes_per_second`: the most to send; None for no limit.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self._may_go = threading.Event()
        self._may_go.set()
        self._has_ended = threading.Event()
        self._throttle = Throttle(bytes_per_second)

    def wait(self, nbytes: int = 0) -> None:
        """Wait while a flush is under way, and until so many bytes may be sent.

        Raises AgentDied.
        """
        self._may_go.wait()
        if nbytes:
            self._throttle.wait(nbytes, self._has_ended)
        if self._has_ended.is_set():
            raise AgentDied

    def follow(self, words: IO[bytes]) -> None:
        """Follow the agent's words until they end; then end this process, soon at the latest."""
        while word := words.read(1):
            if word == PAUSE:
                self._may_go.clear()
            else:
                self._may_go.set()
        self._has_ended.set()
        self._may_go.set()
        time.sleep(_ENDING_SECONDS)
        os._exit(_AGENT_DIED)


def run(task: ExportTask, gate: AgentsGate) -> Made:
    """Make the export.

    Raises CheckpointNotFound, Rejected, DcpMemError.
    """
    export = export_of(task.request)
    os.umask(export.umask)
    chosen = settings(
        task.url,
        memory_root=task.memory_root,
        job=task.job,
        storage_options=task.storage_options,
    )
    _refuse_rejected(chosen, task.checkpoint)
    return make_directory(chosen, task.checkpoint, export, _target(task, export), gate)


def _target(task: ExportTask, export: HuggingFaceExport) -> Storage:
    options = export.storage_options
    if options is None:
        is_same = export.to.partition("://")[0] == task.url.partition("://")[0]
        options = task.storage_options if is_same and "://" in export.to else {}
    return open_storage(export.to, options, _RETRY_POLICY)


def _refuse_rejected(chosen: Settings, checkpoint: ExportRecord) -> None:
    """Raise where storage says so; the agent has looked at memory, which may not have it."""
    assert chosen.url is not None
    storage = open_storage(chosen.url, chosen.storage_options, _RETRY_POLICY)
    for one in committed_under(storage, checkpoint.name):
        if one.save_id == checkpoint.save_id and one.rejected:
            raise Rejected(f"rejected: {one.rejected}")


def _is_skipped(error: DcpMemError) -> bool:
    """Return whether there is no use in another try.

    The checkpoint was rejected, or is neither in memory nor on storage, as far as both answer.
    """
    is_missing = isinstance(error, CheckpointNotFound) and not error.reasons
    return is_missing or isinstance(error, Rejected)


def main() -> None:
    """Read the task, make the export, and answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the agent: only SIGKILL ends it
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    logging.basicConfig(format="%(asctime)s %(levelname)s export: %(message)s")
    log.setLevel(logging.INFO)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no answer
    with open(int(sys.argv[1]), "rb") as stream:
        task: ExportTask = pickle.load(stream)  # of the agent, a process of this user
    gate = AgentsGate(task.upload_limit)
    words = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    threading.Thread(target=gate.follow, args=(words,), daemon=True).start()
    state, error, made = ExportState.EXPORTED, "", Made("", 0)
    try:
        made = run(task, gate)
    except AgentDied:
        sys.exit(_AGENT_DIED)
    except DcpMemError as failure:
        state = ExportState.SKIPPED if _is_skipped(failure) else ExportState.FAILED
        error = str(failure)
    except Exception as failure:
        log.exception("%s can't be exported", task.checkpoint.name)
        state, error = ExportState.FAILED, f"{type(failure).__name__}: {failure}"
    # Cut: a pipe that is full would hold up this process, and the agent reads when it has ended.
    error = error[:LONGEST_ERROR]
    facts = {"state": state.value, "error": error, "target": made.target, "nbytes": made.nbytes}
    with contextlib.suppress(BrokenPipeError), answers:  # the agent may have died by now
        answers.write(json.dumps(facts).encode())


if __name__ == "__main__":
    main()
