"""Tell a training that was broken off from one that has ended, for what is called at both ends."""

from __future__ import annotations

import sys


class Ending:
    """Tells an exception that ends a training from one that is handled around all of it.

    A second attempt is often made where the exception of the first one is handled.
    """

    def __init__(self) -> None:
        self._handled_at_begin: int | None = None

    def begin(self) -> None:
        """Note which exception is being handled; once for each training, whenever it is called."""
        if self._handled_at_begin is None:
            self._handled_at_begin = id(sys.exc_info()[1])

    def is_broken_off(self) -> bool:
        """Return whether an exception is being handled that wasn't at the beginning; end there."""
        handled, self._handled_at_begin = self._handled_at_begin, None
        error = sys.exc_info()[1]
        return error is not None and id(error) != handled
