"""Exports: the agent has a process of its own make each, and stops it for every flush.

The export's program gets its task through a file without a name. Its standard input tells it to
pause and to go on; when that ends, the agent has died, and the program ends as well. It answers
with one line of JSON on its standard output, and logs to the agent's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_mem.common.log import log
from dcp_mem.common.values import ExportState
from dcp_mem.errors import DcpMemError
from dcp_mem.flushing.exports import JobExports
from dcp_mem.flushing.registration import Registration, environment_of
from dcp_mem.format.exports import ExportRecord
from dcp_mem.memory.job import JobMemory

PAUSE, GO = b"p", b"g"
_ENDING_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTask:
    """One checkpoint to export, as the program gets it."""

    memory_root: str
    job: str
    url: str
    storage_options: Mapping[str, Any] = field(repr=False)
    upload_limit: int | None  # bytes per second to send; None: no limit
    checkpoint: ExportRecord
    request: bytes = field(repr=False)


@dataclass(slots=True, kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    exports: JobExports
    record: ExportRecord
    started: float
    is_paused: bool = False


class Exporter:
    """Runs the exports of a memory root, one at a time, while no flush is due.

    One thread calls it. Nothing here raises, nor waits for an export.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._running: _Running | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an export runs, or is paused."""
        return self._running is not None

    def pause(self) -> None:
        """Have the export that runs pause: a flush begins."""
        running = self._running
        if running is not None and not running.is_paused:
            running.is_paused = True
            _tell(running.process, PAUSE)

    def go_on(self, jobs: Sequence[tuple[JobExports, Registration]]) -> None:
        """Have the export go on that runs; begin the next one where none does."""
        running = self._running
        if running is not None and running.process.poll() is not None:
            self._running = None
            _end(running)
        elif running is not None and running.is_paused:
            running.is_paused = False
            _tell(running.process, GO)
        for exports, registration in jobs:
            record = exports.next_due() if self._running is None else None
            if record is not None:
                self._begin(exports, registration, record)

    def stop(self) -> None:
        """End the export that runs; a successor begins it again, unless it was done by now."""
        running, self._running = self._running, None
        if running is None:
            return
        process = running.process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)
        if process.returncode == 0:
            _end(running)
        process.stdout.close()

    def _begin(self, exports: JobExports, registration: Registration, record: ExportRecord) -> None:
        try:
            rejected = self._rejection(registration.job, record)
            if rejected:
                skipped = f"rejected: {rejected}"
                exports.end(replace(record, state=ExportState.SKIPPED, error=skipped))
                return
            process = _started(self._task(registration, record), registration)
        except Exception as error:  # whatever it is, flushes must go on
            text = f"it can't be begun: {type(error).__name__}: {error}"
            exports.end(replace(record, state=ExportState.FAILED, error=text))
            return
        exports.begin(record)
        self._running = _Running(
            process=process, exports=exports, record=record, started=time.monotonic()
        )

    def _rejection(self, job: str, record: ExportRecord) -> str:
        """Return why the checkpoint was rejected since it was chosen; "" where it wasn't."""
        if not os.path.isdir(os.path.join(self._root, job)):
            return ""
        try:
            found = JobMemory(self._root, job).find(record.name)
        except (DcpMemError, OSError):  # storage may have it all the same
            return ""
        same = [one for one in found if one.manifest.save_id == record.save_id]
        return next((one.rejected for one in same), "")

    def _task(self, registration: Registration, record: ExportRecord) -> ExportTask:
        assert registration.export is not None
        return ExportTask(
            memory_root=self._root,
            job=registration.job,
            url=registration.url,
            storage_options=registration.storage_options,
            upload_limit=registration.upload_limit,
            checkpoint=record,
            request=registration.export.request,
        )


def _started(task: ExportTask, registration: Registration) -> subprocess.Popen[bytes]:
    """Start the program with its task; return at once."""
    assert registration.export is not None
    descriptor = os.memfd_create("dcp_mem-export", os.MFD_CLOEXEC)  # secrets stay off all disks
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            pickle.dump(task, stream)
        os.lseek(descriptor, 0, os.SEEK_SET)
        with environment_of(registration):
            return subprocess.Popen(
                [sys.executable, "-m", registration.export.program, str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(descriptor,),
                bufsize=0,
            )
    finally:
        os.close(descriptor)


def _tell(process: subprocess.Popen[bytes], word: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has just ended
        process.stdin.write(word)


def _end(running: _Running) -> None:
    """Write down what became of an export whose program has ended."""
    process, record = running.process, running.record
    assert process.stdin is not None
    assert process.stdout is not None
    # Not to the end: a process that it has left behind may hold the pipe open.
    os.set_blocking(process.stdout.fileno(), False)
    answer = process.stdout.read() or b""
    process.stdin.close()
    process.stdout.close()
    seconds = time.monotonic() - running.started
    try:
        facts = json.loads(answer)
        ended = replace(
            record,
            state=ExportState(facts["state"]),
            error=str(facts["error"]),
            target=str(facts["target"]),
            nbytes=int(facts["nbytes"]),
            seconds=seconds,
        )
    except (ValueError, TypeError, KeyError):
        text = f"its process has ended with {process.returncode} (the agent's log may say why)"
        log.debug("the export's process has answered %r", answer[:200])
        ended = replace(record, state=ExportState.FAILED, error=text)
    running.exports.end(ended)
