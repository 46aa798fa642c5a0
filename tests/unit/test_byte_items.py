"""Streams of byte items: what torch.save writes, whether a value is plain or not."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_mem
from tests.support.checkpoints.jobs import Job
from tests.support.variants import examples

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


class Sub(int):
    """No plain value."""


@pytest.fixture
def job(tmp_path: Path, memory_root: Path) -> Job:
    return Job(str(tmp_path / "run"), str(memory_root))


def _streams(job: Job, state: Mapping[str, Any]) -> dict[str, bytes]:
    """Save a state, and return what lies on storage for each of its entries."""
    with job.writer(agent="thread") as writer:
        dcp_mem.save(dict(state), checkpoint_id="it", storage_writer=writer)
        writer.wait("it")
    directory = Path(job.url or "", "it")
    places = dcp.FileSystemReader(directory).read_metadata().storage_data
    names = {one.relative_path for one in places.values()}
    files = {name: (directory / name).read_bytes() for name in names}
    return {
        index.fqn: files[one.relative_path][one.offset : one.offset + one.length]
        for index, one in places.items()
    }


def _by_torch(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _assert_as_torch_writes(job: Job, some: list[Any]) -> None:
    state = {str(number): value for number, value in enumerate(some)}
    assert _streams(job, state) == {name: _by_torch(value) for name, value in state.items()}


@settings(
    max_examples=examples(10),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(some=st.lists(values, min_size=1, max_size=30))
def test_a_stream_has_the_bytes_that_torch_writes(job: Job, some: list[object]) -> None:
    _assert_as_torch_writes(job, [*some, *some])


def test_values_that_are_equal_and_not_the_same_have_streams_of_their_own(
    job: Job,
) -> None:
    some = [0.0, -0.0, 1, True, 1.0, (1,), [1], (0.0,), (-0.0,), "", b"", Sub(1), [[[[[1]]]]]]
    for _ in range(2):
        _assert_as_torch_writes(job, some)


@pytest.mark.parametrize("count", [1, 100, 10_000, 100_000])
def test_a_list_of_any_length_gets_the_bytes_that_torch_writes_again_and_again(
    job: Job, count: int
) -> None:
    value = [f"layers.{number}.weight" for number in range(count)]
    for _ in range(2):
        _assert_as_torch_writes(job, [value])
    value[-1] = "another name"
    _assert_as_torch_writes(job, [value])


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
