"""Requests repeated while that may help: with jittered pauses, a deadline, and one circuit for all that fail at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from dcp_mem.errors import CredentialsExpired, StorageUnavailable
from dcp_mem.events import log
from dcp_mem.storage import Entry, Storage, Unfinished, Upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is repeated. Times in seconds; a pause that storage asks for counts up to `longest_asked`."""

    tries: int = 8
    first_pause: float = 0.5
    longest_pause: float = 8.0
    longest_asked: float = 60.0
    deadline: float = 120.0


PATIENCE = Patience()


class PatientStorage:
    """A storage whose requests are repeated while a retry may help.

    Once one of them has failed for good, and none has succeeded meanwhile, all others give up with their next failure, and
    say how it went: a storage that is down fails a hundred parts no later than one.
    """

    def __init__(self, storage: Storage, patience: Patience = PATIENCE) -> None:
        self.url = storage.url
        self._storage = storage
        self._requests = _Requests(patience)

    @property
    def retries(self) -> int:
        """How many requests were repeats, so far."""
        return self._requests.retries

    def upload(self, key: str, nbytes: int) -> Upload:
        upload = self._requests.repeat(lambda: self._storage.upload(key, nbytes))
        return upload if upload.in_order else _PatientUpload(upload, self._requests)

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        self._requests.repeat(lambda: self._storage.put(key, data, create=create))

    def get(self, key: str) -> bytes:
        return self._requests.repeat(lambda: self._storage.get(key))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        return self._requests.repeat(lambda: self._storage.read_into(key, offset, buffers))

    def ls(self, prefix: str) -> list[Entry]:
        return self._requests.repeat(lambda: self._storage.ls(prefix))

    def delete(self, key: str) -> None:
        self._requests.repeat(lambda: self._storage.delete(key))

    def unfinished(self, prefix: str) -> list[Unfinished]:
        return self._requests.repeat(lambda: self._storage.unfinished(prefix))

    def drop_unfinished(self, key: str) -> None:
        self._requests.repeat(lambda: self._storage.drop_unfinished(key))


class _PatientUpload:
    in_order = False

    def __init__(self, upload: Upload, requests: _Requests) -> None:
        self.part_nbytes = upload.part_nbytes
        self._upload, self._requests = upload, requests

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        return self._requests.repeat(lambda: self._upload.put_part(number, data, crc32c))

    def finish(self) -> None:
        self._requests.repeat(self._upload.finish)

    def close(self) -> None:
        self._upload.close()


class _Requests:
    """Repeats requests, and keeps the circuit that they share."""

    def __init__(self, patience: Patience) -> None:
        self.retries = 0
        self._patience = patience
        self._backoff = wait_random_exponential(patience.first_pause, patience.longest_pause)
        self._lock = threading.Lock()
        self._failures = 0  # in a row, of all requests
        self._since = 0.0
        self._is_open = False

    def repeat(self, act: Callable[[], T]) -> T:
        """What `act` returns, at once or in the end. Raises what it raised last, with what all of them went through."""
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=self._pause,
            stop=self._is_enough,
            before_sleep=self._note,
            reraise=True,
        )
        try:
            result = retrying(act)
        except StorageUnavailable as error:
            raise self._with_facts(error) from None
        with self._lock:
            self._failures, self._is_open = 0, False
        return result

    def _is_enough(self, state: RetryCallState) -> bool:
        with self._lock:
            self._since = self._since if self._failures else time.monotonic()
            self._failures += 1
            patience, waited = self._patience, time.monotonic() - state.start_time
            tried_out = state.attempt_number >= patience.tries or waited > patience.deadline
            self._is_open = self._is_open or tried_out
            return self._is_open

    def _pause(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after if isinstance(error, StorageUnavailable) else 0.0
        return max(self._backoff(state), min(asked, self._patience.longest_asked))

    def _note(self, state: RetryCallState) -> None:
        with self._lock:
            self.retries += 1
        error = state.outcome.exception() if state.outcome is not None else None
        log.info("%s; trying again (%d)", error, state.attempt_number)

    def _with_facts(self, error: StorageUnavailable) -> StorageUnavailable:
        with self._lock:
            failures, seconds = self._failures, time.monotonic() - self._since
        if failures < 2 or isinstance(error, CredentialsExpired):
            return error
        facts = f"{error.reason} ({failures} requests in a row have failed, for {seconds:.1f} s)"
        return StorageUnavailable(error.url, facts, error.retry_after)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, StorageUnavailable) and not isinstance(error, CredentialsExpired)
