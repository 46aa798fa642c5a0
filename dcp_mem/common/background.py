"""How background threads begin."""

from __future__ import annotations

import threading

_SECONDS = 0.005


def let_caller_return(unwanted: threading.Event | None = None) -> bool:
    """Wait until the save that has just woken this thread has returned, most likely.

    A thread that wakes at once takes the interpreter's lock from the save, which then hands it back
    and forth instead of returning.

    Args:
        unwanted: Ends the wait when it is set.

    Returns:
        Whether the thread may begin; False once it is unwanted.
    """
    return not (unwanted or threading.Event()).wait(_SECONDS)
