"""The promises of `dcp_mem.storage.Storage` as tests: subclass `StorageConformance` per route."""

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from dcp_mem.errors import CheckpointExists, DcpMemError, StorageKeyMissing
from dcp_mem.format.checksums import checksum
from dcp_mem.storage import LEAST_PART, Copies, Source, Storage, Upload, part_count

BLOCK = (8 << 20) + 7
"""More bytes than a route sends at once."""

LARGE = (32 << 20) + 7
"""More bytes than a route fetches at once."""

_ODD_NAME = (
    "step=1+2,3@4%41~5:6"  # what a checkpoint may be called: nothing of it may be decoded or split
)
_THREADS = 8


class StorageConformance:
    """Tests of one route. `open_storage` opens the same empty root anew each time."""

    tells_when_uploads_began = True

    @pytest.fixture
    def opened(self) -> Callable[[], Storage]:
        """Opens the root of this test; a fresh, empty one for every test."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self, opened: Callable[[], Storage]) -> Storage:
        return opened()

    def test_tree_has_what_listings_have(self, storage: Storage) -> None:
        for key in ("top", "step-1/one", "step-1/.dcp_mem/two"):
            storage.put(key, key.encode())
        tree = storage.tree(3)
        if tree is None:
            pytest.skip("this storage lists one directory after the other")
        assert sorted((directory, entry.name) for directory, entry in tree) == [
            ("", "top"),
            ("step-1", "one"),
            ("step-1/.dcp_mem", "two"),
        ]
        for directory, entry in tree:
            assert entry in storage.ls(directory)
            path = f"{directory}/{entry.name}".lstrip("/").encode()
            assert entry.md5 in ("", hashlib.md5(path, usedforsecurity=False).hexdigest())
        assert storage.tree(2) is None

    # -- put and get -------------------------------------------------------------------------------

    def test_put_is_seen_whole_by_another_instance(
        self, storage: Storage, opened: Callable[[], Storage]
    ) -> None:
        storage.put("step-1/.metadata", b"metadata")
        assert opened().get("step-1/.metadata") == b"metadata"

    def test_put_replaces_what_was_there(self, storage: Storage) -> None:
        storage.put("step-1/.metadata", b"a longer first version")
        storage.put("step-1/.metadata", b"second")
        assert storage.get("step-1/.metadata") == b"second"

    @pytest.mark.parametrize("create", [False, True])
    def test_put_of_nothing_makes_an_empty_object(self, storage: Storage, create: bool) -> None:
        storage.put("step-1/empty", b"", create=create)
        assert storage.get("step-1/empty") == b""
        assert [(entry.name, entry.nbytes) for entry in storage.ls("step-1")] == [("empty", 0)]

    def test_put_takes_more_than_a_block(self, storage: Storage) -> None:
        data = _bytes(BLOCK)
        storage.put("large", data)
        assert storage.get("large") == data

    def test_readers_see_the_old_or_the_new_bytes_and_nothing_between(
        self, storage: Storage
    ) -> None:
        versions = [bytes([value]) * (256 << 10) for value in (1, 2)]
        storage.put("key", versions[0])
        stop = threading.Event()

        def replace() -> None:
            while not stop.is_set():
                for version in versions:
                    storage.put("key", version)

        with ThreadPoolExecutor(1) as pool:
            replacing = pool.submit(replace)
            try:
                seen = [storage.get("key") for _ in range(10)]
            finally:
                stop.set()
            replacing.result()
        assert all(data in versions for data in seen)

    def test_get_of_a_missing_key_says_which(self, storage: Storage) -> None:
        storage.put("step-1/there", b"1")
        with pytest.raises(StorageKeyMissing, match=r"step-1/gone does not exist") as failure:
            storage.get("step-1/gone")
        assert isinstance(failure.value, FileNotFoundError)

    def test_names_are_taken_literally(self, storage: Storage) -> None:
        storage.put(f"{_ODD_NAME}/.dcp_mem/manifest-1.json", b"{}")
        assert storage.get(f"{_ODD_NAME}/.dcp_mem/manifest-1.json") == b"{}"
        assert [entry.name for entry in storage.ls("")] == [_ODD_NAME]
        assert [entry.name for entry in storage.ls(_ODD_NAME)] == [".dcp_mem"]
        assert [entry.name for entry in storage.ls(f"{_ODD_NAME}/.dcp_mem")] == ["manifest-1.json"]

    # -- create ------------------------------------------------------------------------------------

    def test_create_makes_what_was_not_there(self, storage: Storage) -> None:
        storage.put("step-1/.metadata", b"first", create=True)
        assert storage.get("step-1/.metadata") == b"first"

    @pytest.mark.parametrize("there", [b"first", b""])
    def test_create_refuses_what_was_there_and_leaves_it(
        self, storage: Storage, there: bytes
    ) -> None:
        storage.put("step-1/.metadata", there)
        with pytest.raises(CheckpointExists, match="step-1") as failure:
            storage.put("step-1/.metadata", b"second", create=True)
        assert isinstance(failure.value, FileExistsError)
        assert storage.get("step-1/.metadata") == there
        assert [entry.name for entry in storage.ls("step-1")] == [".metadata"]

    def test_create_by_many_threads_has_one_winner(self, opened: Callable[[], Storage]) -> None:
        storages = [opened() for _ in range(_THREADS)]
        for attempt in range(3):
            start = threading.Barrier(_THREADS)

            def create(number: int, key: str, start: threading.Barrier) -> bool:
                start.wait()
                try:
                    storages[number].put(key, bytes([number]) * 1000, create=True)
                except CheckpointExists:
                    return False
                return True

            key = f"step-{attempt}/.metadata"
            with ThreadPoolExecutor(_THREADS) as pool:
                won = list(pool.map(lambda number: create(number, key, start), range(_THREADS)))  # noqa: B023
            assert won.count(True) == 1
            assert storages[0].get(key) == bytes([won.index(True)]) * 1000

    # -- swap and remove ---------------------------------------------------------------------------

    def test_what_is_still_what_it_was_is_swapped_and_removed(self, storage: Storage) -> None:
        key, large = "step-1/.metadata", _bytes(5 << 20)
        storage.put(key, b"first")
        assert storage.swap(key, b"first", large)
        assert storage.swap(key, large, b"last")
        assert storage.get(key) == b"last"
        assert storage.remove(key, b"last")
        assert storage.ls("step-1") == []

    def test_what_is_another_by_now_or_gone_stays_so(self, storage: Storage) -> None:
        key = "step-1/.metadata"
        assert not storage.swap(key, b"", b"new")
        assert not storage.remove(key, b"")
        storage.put(key, b"other")
        assert not storage.swap(key, b"first", b"new")
        assert not storage.remove(key, b"first")
        assert storage.get(key) == b"other"
        assert [entry.name for entry in storage.ls("step-1")] == [".metadata"]

    def test_swaps_by_many_threads_have_one_winner(self, opened: Callable[[], Storage]) -> None:
        storages = [opened() for _ in range(_THREADS)]
        key, start = "step-1/.metadata", threading.Barrier(_THREADS)
        storages[0].put(key, b"first")
        if not storages[0].has_conditions():
            pytest.skip("this storage has no conditions")

        def swap(number: int) -> bool:
            start.wait()
            return storages[number].swap(key, b"first", bytes([number]) * 1000)

        with ThreadPoolExecutor(_THREADS) as pool:
            won = list(pool.map(swap, range(_THREADS)))
        assert won.count(True) == 1
        assert storages[0].get(key) == bytes([won.index(True)]) * 1000

    # -- uploads -----------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "nbytes",
        [0, 1, LEAST_PART - 1, LEAST_PART, LEAST_PART + 1, 2 * LEAST_PART + 7],
        ids=["nothing", "one byte", "almost a part", "a part", "hardly more", "three parts"],
    )
    def test_an_upload_is_stored_whole(self, storage: Storage, nbytes: int) -> None:
        data = _bytes(nbytes)
        upload(storage, "step-1/segment", data)
        assert storage.get("step-1/segment") == data
        assert [(entry.name, entry.nbytes) for entry in storage.ls("step-1")] == [
            ("segment", nbytes)
        ]
        assert storage.unfinished("step-1") == []

    def test_parts_go_up_in_any_order_and_at_the_same_time(self, storage: Storage) -> None:
        data = _bytes(LARGE)
        with closing(storage.upload("step-1/segment", LARGE)) as going:
            if going.in_order:
                pytest.skip("this route takes parts in order")
            numbers = list(reversed(range(part_count(LARGE, going.part_nbytes))))
            with ThreadPoolExecutor(_THREADS) as pool:
                sent = list(
                    pool.map(lambda number: _put_part(going, number, data), [*numbers, *numbers])
                )
            assert all(sent[: len(numbers)])
            going.finish()
            going.finish()  # its answer may have been lost
        assert storage.get("step-1/segment") == data

    @pytest.mark.parametrize("nbytes", [LEAST_PART, LARGE], ids=["one part", "several"])
    def test_an_upload_that_lacks_a_part_cannot_be_finished(
        self, storage: Storage, nbytes: int
    ) -> None:
        data = _bytes(nbytes)
        with closing(storage.upload("step-1/segment", nbytes)) as going:
            for number in range(part_count(nbytes, going.part_nbytes) - 1):
                _put_part(going, number, data)
            with pytest.raises(ValueError, match="part"):
                going.finish()
        assert all(
            entry.nbytes < nbytes for entry in storage.ls("step-1") if entry.name == "segment"
        )

    def test_nothing_is_seen_of_an_upload_that_is_not_finished(
        self, storage: Storage, opened: Callable[[], Storage]
    ) -> None:
        data = _bytes(LARGE)
        going = storage.upload("step-1/segment", LARGE)
        _put_part(going, 0, data)
        assert all(
            entry.nbytes < LARGE for entry in opened().ls("step-1") if entry.name == "segment"
        )
        going.close()
        assert all(
            entry.nbytes < LARGE for entry in opened().ls("step-1") if entry.name == "segment"
        )
        upload(opened(), "step-1/segment", data)
        assert storage.get("step-1/segment") == data

    def test_an_upload_that_was_given_up_leaves_nothing_to_pay_for(
        self, storage: Storage, opened: Callable[[], Storage]
    ) -> None:
        data = _bytes(LARGE)
        going = storage.upload("step-1/segment", LARGE)
        _put_part(going, 0, data)
        for left in opened().unfinished("step-1"):
            assert left.key == "step-1/segment"
            assert abs(left.begun - time.time()) < 60 or not self.tells_when_uploads_began
        opened().drop_unfinished("step-1/segment")
        assert opened().unfinished("step-1") == []
        opened().drop_unfinished("step-1/segment")
        with suppress(DcpMemError):
            going.close()
        assert all(
            entry.nbytes < LARGE for entry in opened().ls("step-1") if entry.name == "segment"
        )

    def test_dropping_what_is_unfinished_leaves_the_object(self, storage: Storage) -> None:
        data = _bytes(LARGE)
        upload(storage, "step-1/segment", data)
        storage.drop_unfinished("step-1/segment")
        assert storage.get("step-1/segment") == data

    def test_uploads_go_up_at_the_same_time(self, storage: Storage) -> None:
        data = [_bytes(LEAST_PART + salt, salt) for salt in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda one: upload(storage, f"step-1/{len(one)}", one), data))
        for one in data:
            assert storage.get(f"step-1/{len(one)}") == one

    def test_two_uploads_of_the_same_bytes_do_not_harm_each_other(
        self, opened: Callable[[], Storage]
    ) -> None:
        data = _bytes(LARGE)
        with closing(opened().upload("step-1/segment", LARGE)) as one:
            _put_part(one, 0, data)
            with closing(opened().upload("step-1/segment", LARGE)) as other:
                for number in range(part_count(LARGE, other.part_nbytes)):
                    _put_part(other, number, data)
                if other.in_order:
                    return other.finish()
                for number in range(part_count(LARGE, one.part_nbytes)):
                    _put_part(one, number, data)
                other.finish()
                assert opened().get("step-1/segment") == data
            one.finish()
        assert opened().get("step-1/segment") == data
        return None

    # -- copies ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", [1000, LARGE], ids=["one part", "several"])
    def test_what_has_not_changed_is_copied_and_stands_by_itself(
        self, storage: Storage, opened: Callable[[], Storage], nbytes: int
    ) -> None:
        data = _bytes(nbytes)
        source = stored_source(storage, "step-1/segment", data)
        with closing(opened().upload("step-2/segment", nbytes, source)) as going:
            copy_all(going, data)
            etag = going.etag()
        assert storage.get("step-2/segment") == data
        storage.delete("step-1/segment")
        assert opened().get("step-2/segment") == data
        with closing(
            storage.upload(
                "step-3/segment", nbytes, replace(source, etag=etag, key="step-2/segment")
            )
        ) as going:
            copy_all(going, data)
        assert storage.get("step-3/segment") == data
        assert storage.unfinished("") == []

    def test_parts_that_changed_are_put_between_copied_ones(self, storage: Storage) -> None:
        data = _bytes(LARGE)
        source = Source("step-1/segment", LARGE, upload(storage, "step-1/segment", data))
        with closing(storage.upload("step-2/segment", LARGE, source)) as going:
            if going.copies is not Copies.PARTS:
                pytest.skip("this route copies no parts")
            part = going.part_nbytes
            changed = data[:part] + _bytes(part, salt=9) + data[2 * part :]
            for number in (2, 0):
                assert going.copy_part(number, checksum(data[number * part :][:part]))
            _put_part(going, 1, changed)
            going.finish()
        assert storage.get("step-2/segment") == changed
        assert storage.get("step-1/segment") == data

    @pytest.mark.parametrize("nbytes", [1000, LARGE], ids=["one part", "several"])
    @pytest.mark.parametrize("fate", ["gone before", "gone meanwhile", "overwritten"])
    def test_what_can_no_longer_be_copied_can_be_put(
        self, storage: Storage, opened: Callable[[], Storage], nbytes: int, fate: str
    ) -> None:
        data, other = _bytes(nbytes), _bytes(nbytes, salt=5)
        source = stored_source(storage, "step-1/segment", data)
        if fate == "gone before":
            storage.delete("step-1/segment")
        elif fate == "overwritten":
            storage.delete("step-1/segment")
            upload(opened(), "step-1/segment", other)
        with closing(storage.upload("step-2/segment", nbytes, source)) as going:
            if fate == "gone meanwhile":
                opened().delete("step-1/segment")
            parts = range(part_count(nbytes, going.part_nbytes))
            if going.copies is Copies.WHOLE:
                assert not going.copy_whole()
            for number in parts:
                piece = data[number * going.part_nbytes :][: going.part_nbytes]
                if going.copies is not Copies.PARTS or not going.copy_part(number, checksum(piece)):
                    _put_part(going, number, data)
            going.finish()
        assert storage.get("step-2/segment") == data

    # -- reading ranges ----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("offset", "wanted", "expected"),
        [
            (0, 10, b"0123456789"),
            (3, 4, b"3456"),
            (7, 10, b"789"),
            (10, 10, b""),
            (1000, 10, b""),
            (4, 0, b""),
        ],
        ids=["all", "inside", "across the end", "at the end", "behind the end", "nothing"],
    )
    def test_range_holds_what_there_is(
        self, storage: Storage, offset: int, wanted: int, expected: bytes
    ) -> None:
        storage.put("step-1/segment", b"0123456789")
        buffer = bytearray(wanted)
        assert storage.read_into("step-1/segment", offset, [memoryview(buffer)]) == len(expected)
        assert buffer[: len(expected)] == expected

    def test_range_of_an_empty_object_is_empty(self, storage: Storage) -> None:
        storage.put("step-1/segment", b"")
        assert storage.read_into("step-1/segment", 0, [memoryview(bytearray(4))]) == 0

    def test_range_may_be_larger_than_a_block(self, storage: Storage) -> None:
        data = _bytes(LARGE)
        upload(storage, "large", data)
        buffer = bytearray(LARGE + 10)
        assert storage.read_into("large", 1, [memoryview(buffer)]) == LARGE - 1
        assert memoryview(buffer)[: LARGE - 1] == memoryview(data)[1:]

    @pytest.mark.parametrize("lengths", [(), (0,), (3, 0, 4), (1, 1, 1, 5), (4, 20, 3)])
    def test_a_range_fills_several_buffers_one_after_the_other(
        self, storage: Storage, lengths: tuple[int, ...]
    ) -> None:
        storage.put("step-1/segment", b"0123456789")
        buffers = [bytearray(length) for length in lengths]
        count = storage.read_into("step-1/segment", 1, [memoryview(buffer) for buffer in buffers])
        assert count == min(9, sum(lengths))
        assert b"".join(buffers)[:count] == b"123456789"[:count]

    def test_range_of_a_missing_key_says_which(self, storage: Storage) -> None:
        with pytest.raises(StorageKeyMissing, match=r"step-1/gone does not exist"):
            storage.read_into("step-1/gone", 0, [memoryview(bytearray(4))])

    # -- ls and delete -----------------------------------------------------------------------------

    def test_nothing_is_listed_where_there_is_nothing(self, storage: Storage) -> None:
        assert list(storage.ls("")) == []
        assert list(storage.ls("step-1/.dcp_mem")) == []

    def test_ls_shows_one_level_with_sizes_and_directories(self, storage: Storage) -> None:
        storage.put("step-1/.metadata", b"123")
        storage.put("step-1/.dcp_mem/manifest.json", b"12345")
        storage.put("step-10/.metadata", b"1")  # no part of step-1
        assert _facts(storage, "") == [("step-1", True, 0), ("step-10", True, 0)]
        assert _facts(storage, "step-1") == [(".dcp_mem", True, 0), (".metadata", False, 3)]
        assert _facts(storage, "step-1/.dcp_mem") == [("manifest.json", False, 5)]

    def test_ls_is_never_stale(self, storage: Storage, opened: Callable[[], Storage]) -> None:
        other = opened()
        assert list(storage.ls("step-1")) == []
        other.put("step-1/a", b"1")
        assert _facts(storage, "step-1") == [("a", False, 1)]
        other.put("step-1/a", b"12")
        other.put("step-1/b", b"1")
        assert _facts(storage, "step-1") == [("a", False, 2), ("b", False, 1)]
        other.delete("step-1/a")
        assert _facts(storage, "step-1") == [("b", False, 1)]

    def test_ls_tells_when_an_object_was_written_or_nothing(self, storage: Storage) -> None:
        storage.put("step-1/a", b"1")
        (entry,) = storage.ls("step-1")
        assert entry.modified == 0.0 or abs(entry.modified - time.time()) < 60

    def test_delete_takes_away_one_object(self, storage: Storage) -> None:
        storage.put("step-1/a", b"1")
        storage.put("step-1/ab", b"2")
        storage.delete("step-1/a")
        with pytest.raises(StorageKeyMissing):
            storage.get("step-1/a")
        assert storage.get("step-1/ab") == b"2"

    def test_delete_can_be_repeated(self, storage: Storage) -> None:
        storage.put("step-1/a", b"1")
        for _ in range(2):
            storage.delete("step-1/a")
        storage.delete("step-2/never/there")
        assert list(storage.ls("step-1")) == []

    def test_a_deleted_key_can_be_created_again(self, storage: Storage) -> None:
        storage.put("step-1/a", b"1", create=True)
        storage.delete("step-1/a")
        storage.put("step-1/a", b"2", create=True)
        assert storage.get("step-1/a") == b"2"


def _bytes(count: int, salt: int = 0) -> bytes:
    """Bytes that differ from block to block, and from salt to salt."""
    pattern = bytes((salt + step * 7) % 251 for step in range(4093))
    return (pattern * (count // len(pattern) + 1))[:count]


def copy_all(going: Upload, data: bytes) -> None:
    """Have all of an object copied; skip the test where the route can't."""
    if going.copies is Copies.NOTHING:
        pytest.skip("this route copies nothing")
    if going.copies is Copies.WHOLE:
        assert going.copy_whole()
        return
    for number in range(part_count(len(data), going.part_nbytes)):
        piece = data[number * going.part_nbytes :][: going.part_nbytes]
        assert going.copy_part(number, checksum(piece))
    going.finish()


def upload(storage: Storage, key: str, data: bytes) -> str:
    """Store data as a flush does: in parts, from memory that is another's soon after.

    Returns what later uploads need to copy from it.
    """
    with closing(storage.upload(key, len(data))) as going:
        for number in range(part_count(len(data), going.part_nbytes)):
            _put_part(going, number, data)
        going.finish()
        return going.etag()


def stored_source(storage: Storage, key: str, data: bytes) -> Source:
    """Store an object, and return it as one to copy from."""
    return Source(key, len(data), upload(storage, key, data))


def _put_part(going: Upload, number: int, data: bytes) -> bool:
    part = bytearray(data[number * going.part_nbytes :][: going.part_nbytes])
    sent = going.put_part(number, memoryview(part), checksum(memoryview(part)))
    part[:] = b"\xee" * len(part)
    return sent


def _facts(storage: Storage, prefix: str) -> list[tuple[str, bool, int]]:
    """What is listed there, by name; sizes of files only."""
    return sorted(
        (one.name, one.is_directory, 0 if one.is_directory else one.nbytes)
        for one in storage.ls(prefix)
    )
