"""`dcp-mem follow`: run a command for each new checkpoint of a training run."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

import click

from dcp_mem.cli.options import CommonOptions, repeating, subcommand
from dcp_mem.common.log import log
from dcp_mem.common.values import figures
from dcp_mem.errors import ConfigError, DcpMemError
from dcp_mem.following.checkpoint import FollowedCheckpoint
from dcp_mem.following.follower import Follower, follow
from dcp_mem.operations.inventory import searched_places

_HELP = """Follow a training run, which may be on this node or elsewhere: print each new checkpoint,
the newest first, or run a command for it.

Checkpoints that come while a command runs are skipped, but for the newest. It ends with Ctrl-C or
SIGTERM (the command is sent that, too), or as the options say. Exit code 1 if a command has failed.

--exec takes a command and its arguments, without a shell, in which these stand for

\b
{path}  where torch's readers find the checkpoint: a directory of links in tmpfs
        if this node's memory has it, else its directory or URL on storage. The
        links go when the command has ended; it may delete them, and must not
        write to them.
{name}  the checkpoint's name
{step}  its training step; "" where that isn't known

Examples:
  dcp-mem follow s3://ckpts/run-42
  dcp-mem follow s3://ckpts/run-42 --exec 'python evaluate.py {path} --step {step}'
  dcp-mem follow /mnt/nfs/run-42 --durable --until-ended --exec 'rsync -a {path} /mnt/kept/'
  dcp-mem follow - --job my-run --timeout 3600 --exec 'sh -c "date; ls \\"$1\\"" sh {path}'
"""
_PLACE = re.compile(r"\{(path|name|step)\}")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@subcommand("follow", _HELP)
@click.option("--exec", "text", metavar="COMMAND", help="Run this for each checkpoint; see above.")
@click.option("--durable", "only_durable", is_flag=True, help="Only checkpoints that storage has.")
@click.option(
    "--until-ended",
    is_flag=True,
    help="End with the run, if it ends on this node; a killed run may be restarted, and doesn't.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.0),
    metavar="SECONDS",
    help="End when no new checkpoint has come for so long.",
)
@repeating("checkpoints", shortest_seconds=0.05)
def command(
    common: CommonOptions,
    text: str | None,
    only_durable: bool,
    until_ended: bool,
    timeout: float | None,
    times: int | None,
    seconds: float,
) -> int:
    settings = common.settings()
    words = _words(text)
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


def _words(text: str | None) -> Sequence[str]:
    """Return a command's words; raise where there is no such program."""
    if text is None:
        return ()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--exec {text!r}: {error}") from None
    if not words or not (_PLACE.search(words[0]) or shutil.which(words[0])):
        raise ConfigError(f"--exec {text!r}: there is no such command")
    return words


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
        arguments = [_PLACE.sub(lambda match: values[match[1]], word) for word in words]
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
