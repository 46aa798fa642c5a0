"""Notices: texts that any rank adds at any time, and that all ranks read in the same order.

Collectives need all ranks to make the same call. A notice is added by one rank alone, to the
store that the ranks met in; a thread of every rank reads it there.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable

import torch.distributed as dist

from dcp_mem.comm.job_ranks import default_store, meeting, restart_count, run_token
from dcp_mem.comm.timed_store import TimedStore, own_connection
from dcp_mem.config import exchange_timeout

_STORE_SECONDS = 30.0
_POLL_SECONDS = 0.02
_made: Counter[str] = Counter()
_IDLE_POLLS = 15
"""A rank that awaits no notice looks at the store once in so many polls."""
_LOOKS = 5
"""The number of times that `next` looks at the store before it returns None."""


class Notices:
    """One rank's view of the notices for a purpose.

    All ranks make one equally often: the n-th ones of all ranks belong together, and share nothing
    with earlier ones. There are two connections to the store: one is for `next`, which belongs to
    one thread; the other methods share the other one.

    Raises RankFailed.
    """

    def __init__(self, purpose: str) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        facts = (purpose, restart_count(), run_token())
        _made[repr(facts)] += 1
        digest = hashlib.sha256(repr((*facts, _made[repr(facts)])).encode()).hexdigest()[:16]
        store, seconds = default_store(), min(exchange_timeout(), _STORE_SECONDS)
        with meeting(self.rank):
            self._asking, self._listening = (
                TimedStore(
                    dist.PrefixStore(f"dcp_mem/notices/{digest}", own_connection(store, seconds)),
                    seconds,
                )
                for _ in range(2)
            )
        self._read = 0

    def count(self, what: str) -> int:
        """Increment a counter that all ranks share; return its value."""
        with meeting(self.rank):
            return self._asking.add(f"count/{what}", 1)

    def reset(self, what: str) -> None:
        """Set a counter that all ranks share to 0; no rank may be counting."""
        key = f"count/{what}"
        with meeting(self.rank):
            self._asking.add(key, -self._asking.add(key, 0))

    def settle(self, what: str, proposal: str) -> str:
        """Settle a question by the first proposal; return that proposal, on every rank.

        `proposal`: this rank's answer, which counts where this rank is the first.
        """
        with meeting(self.rank):
            return self._asking.compare_set(f"settled/{what}", "", proposal).decode()

    def settled(self, what: str, seconds: float) -> str | None:
        """Wait until some rank has settled a question; return the answer.

        Returns None if nobody settled it in time.
        """
        key, deadline = f"settled/{what}", time.monotonic() + seconds
        with meeting(self.rank):
            while not self._asking.check(key):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECONDS)
            return self._asking.get(key).decode()

    def add(self, notice: str) -> None:
        """Add a notice, which all ranks read, this one too."""
        number = self.count("notices")
        with meeting(self.rank):
            self._asking.set(f"notice/{number}", notice)

    def next(self, is_awaited: Callable[[], bool]) -> str | None:
        """Return the next notice, or None if none has come after a while.

        It polls: the store prints a warning for each wait that ends without a key.

        `is_awaited`: returns whether this process waits for a notice, so that polling is quicker.
        """
        key = f"notice/{self._read + 1}"
        for _ in range(_LOOKS):
            with meeting(self.rank):
                if self._listening.check(key):
                    text = self._listening.get(key).decode()
                    self._read += 1
                    return text
            for _ in range(_IDLE_POLLS):
                time.sleep(_POLL_SECONDS)
                if is_awaited():
                    break
        return None
