"""Work shared out over threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")


def for_each(pool: ThreadPoolExecutor, work: Callable[[T], object], items: Iterable[T]) -> None:
    """Do `work` on every item, and wait for all; raise the first error."""
    for _ in pool.map(work, items):
        pass
