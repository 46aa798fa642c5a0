"""Notices that ranks give each other at any time, and that all of them read in the same order: through the store they met in.

Gloo's calls are for ranks that all make the same call. Here one rank says something when it has something to say, and the others,
in a thread that waits for it, hear of it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable

import torch.distributed as dist

from dcp_mem.errors import RankFailed
from dcp_mem.ranks.gloo import attempt, exchange_timeout, run_token
from dcp_mem.ranks.prompt import Prompt, connection_of_its_own

_STORE_SECONDS = 30.0
_POLL_SECONDS = 0.02
_made: Counter[str] = Counter()
_IDLE_POLLS = 15
"""Of how many polls a rank that awaits nothing leaves out all but one."""
_LOOKS = 5


class Notices:
    """One rank's end. Every method raises RankFailed where the store is gone, or silent.

    All ranks make theirs equally often for a purpose: the n-th of each belong together, and know nothing of earlier ones'.
    Of its two connections to the store one is for `next`, which waits there, and belongs to one thread.
    """

    def __init__(self, purpose: str) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        facts = (purpose, attempt(), run_token())
        _made[repr(facts)] += 1
        digest = hashlib.sha256(repr((*facts, _made[repr(facts)])).encode()).hexdigest()[:16]
        store = dist.distributed_c10d._get_default_store()
        self._patience = min(exchange_timeout(), _STORE_SECONDS)
        try:
            self._say, self._listen = (
                dist.PrefixStore(f"dcp_mem/notices/{digest}", connection_of_its_own(store, self._patience))
                for _ in range(2)
            )
        except RuntimeError as error:
            raise self._failed(error) from None
        self._saying, self._listening = Prompt(self._patience), Prompt(self._patience)
        self._guard = threading.Lock()  # whoever says something does so alone
        self._read = 0

    def count(self, what: str) -> int:
        """Count something; returns how often all ranks together have counted it by now."""
        try:
            with self._guard:
                return self._saying.do(lambda: int(self._say.add(f"count/{what}", 1)))
        except RuntimeError as error:
            raise self._failed(error) from None

    def settle(self, what: str, proposal: str) -> str:
        """What the first rank to ask has proposed."""
        try:
            with self._guard:
                return self._saying.do(lambda: bytes(self._say.compare_set(f"settled/{what}", "", proposal)).decode())
        except RuntimeError as error:
            raise self._failed(error) from None

    def settled(self, what: str, seconds: float) -> str | None:
        """What some rank has proposed first, or does within so many seconds; None where none does."""
        key, deadline = f"settled/{what}", time.monotonic() + seconds
        try:
            while True:
                with self._guard:
                    if self._saying.do(lambda: bool(self._say.check([key]))):
                        return self._saying.do(lambda: bytes(self._say.get(key)).decode())
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECONDS)
        except RuntimeError as error:
            raise self._failed(error) from None

    def add(self, notice: str) -> None:
        """Give a notice to all ranks, this one too."""
        number = self.count("notices")
        try:
            with self._guard:
                self._saying.do(lambda: self._say.set(f"notice/{number}", notice))
        except RuntimeError as error:
            raise self._failed(error) from None

    def next(self, is_awaited: Callable[[], bool]) -> str | None:
        """The next notice; None where none has come after a while. is_awaited: whether somebody waits for one to come.

        It asks now and then: the store itself prints a warning for each wait that ends with nothing.
        """
        key = f"notice/{self._read + 1}"
        try:
            for _ in range(_LOOKS):
                if self._listening.do(lambda: bool(self._listen.check([key]))):
                    text = self._listening.do(lambda: bytes(self._listen.get(key)).decode())
                    self._read += 1
                    return text
                for _ in range(_IDLE_POLLS):
                    time.sleep(_POLL_SECONDS)
                    if is_awaited():
                        break
        except RuntimeError as error:
            raise self._failed(error) from None
        return None

    def _failed(self, error: RuntimeError) -> RankFailed:
        return RankFailed("meeting the other ranks", [(self.rank, str(error).split("\n")[0][:300])])
