"""Copies behind the training loop that wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from dcp_mem.common import faults

_SECONDS = 100.0


@contextmanager
def held_copies() -> Iterator[threading.Event]:
    """Have copies behind the loop wait until the event is set."""
    may_go_on, point = threading.Event(), faults.point

    def held(name: str) -> None:
        if name == "overlap.begun":
            assert may_go_on.wait(_SECONDS)
        point(name)

    with patch.object(faults, "point", held):
        try:
            yield may_go_on
        finally:
            may_go_on.set()
