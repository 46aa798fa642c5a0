"""Errors as DCP raises them: a CheckpointException that has the failures by rank.

`except CheckpointException` then works around `dcp_mem.save` and `dcp_mem.load` as it does around
`dcp.save` and `dcp.load`. It is no subclass of Exception, so `except Exception` doesn't catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import StackSummary, extract_tb

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_mem.comm import world_size
from dcp_mem.comm.agreement import described
from dcp_mem.errors import ConfigError, RankFailed


@contextmanager
def raised_as_by_dcp(
    step: str,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    is_passed_on: Callable[[Exception], bool],
) -> Iterator[None]:
    """Raise what the block raises as a CheckpointException, with the error itself as its cause.

    KeyboardInterrupt, SystemExit and whatever else isn't an Exception is passed on as it is.

    `process_group`: the ranks of the call; None for the default group. Raises CheckpointException.
    """
    try:
        yield
    except Exception as error:
        if is_passed_on(error):
            raise
        rank = 0 if no_dist or not _has_groups() else dist.get_rank(process_group)
        raise CheckpointException(step, failures_by_rank(error, rank)) from error


def is_mistake_of_all(error: BaseException, process_group: dist.ProcessGroup | None) -> bool:
    """Return whether a call failed for an argument that is wrong on every rank.

    What some ranks alone got wrong is no reason to end training.
    """
    cause = error.__cause__
    is_of_few = isinstance(cause, RankFailed) and len(cause.failures) < world_size(process_group)
    return isinstance(error, ConfigError) and not is_of_few


Wrapped = tuple[BaseException, StackSummary]
"""An error as DCP exchanges it."""


def is_wrapped(value: object) -> bool:
    """Return whether DCP takes a value for an error."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], BaseException)
        and isinstance(value[1], StackSummary)
    )


def failures_by_rank(error: Exception, rank: int) -> dict[int, Wrapped]:
    """Return the failures that an error tells of, as CheckpointException takes them.

    A RankFailed stands for the errors of the ranks that it names. Each gets one of its own, since
    only the texts of errors travel; this rank's is the error itself. Any other error is this
    rank's.
    """
    if not isinstance(error, RankFailed) or not error.failures:
        return {rank: _wrapped(error)}
    _, traceback = _wrapped(error)
    found: dict[int, Wrapped] = {
        failed: (RankFailed(error.what, [(failed, text)]), traceback)
        for failed, text in error.failures
    }
    cause = error.__cause__
    if rank in found and isinstance(cause, Exception) and not isinstance(cause, RankFailed):
        found[rank] = _wrapped(cause)
    return found


def _wrapped(error: BaseException) -> Wrapped:
    return error, extract_tb(error.__traceback__)


def _has_groups() -> bool:
    return dist.is_available() and dist.is_initialized()


def cause_of(
    error: BaseException, process_group: dist.ProcessGroup | None, what: str = "the save"
) -> BaseException:
    """Return the error that a CheckpointException tells of; any other error as it is.

    `process_group`: the ranks of the call; None for the default group. Returns this rank's own
    error, else a RankFailed.
    """
    if not isinstance(error, CheckpointException):
        return error
    rank = dist.get_rank(process_group) if _has_groups() else 0
    if rank in error.failures:
        return error.failures[rank][0]
    failures = [(one, described(failure[0])) for one, failure in sorted(error.failures.items())]
    return RankFailed(what, failures)
