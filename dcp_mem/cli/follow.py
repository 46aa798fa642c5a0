"""`dcp-mem follow`: run a command for each new checkpoint of a training run."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.parsing import filled
from dcp_mem.common.log import log
from dcp_mem.common.values import figures
from dcp_mem.errors import DcpMemError
from dcp_mem.following.checkpoint import FollowedCheckpoint
from dcp_mem.following.follower import Follower, follow
from dcp_mem.operations.inventory import searched_places

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    common: CommonOptions,
    words: Sequence[str],
    only_durable: bool,
    until_ended: bool,
    timeout: float | None,
    times: int | None,
    seconds: float,
) -> int:
    settings = common.settings()
    log.setLevel(min(log.level, logging.WARNING))  # What is passed over is said by the follower.
    follower = follow(
        settings.url,
        memory_root=settings.memory_root,
        job=settings.job,
        storage_options=settings.storage_options,
        only_durable=only_durable,
        until_ended=until_ended,
        timeout=timeout,
        poll_seconds=seconds,
    )
    common.screen.note(f"following {searched_places(settings)}; Ctrl-C ends it")
    with follower, _Stopping(follower) as stopping:
        failures = sum(
            _has_failed(common, checkpoint, words, stopping)
            for checkpoint in islice(follower, times)
        )
    return 1 if failures else 0


def _has_failed(
    common: CommonOptions,
    checkpoint: FollowedCheckpoint,
    words: Sequence[str],
    stopping: _Stopping,
) -> bool:
    """Tell of a checkpoint, and run the command for it, if there is one."""
    step = "" if checkpoint.step is None else f"step {checkpoint.step}"
    state = "durable" if checkpoint.is_durable else "complete"
    facts = [step, state, figures(checkpoint.metrics)]
    common.screen.line(f"{checkpoint.name}  " + ", ".join(filter(None, facts)))
    sys.stdout.flush()  # before what the command prints
    begun, code, trouble = time.monotonic(), None, ""
    if words:
        try:
            code = _run(checkpoint, words, stopping)
        except (DcpMemError, OSError) as error:
            trouble = str(error)
    took = time.monotonic() - begun
    common.screen.answer(
        name=checkpoint.name,
        save_id=checkpoint.save_id,
        step=checkpoint.step,
        metrics=checkpoint.metrics,
        is_durable=checkpoint.is_durable,
        exit_code=code,
        seconds=took if words else None,
        error=trouble,
    )
    if code and not stopping.number:
        trouble = f"{words[0]} {_ended(code)} after {took:.1f} s"
    if trouble:
        common.screen.note(f"{checkpoint.name}: {trouble}")
    return bool(trouble)


def _ended(code: int) -> str:
    """Return how a command has ended, for people."""
    if code > 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _run(checkpoint: FollowedCheckpoint, words: Sequence[str], stopping: _Stopping) -> int:
    """Run the command; return its exit code, or minus the signal that has ended it."""
    with checkpoint.files() as files:
        values = {
            "path": files.path,
            "name": checkpoint.name,
            "step": "" if checkpoint.step is None else str(checkpoint.step),
        }
        arguments = [filled(word, values) for word in words]
        # A session of its own: Ctrl-C reaches it through this process, once.
        with subprocess.Popen(arguments, pass_fds=files.pass_fds, start_new_session=True) as child:
            return stopping.wait_for(child)


class _Stopping:
    """Ends the follower at a signal, and passes that on to the command that runs. The command may
    end in its own way then; with the second signal it is killed.
    """

    def __init__(self, follower: Follower) -> None:
        self.number = 0
        self._follower = follower
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stopping:
        self._before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._follower.stop()
        if self._child is not None:
            _send(self._child, signal.SIGKILL if self.number else number)
        self.number = number

    def wait_for(self, child: subprocess.Popen[bytes]) -> int:
        """Return the exit code of a command, once it has ended."""
        self._child = child
        if self.number:  # it came while the command was started
            _send(child, self.number)
        try:
            return child.wait()
        except BaseException:
            _send(child, signal.SIGKILL)
            raise
        finally:
            self._child = None


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
