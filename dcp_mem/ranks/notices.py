"""Notices that ranks give each other at any time, and that all of them read in the same order: through the store they met in.

Gloo's calls are for ranks that all make the same call. Here one rank says something when it has something to say, and the others,
in a thread that waits for it, hear of it.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch.distributed as dist

from dcp_mem.errors import RankFailed
from dcp_mem.ranks.gloo import attempt, exchange_timeout, run_token
from dcp_mem.ranks.prompt import Prompt, connection_of_its_own

_STORE_SECONDS = 30.0
_SLACK = 10.0


class Notices:
    """One rank's end. Every method raises RankFailed where the store is gone, or silent.

    Of its two connections to the store one is for `next`, which waits there, and belongs to one thread.
    """

    def __init__(self, purpose: str) -> None:
        self._rank = dist.get_rank()
        self.size = dist.get_world_size()
        digest = hashlib.sha256(repr((purpose, attempt(), run_token())).encode()).hexdigest()[:16]
        store = dist.distributed_c10d._get_default_store()
        self._patience = min(exchange_timeout(), _STORE_SECONDS)
        try:
            self._say, self._listen = (
                dist.PrefixStore(f"dcp_mem/notices/{digest}", connection_of_its_own(store, self._patience))
                for _ in range(2)
            )
        except RuntimeError as error:
            raise self._failed(error) from None
        self._saying, self._listening = Prompt(self._patience), Prompt(self._patience + _SLACK)
        self._read = 0

    def count(self, what: str) -> int:
        """Count something; returns how often all ranks together have counted it by now."""
        try:
            return self._saying.do(lambda: int(self._say.add(f"count/{what}", 1)))
        except RuntimeError as error:
            raise self._failed(error) from None

    def settle(self, what: str, proposal: str) -> str:
        """What the first rank to ask has proposed."""
        try:
            return self._saying.do(lambda: bytes(self._say.compare_set(f"settled/{what}", "", proposal)).decode())
        except RuntimeError as error:
            raise self._failed(error) from None

    def add(self, notice: str) -> None:
        """Give a notice to all ranks, this one too."""
        number = self.count("notices")
        try:
            self._saying.do(lambda: self._say.set(f"notice/{number}", notice))
        except RuntimeError as error:
            raise self._failed(error) from None

    def next(self, seconds: float) -> str | None:
        """The next notice; None where none comes within so many seconds."""
        key = f"notice/{self._read + 1}"
        try:
            if not self._listening.do(lambda: self._comes(key, seconds)):
                return None
            text = self._listening.do(lambda: bytes(self._listen.get(key)).decode())
        except RuntimeError as error:
            raise self._failed(error) from None
        self._read += 1
        return text

    def _comes(self, key: str, seconds: float) -> bool:
        try:
            self._listen.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # a time-out, unless the store doesn't answer any more
            return bool(self._listen.check([key]))
        return True

    def _failed(self, error: RuntimeError) -> RankFailed:
        return RankFailed("meeting the other ranks", [(self._rank, str(error).split("\n")[0][:300])])
