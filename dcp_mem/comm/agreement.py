"""Collective attempts: what fails on one rank is raised on all ranks, and no rank is left waiting.

A rank that raises in front of a collective call leaves the other ranks waiting in that call until
they time out. So the work in front of a call is attempted: an error is kept, travels with the call,
and is raised behind it, on all ranks alike (invariant 8).

    on_all_ranks    every rank acts; all return, or all raise             one all-reduce
    on_rank_0       rank 0 acts; all get its result, or raise             one broadcast
    from_all_ranks  every rank acts, rank 0 decides; all get the decision one gather, one broadcast

A call that carries other values as well carries `Failures` beside them: `attempt` the work, join
the failures of all ranks by `joined`, and `raise_together`.

Only the texts of errors travel, so an error may be of any kind. KeyboardInterrupt, SystemExit and
whatever else isn't an Exception is raised at once, and this rank leaves the others: their call
raises RankFailed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from dcp_mem.comm.collectives import Ranks
from dcp_mem.common.log import log
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import MARK, RankFailed

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)

Failures = tuple[tuple[int, str], ...]
"""(rank, what went wrong there), sorted by rank; the first few of them."""

_MOST_FAILURES = 8
_SHARED, _OF_ONE_CALL = MARK + "is_shared", MARK + "is_of_one_call"


@sendable
@value_class
class Attempted(Generic[T]):
    """The outcome of work on this rank: the value it returned, or the error it raised."""

    _values: tuple[T, ...] = ()
    error: Exception | None = None  # None where the work returned

    @property
    def value(self) -> T:
        """The value that the work returned; raises the error that the work raised."""
        if self.error is not None:
            raise self.error
        return self._values[0]

    def failures(self, rank: int) -> Failures:
        """Return this rank's failure, for the other ranks; empty where the work returned."""
        return () if self.error is None else ((rank, described(self.error)),)


def attempt(act: Callable[[], T]) -> Attempted[T]:
    """Call `act`, and keep what it returns or raises.

    What isn't an Exception is raised at once: where other ranks wait, `attempt_or_leave`.
    """
    try:
        return Attempted((act(),))
    except Exception as error:
        _mark(error, is_shared=False)  # the work may raise the same object each time
        return Attempted(error=error)


def attempt_or_log(what: str, act: Callable[[], T]) -> T | None:
    """Call `act` behind the last vote of a call; log what it raises.

    The other ranks may have returned: this one must neither raise nor leave them.
    """
    try:
        return act()
    except Exception as error:
        log.warning("%s: %s", what, described(error), exc_info=error)
        return None


def attempt_or_leave(ranks: Ranks, act: Callable[[], T]) -> Attempted[T]:
    """Attempt; leave the ranks where that raises what isn't an Exception, as KeyboardInterrupt.

    The process may live on after it, so the other ranks wouldn't notice that their call is in vain.
    """
    try:
        return attempt(act)
    except BaseException as error:
        ranks.leave(described(error))
        raise


@contextmanager
def leaving_on_error(ranks: Ranks) -> Iterator[None]:
    """Leave the ranks where the block raises on this rank, so that none waits for its next call.

    An error that all ranks know has ended their calls as well. A rank that left them all the same
    would break their next call.

    `ranks`: the ranks that make the same calls in the block, or behind it.
    """
    try:
        yield
    except BaseException as error:
        if not is_shared(error):
            ranks.leave(described(error))
        raise


def is_shared(error: BaseException) -> bool:
    """Return whether all ranks have been told of an error, and raise as well.

    A RankFailed is what the other ranks' failures are raised as, or ends a group that has broken.
    """
    return isinstance(error, RankFailed) or was_voted_on(error)


def was_voted_on(error: BaseException) -> bool:
    """Return whether every rank raises because of an error, each in the same step.

    A rank whose connection has broken raises a RankFailed that nobody has voted on.
    """
    return bool(getattr(error, _SHARED, False))


def is_of_one_call(error: BaseException) -> bool:
    """Return whether the ranks that raise an error are in one call, as far as is known."""
    return bool(getattr(error, _OF_ONE_CALL, True))


def known_to_all(error: E, *, is_of_one_call: bool = True) -> E:
    """Return an error, marked as one that all ranks raise, each from the same facts.

    Without the mark, each rank would leave the others, who may be in their next call already.

    `is_of_one_call`: False where the ranks may have met from different calls, as when threads save
    in another order on each rank. They mustn't wait for each other any more.
    """
    _mark(error, is_shared=True)
    if not is_of_one_call:
        vars(error)[_OF_ONE_CALL] = False
    return error


