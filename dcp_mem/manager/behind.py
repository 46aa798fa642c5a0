"""What has failed, or was rejected, behind training."""

from __future__ import annotations

from collections.abc import Iterator

from dcp_mem.comm import is_first_of_node
from dcp_mem.common.log import log
from dcp_mem.common.values import Outcome, State
from dcp_mem.config import Settings
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.locks import saving_run
from dcp_mem.runtime.session import open_session
from dcp_mem.runtime.states import job_memory, status_of


class Behind:
    """Finds what is new among the failures and rejections of this node's checkpoints."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        memory = job_memory(settings)
        held = [] if memory is None else memory.checkpoints()
        self._said = {(one.manifest.save_id, error) for one, error in _failures(held)}

    def look(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what has failed behind training since the last look, and what was rejected.

        Failures are logged. Those that an earlier run has left are logged only: its agent may still
        try them, after its trainers have died and so without a right to the storage.
        """
        session = open_session(self._settings)
        if session is None:
            return (), ()
        held, own = session.memory.checkpoints(), saving_run(session.memory.directory)
        failed = []
        for one, error in _failures(held):
            if (one.manifest.save_id, error) in self._said:
                continue
            self._said.add((one.manifest.save_id, error))
            if is_first_of_node():
                log.warning("%s: %s", one.name, error)
            if one.manifest.run == own:
                failed.append(f"{one.name}: {error}")
        new = [one for one in held if one.rejected and (one.name, one.rejected) not in self._said]
        self._said |= {(one.name, one.rejected) for one in new}
        return tuple(failed), tuple(f"{one.name}: rejected: {one.rejected}" for one in new)


def _failures(held: list[LocalCheckpoint]) -> Iterator[tuple[LocalCheckpoint, str]]:
    """Yield those whose flush or copies have failed, and why: fewer nodes are no failure."""
    for one in held:
        status, copies = status_of(one), one.replication
        error = copies.error if copies.outcome == Outcome.FAILED else ""
        if error := (status.error if status.state is State.FAILED else error):
            yield one, error
