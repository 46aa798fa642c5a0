"""Streams of byte items: what torch.save writes, whether a value is plain or not."""

from __future__ import annotations

import io
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_mem
from dcp_mem.format.byte_items import stream_of

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
)
flat = st.lists(scalars)
values = scalars | st.tuples(scalars, scalars) | st.lists(scalars | flat | st.tuples(flat))


def _by_torch(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@given(st.lists(values, min_size=1, max_size=4))
def test_a_stream_has_the_bytes_that_torch_writes(some: list[object]) -> None:
    for value in [*some, *some]:
        assert stream_of(value).getvalue() == _by_torch(value)


@pytest.mark.parametrize(
    ("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), ((1,), [1]), ((0.0,), (-0.0,)), ("", b"")]
)
def test_values_that_are_equal_and_not_the_same_have_streams_of_their_own(
    one: object, other: object
) -> None:
    assert stream_of(one).getvalue() != stream_of(other).getvalue()
    assert stream_of(other).getvalue() == _by_torch(other)


def test_a_list_that_changes_gets_another_stream() -> None:
    value = [1, 2]
    before = stream_of(value).getvalue()
    value.append(3)
    assert before != stream_of(value).getvalue() == _by_torch([1, 2, 3])


@pytest.mark.parametrize("count", [1, 100, 10_000, 100_000])
def test_a_list_of_any_length_gets_the_bytes_that_torch_writes_again_and_again(count: int) -> None:
    value = [f"layers.{number}.weight" for number in range(count)]
    for _ in range(2):
        assert stream_of(value).getvalue() == _by_torch(value)
    value[-1] = "another name"
    assert stream_of(value).getvalue() == _by_torch(value)


@pytest.mark.parametrize("value", [0.1, ["a name"] * 1000])
def test_who_writes_to_a_stream_changes_no_other_one(value: object) -> None:
    stream_of(value).getbuffer()[:4] = b"gone"
    assert stream_of(value).getvalue() == _by_torch(value)


def test_a_list_within_itself_is_no_plain_value() -> None:
    value: list[object] = [1]
    value.append(value)
    assert stream_of(value).getvalue() == _by_torch(value)


def test_objects_of_classes_of_ones_own_are_pickled_anew() -> None:
    class Sub(int):
        pass

    with pytest.raises(AttributeError):  # as torch.save: a local class can't be pickled
        stream_of(Sub(1))


def _objects(seed: int) -> dict[str, Any]:
    """Thousands of small values, and some of several times what is written with one call."""
    chosen = random.Random(seed)
    sizes = [*(chosen.randrange(450) for _ in range(2000)), 150 << 10, 127 << 10, 0, 1, 1 << 19]
    chosen.shuffle(sizes)
    values = {f"value {number}": chosen.randbytes(size).hex() for number, size in enumerate(sizes)}
    return {"weight": torch.full((100,), float(seed)), **values}


def _segment(memory_root: Path, job: str, name: str) -> bytes:
    [segment] = memory_root.glob(f"{job}*/{name}/*.distcp")
    return segment.read_bytes()


def test_byte_items_of_any_size_come_back_and_their_segment_is_the_same_in_any_slot(
    memory_root: Path,
) -> None:
    def writer(job: str) -> dcp_mem.MemoryStorageWriter:
        return dcp_mem.MemoryStorageWriter(
            None, job=job, memory_root=str(memory_root), keep_memory=1
        )

    with closing(writer("used")) as used, closing(writer("fresh")) as fresh:
        for seed in range(4):  # slots are recycled: other bytes were there before
            dcp_mem.save(_objects(seed), checkpoint_id=f"step-{seed}", storage_writer=used)
        dcp_mem.save(_objects(3), checkpoint_id="step-3", storage_writer=fresh)
        # The slots' files go on behind the segments.
        written = _segment(memory_root, "fresh", "step-3").rstrip(b"\0")
        assert _segment(memory_root, "used", "step-3").startswith(written)
    loaded: dict[str, Any] = dict.fromkeys(_objects(3), "") | {"weight": torch.zeros(100)}
    reader = dcp_mem.MemoryStorageReader(None, job="used", memory_root=str(memory_root))
    dcp_mem.load(loaded, storage_reader=reader)
    assert loaded.pop("weight").equal(torch.full((100,), 3.0))
    assert loaded == {name: value for name, value in _objects(3).items() if name != "weight"}
