"""Turns are in order, end however a save ends, and hold nobody up who needn't wait."""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from dcp_mem.runtime.turns import Turn, Turns

_SECONDS = 30.0
"""No wait of these tests takes so long, unless it would take for ever."""


class _Waiter:
    """A thread that waits for a turn, and goes on holding it until it is told to end."""

    def __init__(self, turn: Turn, *, ends: bool = False) -> None:
        self.has_turn, self._may_go = threading.Event(), threading.Event()
        self._turn, self._ends = turn, ends
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._turn.wait()
        self.has_turn.set()
        assert self._may_go.wait(_SECONDS)
        if self._ends:
            self._turn.end()

    def go(self) -> None:
        """Let the thread end, and wait until it has."""
        self._may_go.set()
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()


def _in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    assert not thread.is_alive()


@contextlib.contextmanager
def _held(turns: Turns) -> Iterator[_Waiter]:
    """A turn that another thread holds, and ends at the end."""
    waiter = _Waiter(turns.take(), ends=True)
    assert waiter.has_turn.wait(_SECONDS)
    yield waiter
    waiter.go()


def test_turns_come_in_the_order_in_which_they_were_taken_not_waited_for() -> None:
    turns, order = Turns(), []
    taken = [turns.take() for _ in range(20)]

    def wait_and_end(number: int) -> None:
        with taken[number]:
            order.append(number)

    threads = [
        threading.Thread(target=wait_and_end, args=(number,), daemon=True)
        for number in reversed(range(20))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    assert order == list(range(20))


def test_one_at_a_time_holds_a_turn() -> None:
    turns, inside, most = Turns(), [0], [0]

    def save() -> None:
        for _ in range(100):
            with turns.take():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=save, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
        assert not thread.is_alive()
    assert most == [1]


def test_a_turn_is_not_had_before_the_earlier_one_is_over() -> None:
    turns = Turns()
    with _held(turns):
        waiter = _Waiter(turns.take())
        assert not waiter.has_turn.wait(0.02)
    assert waiter.has_turn.wait(_SECONDS)
    waiter.go()


def test_an_error_within_the_block_ends_the_turn() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.take():
        raise KeyError
    _in_thread(turns.take().wait)


def test_ending_twice_ends_no_other_turn() -> None:
    turns = Turns()
    first, second, third = turns.take(), turns.take(), turns.take()
    first.end()
    first.end()
    waiter = _Waiter(second, ends=True)
    assert waiter.has_turn.wait(_SECONDS)
    behind = _Waiter(third)
    assert not behind.has_turn.wait(0.02)
    waiter.go()
    assert behind.has_turn.wait(_SECONDS)
    behind.go()


def test_a_turn_may_be_ended_before_it_has_come() -> None:
    turns = Turns()
    with _held(turns):
        skipped, last = turns.take(), turns.take()
        skipped.end()
    _in_thread(last.wait)


@pytest.mark.parametrize("in_cycle", [False, True])
def test_a_ticket_that_is_dropped_holds_nobody_up(in_cycle: bool) -> None:
    turns = Turns()
    turn = turns.take()
    if in_cycle:
        turn.follow(lambda of=[turn]: False)  # type: ignore[misc]  # keeps it alive
        turn._follows = None
        turn.itself = turn  # type: ignore[attr-defined]
    behind = turns.take()
    del turn
    gc.collect()
    _in_thread(behind.wait)


def test_a_turn_whose_thread_has_ended_holds_nobody_up() -> None:
    turns = Turns()
    left = turns.take()
    _in_thread(left.wait)  # and never ends it
    _in_thread(turns.take().wait)


def test_a_turn_that_no_thread_has_waited_for_yet_is_waited_for() -> None:
    turns = Turns()
    made: list[Turn] = []
    _in_thread(lambda: made.append(turns.take()))  # the thread that has taken it has ended
    waiter = _Waiter(turns.take())
    assert not waiter.has_turn.wait(0.02)
    made[0].end()
    assert waiter.has_turn.wait(_SECONDS)
    waiter.go()


def test_a_thread_does_not_wait_for_itself() -> None:
    turns = Turns()
    abandoned = turns.take()
    abandoned.wait()
    turn = turns.take()
    turn.wait()
    assert turns.has_here()
    turn.end()
    assert not turns.has_here()


def test_a_turn_that_was_handed_over_is_not_abandoned() -> None:
    turns = Turns()
    turn = turns.take()
    turn.wait()
    turn.hand_over()
    assert not turns.has_here()
    background = _Waiter(turn, ends=True)
    assert background.has_turn.wait(_SECONDS)
    ahead = [False]

    def go() -> None:
        ahead[0] = True
        background.go()

    threading.Timer(0.02, go).start()
    turns.take().wait()
    assert ahead[0]


def test_a_turn_that_follows_something_is_over_when_that_is() -> None:
    turns, is_over = Turns(), threading.Event()
    turn = turns.take()
    turn.follow(is_over.is_set)
    turn.wait()
    waiter = _Waiter(turns.take())
    assert not waiter.has_turn.wait(0.02)
    is_over.set()
    assert waiter.has_turn.wait(_SECONDS)
    waiter.go()


def test_a_wait_can_be_interrupted_and_the_turn_then_ends_with_the_block(
    request: pytest.FixtureRequest,
) -> None:
    turns = Turns()
    # A shell that starts the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with _held(turns):
        waiting = turns.take()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), waiting:
            raise AssertionError("it is not this turn's turn")
    _in_thread(turns.take().wait)


def test_turns_that_this_thread_holds_can_be_abandoned() -> None:
    turns = Turns()
    turn = turns.take()
    turn.wait()
    assert turns.has_here()
    turns.abandon_here()
    assert not turns.has_here()
    _in_thread(turns.take().wait)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_parents_turns_hold_no_child_up() -> None:
    turns = Turns()
    with _held(turns):
        behind = turns.take()
        child = os.fork()
        if not child:
            signal.alarm(int(_SECONDS))
            status = 1
            with contextlib.suppress(BaseException):
                behind.wait()
                behind.end()
                with turns.take():
                    status = int(not turns.has_here())  # its turns are its own
            os._exit(status)
        _, status = os.waitpid(child, 0)
    assert status == 0


def test_a_ticket_that_only_the_collector_can_find_holds_nobody_up_for_long() -> None:
    turns = Turns()

    class Kept:
        """An error, say, whose frames refer to the ticket and to the error."""

        def __init__(self) -> None:
            self.ticket, self.itself = turns.take(), self

    gc.disable()
    try:
        Kept()
        _in_thread(turns.take().wait)
    finally:
        gc.enable()


def test_a_save_in_a_signal_handler_comes_before_the_one_that_it_has_interrupted() -> None:
    turns, order = Turns(), []
    with _held(turns) as earlier:
        interrupted = turns.take()

        def save(*_: object) -> None:
            turns.abandon_here()
            turn = turns.take()
            earlier.go()
            turn.wait()
            order.append("handler's")
            turn.end()

        before = signal.signal(signal.SIGUSR1, save)  # SIGALRM is pytest-timeout's
        main = threading.get_ident()
        timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        timer.start()
        try:
            interrupted.wait()
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)
        order.append("interrupted")
        assert not interrupted.is_over
        later = turns.take()
        assert not later.is_over
        behind = _Waiter(later)
        assert not behind.has_turn.wait(0.05)  # the interrupted one still holds them up
        interrupted.end()
        assert behind.has_turn.wait(_SECONDS)
        behind.go()
    assert order == ["handler's", "interrupted"]
