"""Streams of byte items: what torch.save writes, whether a value is plain or not."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
