"""Exports: the agent looks which are due, and starts a process for each, one at a time.

The program gets its job through a file without a name. When its standard input ends, the agent has
died, and the program ends as well. It writes down what has become of the export, and logs to the
agent's log.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from dcp_mem.common.log import log
from dcp_mem.common.values import ExportState
from dcp_mem.flushing.registration import Registration, environment_of
from dcp_mem.memory.exports import ExportRecords, look, read_exports, write_exports
from dcp_mem.memory.job import JobMemory

_PROGRAM = "dcp_mem.operations.export_process"


class JobExporter:
    """Has one job's checkpoints exported. The agent's one thread calls it; nothing here raises."""

    def __init__(self, root: str, job: str) -> None:
        self._root, self._job = root, job
        self._directory = os.path.join(root, job)
        self._process: subprocess.Popen[bytes] | None = None
        self._known: ExportRecords | None = None  # where the file has no room for it, too

    def go_on(self, registration: Registration) -> None:
        """Begin the next export that is due, unless one is under way. Waits for nothing."""
        self._note_end()
        if registration.export is None or not os.path.isdir(self._directory):
            self._known = None
        elif self._process is None:
            self._begin_next(registration)

    def _begin_next(self, registration: Registration) -> None:
        try:
            if self._looked(registration).next_due() is not None:
                self._process = _started(self._root, registration)
        except Exception as error:  # whatever it is, flushes must go on
            self._fail(f"it can't be begun: {type(error).__name__}: {error}")

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def is_needed(self) -> bool:
        return self.is_running or bool(self._known and self._known.open)

    def stop(self) -> None:
        """Have the process end soon; a successor begins its export again."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _looked(self, registration: Registration) -> ExportRecords:
        order, known = registration.export, self._known or read_exports(self._directory)
        assert order is not None
        memory = JobMemory(self._root, self._job)
        self._known = look(memory, known, order.every, of_complete=order.of_complete)
        if self._known != known:
            write_exports(self._directory, self._known)
        return self._known

    def _note_end(self) -> None:
        process = self._process
        if process is None or process.poll() is None:
            return
        self._process = None
        assert process.stdin is not None
        process.stdin.close()
        self._known, code = read_exports(self._directory), process.returncode
        if code or any(one.state is ExportState.RUNNING for one in self._known.records):
            self._fail(f"its process has ended with {code} (the agent's log may say why)")

    def _fail(self, error: str) -> None:
        """Write down why the export that was under way has failed, or couldn't be begun."""
        known = self._known or ExportRecords()
        running = [one for one in known.records if one.state is ExportState.RUNNING]
        record = running[0] if running else known.next_due()
        if record is None:
            log.warning("no exports of %s: %s", self._job, error)
        elif os.path.isdir(self._directory):
            self._known = known.failed(record, error)
            write_exports(self._directory, self._known)


def _started(root: str, registration: Registration) -> subprocess.Popen[bytes]:
    """Start the program with its job, which may hold secrets; return at once."""
    descriptor = os.memfd_create("dcp_mem-export", os.MFD_CLOEXEC)  # it stays off all disks
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            pickle.dump((root, registration), stream)
        os.lseek(descriptor, 0, os.SEEK_SET)
        with environment_of(registration):
            return subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, str(descriptor)],
                stdin=subprocess.PIPE,
                pass_fds=(descriptor,),
                bufsize=0,
            )
    finally:
        os.close(descriptor)
