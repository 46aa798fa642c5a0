"""Storage that is asked once: what is wrong with it reaches whoever asked, at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from dcp_mem.storage.retry import RETRIES


@contextmanager
def asked_once() -> Iterator[None]:
    """No request of this process to storage is repeated in the block."""
    before = RETRIES.tries
    object.__setattr__(RETRIES, "tries", 1)
    try:
        yield
    finally:
        object.__setattr__(RETRIES, "tries", before)
