"""How often, and for how long, this process asks storage again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from dcp_mem.storage.retry import RETRIES, RetryPolicy


@contextmanager
def asking_as(policy: RetryPolicy) -> Iterator[None]:
    """Repeat requests to storage in the block as this policy says."""
    before = replace(RETRIES)
    _set(policy)
    try:
        yield
    finally:
        _set(before)


@contextmanager
def asked_once() -> Iterator[None]:
    """Repeat no request to storage in the block: what is wrong reaches whoever asked, at once."""
    with asking_as(replace(RETRIES, tries=1)):
        yield


def _set(policy: RetryPolicy) -> None:
    for field in fields(policy):
        object.__setattr__(RETRIES, field.name, getattr(policy, field.name))
