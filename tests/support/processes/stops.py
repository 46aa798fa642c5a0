"""Stop a process for sure.

    stop(pid)

SIGSTOP returns at once. The process's threads go on until one of them has taken the signal, which
on a busy machine is long enough to answer a request.
"""

import os
import signal
import time
from pathlib import Path

_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.001


def stop(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(state != "T" for state in _states(pid)):
        assert time.monotonic() < deadline, f"process {pid} hasn't stopped"
        time.sleep(_POLL_SECONDS)


def _states(pid: int) -> list[str]:
    return [
        (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]