def _mark(error: Exception, *, is_shared: bool) -> Exception:
    vars(error)[_SHARED] = is_shared  # by setattr, a class of its own might refuse
    return error


def described(error: BaseException) -> str:
    """Return an error's type and text, for the other ranks."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error's text is the work of whoever defined it
        return type(error).__name__


def joined(first: Failures, second: Failures) -> Failures:
    """Join the failures of two sets of ranks, in any order; keep the first few ranks' only."""
    return tuple(sorted(first + second)[:_MOST_FAILURES])


def raise_together(what: str, failures: Failures, own: Exception | None = None) -> None:
    """Raise on this rank if any rank has failed.

    `what`: what the ranks were doing, for the text of the error. Raises Exception, RankFailed.
    """
    if own is not None:
        raise _mark(own, is_shared=True)
    if failures:
        raise known_to_all(RankFailed(what, failures))


def on_all_ranks(ranks: Ranks, what: str, act: Callable[[], T]) -> T:
    """Act on every rank; return this rank's result once all ranks have one.

    `what`: what is attempted, for the text of the error ("publishing step-100"). `act`: this rank's
    work. It must not talk to other ranks. Raises Exception, RankFailed.
    """
    own = attempt_or_leave(ranks, act)
    try:
        failures = ranks.all_reduce(own.failures(ranks.rank), joined)
    except RankFailed:
        if own.error is None:
            raise
        raise own.error from None  # the other ranks may not have been told
    raise_together(what, failures, own.error)
    return own.value


def on_rank_0(ranks: Ranks, what: str, act: Callable[[], T]) -> T:
    """Act on rank 0 alone; return its result on every rank.

    Raises RankFailed.
    """
    return _broadcast(ranks, what, _on_rank_0(ranks, act))


def from_all_ranks(
    ranks: Ranks, what: str, act: Callable[[], T], decide: Callable[[Sequence[T]], R]
) -> R:
    """Act on every rank and decide on rank 0; return the decision on every rank.

    `decide`: makes the decision from all ranks' results, by rank; called on rank 0, and only if no
    rank has failed. The decision can be sent as well. Raises Exception, RankFailed.
    """
    own = attempt_or_leave(ranks, act)
    try:
        gathered = ranks.gather((own._values, own.failures(ranks.rank)), _with_equal_ones_once)
        decision = _on_rank_0(ranks, lambda: decide(_values_of_all(what, gathered)))
        return _broadcast(ranks, what, decision)
    except RankFailed as failed:
        own_error, is_known = own.error, was_voted_on(failed)
        if own_error is None:
            raise
    raise _mark(own_error, is_shared=is_known)


def _with_equal_ones_once(values: Sequence[T]) -> Sequence[T]:
    """Return values with each that equals its predecessor as the same object: it is sent once."""
    found: list[T] = []
    for value in values:
        found.append(found[-1] if found and _are_equal(found[-1], value) else value)
    return found


def _are_equal(first: object, second: object) -> bool:
    try:
        return bool(first == second)
    except Exception:  # tensors and arrays compare by element
        return False


def _on_rank_0(ranks: Ranks, act: Callable[[], T]) -> Attempted[T] | None:
    """Attempt something on rank 0; return None on the other ranks."""
    if ranks.rank != 0:
        return None
    return attempt_or_leave(ranks, act)


def _values_of_all(what: str, gathered: Sequence[tuple[tuple[T, ...], Failures]]) -> Sequence[T]:
    """Return all ranks' values, by rank. Raise RankFailed if a rank has failed."""
    failures = tuple(failure for _, of_rank in gathered for failure in of_rank)
    raise_together(what, failures[:_MOST_FAILURES])
    return [values[0] for values, _ in gathered]


def _broadcast(ranks: Ranks, what: str, attempted: Attempted[T] | None) -> T:
    """Return rank 0's result on every rank; raise RankFailed on every rank where it has none."""
    error = None if attempted is None else attempted.error
    failures: Failures = () if error is None else ((0, described(error)),)
    if isinstance(error, RankFailed) and error.failures:  # it names the ranks that failed
        failures = tuple(error.failures)
    values = () if attempted is None else attempted._values
    values, failures = ranks.broadcast((values, failures))
    if failures:
        raise known_to_all(RankFailed(what, failures)) from error
    return values[0]
