"""Exports: the agent looks which are due, and has a process make one at a time for each job.

The process is given its job over standard input. It ends with the agent, and answers as a command
does: by its exit code, and one line.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace

from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.values import ExportState
from dcp_mem.flushing.registration import Registration, environment_of
from dcp_mem.memory.exports import ExportRecord, ExportRecords, look, read_exports, write_exports
from dcp_mem.memory.job import JobMemory

SKIPPED = 4
"""The exit code of an export that no other try would make."""


class JobExporter:
    """Has one job's checkpoints exported. The loop's thread calls it; nothing here raises."""

    def __init__(self, root: str, job: str) -> None:
        self._root, self._job, self._directory = root, job, os.path.join(root, job)
        self._thread: threading.Thread | None = None
        self._known: ExportRecords | None = None  # where the file has no room for it, too

    def go_on(self, registration: Registration) -> None:
        """Begin the next export that is due, unless one is under way. Waits for nothing."""
        if self.is_running:
            return
        if registration.export is None or not os.path.isdir(self._directory):
            self._known = None
            return
        known = self._known or read_exports(self._directory)
        try:
            memory = JobMemory(self._root, self._job)
            self._known = look(memory, known, registration.export)
            record = self._known.next_due()
            if record is not None:
                with environment_of(registration):
                    environment = {**os.environ}
                self._note(replace(record, state=ExportState.RUNNING))
                self._thread = daemon(
                    lambda: self._make(registration, record, environment), "dcp_mem-export"
                )
            elif self._known != known:
                write_exports(self._directory, self._known)
        except Exception as error:  # whatever it is, flushes must go on
            log.warning("no exports of %s: %s: %s", self._job, type(error).__name__, error)

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def is_needed(self) -> bool:
        return self.is_running or bool(self._known and self._known.open)

    def _make(
        self, registration: Registration, record: ExportRecord, environment: Mapping[str, str]
    ) -> None:
        """Have a process make an export, and write down what has become of it."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "dcp_mem.operations.export_process", str(os.getpid())],
                input=pickle.dumps((self._root, registration, record)),
                stdout=subprocess.PIPE,
                env=environment,
                check=False,
            )
        except Exception as error:
            self._note(record.failed(f"it can't be begun: {type(error).__name__}: {error}"))
            return
        text = done.stdout.decode(errors="replace")
        if done.returncode == 0:
            self._note(record.exported(text))
        elif done.returncode == SKIPPED:
            self._note(record.skipped(text))
        else:
            code = done.returncode
            why = f"its process has ended with {code} (the agent's log may say why)"
            self._note(record.failed(text or why))

    def _note(self, record: ExportRecord) -> None:
        if self._known is not None and os.path.isdir(self._directory):
            self._known = self._known.updated(record)
            write_exports(self._directory, self._known)
