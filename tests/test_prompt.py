"""A store that falls silent is given up in time, and costs whoever asks again no time at all."""

import threading
import time
from typing import cast

import pytest
import torch.distributed as dist

from dcp_mem.ranks.prompt import PromptStore


class _Store:
    """A store that answers while `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.answers.wait(60)
        return keys == ["there"]

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        raise dist.DistNetworkError("Broken pipe")


def _prompt(store: _Store, seconds: float) -> PromptStore:
    return PromptStore(cast("dist.Store", store), seconds)


def test_a_silent_store_is_given_up_and_not_asked_again_until_it_has_answered() -> None:
    store = _Store()
    prompt = _prompt(store, 0.2)
    with pytest.raises(RuntimeError, match="did not answer within 0 s"):
        prompt.check("there")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="still doesn't answer"):
        prompt.check("there")
    assert time.monotonic() - started < 0.1
    assert store.asked == 1
    store.answers.set()
    deadline = time.monotonic() + 10
    while True:  # as soon as the first answer has come
        try:
            assert prompt.check("there")
            break
        except RuntimeError:
            assert time.monotonic() < deadline
    assert not prompt.check("elsewhere")


def test_an_error_of_the_store_reaches_whoever_asks() -> None:
    with pytest.raises(dist.DistNetworkError, match="Broken pipe"):
        _prompt(_Store(), 10).compare_set("key", "", "value")
