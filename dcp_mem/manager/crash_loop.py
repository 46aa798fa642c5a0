"""Crash loops: a job that resumes from one checkpoint again and again, and dies soon afterwards."""

from __future__ import annotations

import os

from dcp_mem.common import files
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.values import RESUMES
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError, DcpMemError, ManifestInvalid, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.manifest import Resumes
from dcp_mem.manager.options import OnCrashLoop
from dcp_mem.reader import RecoveryReport
from dcp_mem.runtime.states import job_memory
from dcp_mem.storage.routes import storage_of

TIMES = 3
"""Resumes in a row from one checkpoint, without success, that make a crash loop."""
_STORAGE_TIMEOUT = 2.0
"""Seconds that training waits for storage to take the record."""


class CrashLoop:
    """Counts the resumes from one checkpoint that didn't get far, over restarts of the job.

    Each rank keeps the count in its node's memory, and rank 0 on storage. A job that dies loses
    neither, unless it loses all nodes and has no storage.

    `action`: what to do about a crash loop: "ignore", "warn" or "fall_back". `steps`: a job that
    comes so many steps beyond the checkpoint has resumed successfully. `before`: what all ranks
    together knew before this start of the job, which counts once, however often it restores; None
    while nobody has looked. Raises ConfigError.
    """

    def __init__(self, settings: Settings, action: OnCrashLoop, steps: int) -> None:
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"crash_loop_steps={steps!r}: give a number of steps, at least 1")
        self._settings, self._steps = settings, steps
        self.is_watched, self.falls_back = action != "ignore", action == "fall_back"
        self.before: Resumes | None = None
        self._is_first_rank = False
        self._success: int | None = None  # the step from which on the resume has succeeded

    def known(self, rank: int) -> Resumes:
        """Return what this rank knows of earlier resumes; rank 0 asks storage as well."""
        found = [self._in_memory(), self._on_storage() if rank == 0 else Resumes()]
        return max(found, key=lambda one: one.count)

    def resumed(self, report: RecoveryReport, step: int, rank: int) -> None:
        """Count this start of the job as a resume."""
        before = self.before or Resumes()
        is_again = bool(report.save_id) and before.save_id == report.save_id
        count = before.count + 1 if is_again else 1
        self._is_first_rank = rank == 0
        self._success = step + self._steps
        self._put(Resumes(report.save_id, report.checkpoint_id, count))

    def passed(self, step: int) -> None:
        """Note how far the job has come."""
        if self._success is not None and step >= self._success:
            self.end()

    def end(self) -> None:
        """Note that the resume has succeeded, or that the job ends as it should."""
        if self._success is not None:
            self._success, self.before = None, Resumes()
            self._put(Resumes())

    def _in_memory(self) -> Resumes:
        try:
            return Resumes.from_json(files.read_bytes(self._path()))
        except (FileNotFoundError, ManifestInvalid):
            return Resumes()

    def _on_storage(self) -> Resumes:
        try:
            storage = storage_of(self._settings)
            if storage is not None:
                return Resumes.from_json(storage.get(names.job_file(RESUMES)))
        except (StorageKeyMissing, ManifestInvalid):
            pass
        except DcpMemError as error:
            log.warning("how often the job has resumed can't be read: %s", error)
        return Resumes()

    def _put(self, resumes: Resumes) -> None:
        if job_memory(self._settings) is not None:
            try:
                files.write_atomically(self._path(), resumes.to_json())
            except (OSError, DcpMemError) as error:
                log.warning("that the job has resumed can't be written down: %s", error)
        if self._is_first_rank:
            daemon(lambda: self._put_on_storage(resumes)).join(_STORAGE_TIMEOUT)

    def _put_on_storage(self, resumes: Resumes) -> None:
        try:
            storage = storage_of(self._settings)
            if storage is not None:
                storage.put(names.job_file(RESUMES), resumes.to_json())
        except Exception as error:  # training goes on, whatever this may be
            log.warning("that the job has resumed can't be written down on storage: %s", error)

    def _path(self) -> str:
        return os.path.join(self._settings.memory_root, self._settings.job, RESUMES)
