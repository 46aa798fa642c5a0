"""Requests are repeated while that may help, and not for longer."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dcp_mem import (
    CredentialsExpired,
    DcpMemError,
    StorageKeyMissing,
    StorageRefused,
    StorageUnavailable,
)
from dcp_mem.storage import Entry, FileUnavailable, InParts, Source, Unfinished
from dcp_mem.storage.retry import RETRIES, RetryingStorage, RetryPolicy

URL = "s3://bucket/run"
QUICK = RetryPolicy(
    tries=5, first_pause_seconds=0.001, longest_pause_seconds=0.01, deadline_seconds=30
)


class _Upload(InParts):
    in_order = False
    part_nbytes = 10

    def __init__(self, request: Callable[[], None], *, in_order: bool) -> None:
        self.in_order = in_order
        self._request = request

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        self._request()
        return True

    def finish(self) -> None:
        self._request()

    def close(self) -> None:
        return


class _Moody:
    """A storage whose requests fail as told: the next with these errors, or all by `always`."""

    url = URL

    def __init__(
        self,
        errors: Sequence[Exception] = (),
        always: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        self._errors, self._always, self._lock = list(errors), always, threading.Lock()
        self.asked = 0
        self.in_order = False

    def _request(self) -> None:
        with self._lock:
            self.asked += 1
            error = self._errors.pop(0) if self._errors else self._always()
        if error is not None:
            raise error

    def upload(self, key: str, nbytes: int, source: Source | None = None) -> _Upload:
        self._request()
        return _Upload(self._request, in_order=self.in_order)

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        self._request()

    def get(self, key: str) -> bytes:
        self._request()
        return b"data"

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> int:
        self._request()
        return 4

    def ls(self, prefix: str) -> list[Entry]:
        self._request()
        return []

    def tree(self, most: int) -> list[tuple[str, Entry]] | None:
        self._request()
        return None

    def delete(self, key: str) -> None:
        self._request()

    def has_conditions(self) -> bool:
        self._request()
        return True

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        self._request()
        return True

    def remove(self, key: str, old: bytes) -> bool:
        self._request()
        return True

    def unfinished(self, prefix: str) -> list[Unfinished]:
        self._request()
        return []

    def drop_unfinished(self, key: str) -> None:
        self._request()


def _away(retry_after: float = 0.0) -> StorageUnavailable:
    return StorageUnavailable(URL, "503 SlowDown", retry_after)


OPERATIONS: dict[str, Callable[[RetryingStorage], object]] = {
    "upload": lambda storage: storage.upload("a", 5),
    "part": lambda storage: storage.upload("a", 5).put_part(0, memoryview(b"12345"), 0),
    "finish": lambda storage: storage.upload("a", 5).finish(),
    "put": lambda storage: storage.put("a", b"1"),
    "get": lambda storage: storage.get("a"),
    "read_into": lambda storage: storage.read_into("a", 0, []),
    "ls": lambda storage: storage.ls(""),
    "tree": lambda storage: storage.tree(9),
    "delete": lambda storage: storage.delete("a"),
    "has_conditions": lambda storage: storage.has_conditions(),
    "swap": lambda storage: storage.swap("a", b"1", b"2"),
    "remove": lambda storage: storage.remove("a", b"1"),
    "unfinished": lambda storage: storage.unfinished(""),
    "drop_unfinished": lambda storage: storage.drop_unfinished("a"),
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


@each_operation
def test_what_passes_is_repeated_until_it_has(
    operation: Callable[[RetryingStorage], object],
) -> None:
    moody = _Moody([_away(), _away(), _away()])
    storage = RetryingStorage(moody, QUICK)
    operation(storage)
    assert storage.retries == 3


@pytest.mark.parametrize(
    "error",
    [
        StorageRefused(URL, "403"),
        StorageKeyMissing(URL, "a"),
        CredentialsExpired(URL, "ExpiredToken"),
        ValueError("a defect"),
    ],
    ids=lambda error: type(error).__name__,
)
@each_operation
def test_what_does_not_pass_is_not_repeated(
    operation: Callable[[RetryingStorage], object], error: Exception
) -> None:
    moody = _Moody([error])
    storage = RetryingStorage(moody, QUICK)
    with pytest.raises(type(error)) as failure:
        operation(storage)
    assert failure.value is error
    assert (moody.asked, storage.retries) == (1, 0)


def test_it_gives_up_with_the_facts() -> None:
    moody = _Moody(always=_away)
    with pytest.raises(
        StorageUnavailable, match=r"503 SlowDown \(5 requests in a row have failed, for \d+\.\d s\)"
    ):
        RetryingStorage(moody, QUICK).get("a")
    assert moody.asked == QUICK.tries


def test_it_gives_up_at_the_deadline() -> None:
    def fail_slowly() -> StorageUnavailable:
        time.sleep(0.3)
        return _away()

    moody = _Moody(always=fail_slowly)
    with pytest.raises(StorageUnavailable):
        RetryingStorage(moody, replace(QUICK, tries=1000, deadline_seconds=0.5)).get("a")
    assert moody.asked <= 3  # of a thousand


def test_pauses_are_as_long_as_storage_asks_for_and_no_longer_than_that_is_worth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    RetryingStorage(
        _Moody([_away(7.0), _away(10_000.0), _away()]), replace(QUICK, longest_asked_seconds=60.0)
    ).get("a")
    assert pauses[:2] == [7.0, 60.0]
    assert pauses[2] <= QUICK.longest_pause_seconds


def test_pauses_grow_and_are_not_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    patience = RetryPolicy(
        tries=12, first_pause_seconds=0.5, longest_pause_seconds=8.0, deadline_seconds=1000
    )
    with pytest.raises(StorageUnavailable):
        RetryingStorage(_Moody(always=_away), patience).get("a")
    assert len(set(pauses)) == len(pauses) == 11
    assert pauses[0] <= 0.5
    assert max(pauses) <= 8.0


def test_what_one_file_says_for_some_seconds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def stale() -> FileUnavailable | None:
        return FileUnavailable(URL, "Stale file handle") if now[0] < ends else None

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    moody, ends = _Moody(always=stale), 14.0
    assert RetryingStorage(moody, RETRIES).get("a") == b"data"
    ends, begun, moody.asked = 1e9, now[0], 0
    with pytest.raises(FileUnavailable):
        RetryingStorage(moody, RETRIES).get("a")
    assert 15.0 <= now[0] - begun <= 15.0 + RETRIES.longest_pause_seconds
    assert moody.asked >= 5


def test_a_storage_that_is_down_fails_many_requests_no_later_than_one() -> None:
    moody = _Moody(always=_away)
    storage = RetryingStorage(moody, replace(QUICK, tries=4))

    def get(number: int) -> str:
        with pytest.raises(DcpMemError) as failure:
            storage.get(str(number))
        return str(failure.value)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(get, range(100)))
    assert moody.asked <= 4 * 4 + 100, "each of them was tried out"
    assert any("requests in a row have failed" in text for text in texts)


def test_a_success_closes_the_circuit_again() -> None:
    moody = _Moody([_away()] * QUICK.tries)
    storage = RetryingStorage(moody, QUICK)
    with pytest.raises(StorageUnavailable):
        storage.get("a")
    assert storage.get("a") == b"data"
    moody._errors += [_away()] * (QUICK.tries - 1)
    assert storage.get("a") == b"data"


def test_a_stream_that_takes_parts_in_order_is_not_given_one_twice() -> None:
    moody = _Moody()
    moody.in_order = True
    going = RetryingStorage(moody, QUICK).upload("a", 5)
    moody._errors = [_away()]
    with pytest.raises(StorageUnavailable):
        going.put_part(0, memoryview(b"12345"), 0)
    assert moody.asked == 2
