"""Requests that are repeated for as long as that may help.

With jittered pauses, a deadline, and one circuit breaker for all requests to a storage.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import CredentialsExpired, StorageUnavailable
from dcp_mem.storage import Entry, OfOneFile, Source, Storage, Unfinished, Upload, UploadBroken

T = TypeVar("T")


@value_class(kw_only=True)
class RetryPolicy:
    """The limits on repeating a request: tries, pauses and total time."""

    tries: int = 8
    # pauses are random, up to this one, which doubles with each try
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 8.0
    longest_asked_seconds: float = 60.0  # a pause that the storage asks for counts up to this
    deadline_seconds: float = 120.0
    # one file that can't be read, where the root answers, is tried so often, and for so long
    tries_of_one_file: int = 5
    seconds_of_one_file: float = 0.0


RETRIES = RetryPolicy(seconds_of_one_file=15.0)
"""For what progress depends on: another checkpoint is taken only once one file has had its time."""

RETRIES_OF_A_FLUSH = RetryPolicy(tries=4, first_pause_seconds=0.2, longest_pause_seconds=3.0)
"""Within a flush or an export: a failed one is tried again, and goes on where it stopped."""


class RetryingStorage:
    """A storage whose requests are repeated while that may help.

    Once a request has failed for good, and none has succeeded meanwhile, all others give up with
    their next failure: a storage that is down fails a hundred parts no later than one.
    """

    def __init__(self, storage: Storage, retry_policy: RetryPolicy = RETRIES) -> None:
        self.url = storage.url
        self._storage = storage
        self._requests = _Requests(retry_policy)

    @property
    def retries(self) -> int:
        """The number of requests so far that were repeats."""
        return self._requests.retries

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> Upload:
        upload = self._requests.repeat(lambda: self._storage.upload(key, nbytes, source))
        return upload if upload.in_order else _RetryingUpload(upload, self._requests)

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        self._requests.repeat(lambda: self._storage.put(key, data, create=create))

    def get(self, key: str) -> bytes:
        return self._requests.repeat(lambda: self._storage.get(key))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        return self._requests.repeat(lambda: self._storage.read_into(key, offset, buffers))

    def ls(self, prefix: str) -> list[Entry]:
        return self._requests.repeat(lambda: self._storage.ls(prefix))

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        return self._requests.repeat(lambda: self._storage.tree(most))

    def delete(self, key: str) -> None:
        self._requests.repeat(lambda: self._storage.delete(key))

    def has_conditions(self) -> bool:
        return self._requests.repeat(self._storage.has_conditions)

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        return self._requests.repeat(lambda: self._storage.swap(key, old, new))

    def remove(self, key: str, old: bytes) -> bool:
        return self._requests.repeat(lambda: self._storage.remove(key, old))

    def unfinished(self, prefix: str) -> list[Unfinished]:
        return self._requests.repeat(lambda: self._storage.unfinished(prefix))

    def drop_unfinished(self, key: str) -> None:
        self._requests.repeat(lambda: self._storage.drop_unfinished(key))


class _RetryingUpload:
    in_order = False

    def __init__(self, upload: Upload, requests: _Requests) -> None:
        self.part_nbytes = upload.part_nbytes
        self.copies, self.verifies_copies = upload.copies, upload.verifies_copies
        self._upload, self._requests = upload, requests

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        return self._requests.repeat(lambda: self._upload.put_part(number, data, crc32c))

    def copy_part(self, number: int, crc32c: int) -> bool:
        return self._requests.repeat(lambda: self._upload.copy_part(number, crc32c))

    def copy_whole(self) -> bool:
        return self._requests.repeat(self._upload.copy_whole)

    def etag(self) -> str:
        return self._upload.etag()

    def finish(self) -> None:
        self._requests.repeat(self._upload.finish)

    def close(self) -> None:
        self._upload.close()


class _Requests:
    """Repeats requests; they share one circuit breaker."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.retries = 0
        self._policy = policy
        self._lock = threading.Lock()
        self._failures = 0  # in a row, of all requests
        self._since = 0.0
        self._is_open = False

    def repeat(self, act: Callable[[], T]) -> T:
        """Return what `act` returns, at once or in the end; raise what it raised last."""
        begun, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                result = act()
            except (CredentialsExpired, UploadBroken):
                raise
            except StorageUnavailable as error:
                waited = time.monotonic() - begun
                if isinstance(error, OfOneFile):
                    if self._is_enough_of_one_file(tries, waited):
                        raise
                elif self._is_enough(tries, waited):
                    raise self._with_facts(error) from None
                with self._lock:
                    self.retries += 1
                log.info("%s; trying again (%d)", error, tries)
                time.sleep(self._pause(tries, error.retry_after))
            else:
                with self._lock:
                    self._failures, self._is_open = 0, False
                return result

    def _is_enough_of_one_file(self, tries: int, waited: float) -> bool:
        policy = self._policy
        is_tried_out = tries >= min(policy.tries, policy.tries_of_one_file)
        return is_tried_out and waited >= policy.seconds_of_one_file

    def _is_enough(self, tries: int, waited: float) -> bool:
        """Count a failure; return whether this request, or any other, has been tried out."""
        policy = self._policy
        with self._lock:
            self._since = self._since if self._failures else time.monotonic()
            self._failures += 1
            is_tried_out = tries >= policy.tries or waited > policy.deadline_seconds
            self._is_open = self._is_open or is_tried_out
            return self._is_open

    def _pause(self, tries: int, asked: float) -> float:
        """Return a random pause, at most one that doubles with each try, or what is asked for."""
        policy = self._policy
        most = policy.first_pause_seconds * 2.0 ** min(tries - 1, 30)
        pause = random.uniform(0, min(most, policy.longest_pause_seconds))
        return max(pause, min(asked, policy.longest_asked_seconds))

    def _with_facts(self, error: StorageUnavailable) -> StorageUnavailable:
        with self._lock:
            failures, seconds = self._failures, time.monotonic() - self._since
        if failures < 2:
            return error
        facts = f"{error.reason} ({failures} requests in a row have failed, for {seconds:.1f} s)"
        return StorageUnavailable(error.url, facts, error.retry_after)
