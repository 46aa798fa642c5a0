"""A checkpoint that claims more than it holds takes no memory for it; an older one is loaded."""

import io
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import DcpMemError, MemoryStorageReader, MemoryStorageWriter
from tests.support.checkpoints import hostile
from tests.support.processes.forks import forked

pytestmark = pytest.mark.timeout(120)

_MOST_MIB, _MOST_SECONDS = 300, 30.0


def _state(number: float) -> dict[str, Any]:
    return {"w": torch.full((1,), number), "object": [number]}


def _stream(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _bomb() -> bytes:
    return hostile.packed_stream(lambda file: torch.save(bytes(1 << 20), file), copies=512)


def _zeros() -> bytes:
    return bytes(64)


_CASES: dict[str, tuple[Callable[[], bytes], Callable[[bytes], bytes]]] = {
    "lengths of 2^50": (_zeros, lambda data: hostile.foreign_metadata(hostile.HUGE)),
    "offsets of 2^50": (_zeros, lambda data: hostile.foreign_metadata(4, offset=hostile.HUGE)),
    "negative offsets": (_zeros, lambda data: hostile.foreign_metadata(4, offset=-1)),
    "a byte item that unpacks to 512 MiB": (
        _bomb,
        lambda data: hostile.foreign_metadata(len(data)),
    ),
    "a memo of 2^32": (_zeros, lambda data: hostile.pickles()["a memo of 2^32"]),
}


def _load(root: str, memory: str, name: str | None, road: str) -> tuple[str, float, int, float]:
    """Load, and return the error, the value, and what it took: MiB and seconds."""
    state: dict[str, Any] = {"object": None} if name else _state(-1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, error = time.monotonic(), ""
    with MemoryStorageReader(root, memory_root=memory, job="job") as reader:
        try:
            if road == "dcp":
                dcp.load(state, checkpoint_id=name, storage_reader=reader)
            else:
                dcp_mem.load(state, checkpoint_id=name, storage_reader=reader)
        except BaseException as raised:  # CheckpointException is no Exception
            error = f"{type(raised).__name__}: {raised}"
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    value = state["w"].item() if "w" in state else 0.0
    return error, value, (after - before) >> 10, time.monotonic() - started


def _place(root: Path, case: str) -> None:
    make, describe = _CASES[case]
    directory = root / "step-2"
    directory.mkdir()
    data = make()
    (directory / "__0_0.distcp").write_bytes(data)
    (directory / ".metadata").write_bytes(describe(data))


@pytest.mark.parametrize("road", ["dcp", "dcp_mem"])
@pytest.mark.parametrize("case", _CASES)
def test_hostile_checkpoint_is_refused_by_name_with_little_memory(
    tmp_path: Path, memory_root: Path, case: str, road: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    _place(root, case)
    error, _, mib, seconds = forked(_load, str(root), str(memory_root), "step-2", road)
    assert "are claimed where" in error
    assert "made to exhaust memory" in error
    assert (mib < _MOST_MIB, seconds < _MOST_SECONDS) == (True, True), (mib, seconds)


def _save(root: str, memory: str) -> None:
    with MemoryStorageWriter(root, memory_root=memory, job="job", agent="thread") as writer:
        dcp_mem.save(_state(1.0), checkpoint_id="step-1", storage_writer=writer)
        writer.wait(timeout=60)


@pytest.mark.parametrize("case", _CASES)
def test_older_checkpoint_is_loaded_in_its_place(
    tmp_path: Path, memory_root: Path, case: str
) -> None:
    root = tmp_path / "root"
    forked(_save, str(root), str(memory_root))
    _place(root, case)
    found = forked(_load, str(root), f"{memory_root}/other", None, "dcp_mem")
    error, value, mib, seconds = found
    assert (error, value) == ("", 1.0)
    assert (mib < _MOST_MIB, seconds < _MOST_SECONDS) == (True, True), (mib, seconds)


def _shorten(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks.pop()


def _of_other_kind(metadata: Any) -> None:
    metadata.state_dict_metadata["w"] = metadata.state_dict_metadata["object"]


def _field(name: str, value: object, *path: object) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for step in path:
            metadata = getattr(metadata, step) if isinstance(step, str) else metadata[step[0]]  # type: ignore[index]
        setattr(metadata, name, value)

    return change


_W = ("state_dict_metadata", ("w",))
_CHUNK = (*_W, "chunks", (0,))
_CONTRADICTIONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a tensor that lacks its only chunk": (_shorten, "it has 0 of the 1 elements of w"),
    "a chunk before its tensor": (_field("offsets", torch.Size([-1]), *_CHUNK), "outside of it"),
    "a chunk beyond its tensor": (_field("sizes", torch.Size([2]), *_CHUNK), "outside of it"),
    "a chunk of two dimensions": (_field("sizes", torch.Size([1, 1]), *_CHUNK), "outside of it"),
    "a tensor without properties": (_field("properties", None, *_W), "'w' lacks what a tensor has"),
    "a tensor without a size": (_field("size", None, *_W), "'w' lacks what a tensor has"),
    "no entries": (_field("state_dict_metadata", None), "it lacks the entries"),
    "no places": (_field("storage_data", None), "it lacks the entries, or where they lie"),
    "no place of an item": (_field("storage_data", {}), "its metadata doesn't say where"),
    "a byte item in place of a tensor": (_of_other_kind, "doesn't say where w lies"),
}


@pytest.mark.parametrize("road", ["dcp", "dcp_mem"])
@pytest.mark.parametrize("case", _CONTRADICTIONS)
def test_metadata_that_contradicts_itself_is_passed_over(
    tmp_path: Path, memory_root: Path, case: str, road: str
) -> None:
    change, why = _CONTRADICTIONS[case]
    for number in (1, 2):
        dcp.save(_state(number), checkpoint_id=str(tmp_path / f"step-{number}"))
    file = tmp_path / "step-2" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    state = _state(-1.0)
    with MemoryStorageReader(tmp_path, memory_root=memory_root, job="job") as reader:
        (dcp if road == "dcp" else dcp_mem).load(state, storage_reader=reader)
    assert state["w"].item() == 1.0
    assert state["object"] == [1.0]
    (passed_over,) = reader.report().passed_over
    assert why in str(passed_over)


def test_sound_checkpoint_of_the_same_form_loads(tmp_path: Path, memory_root: Path) -> None:
    root = tmp_path / "root"
    (root / "step-2").mkdir(parents=True)
    data = _stream([2.0])
    (root / "step-2" / "__0_0.distcp").write_bytes(data)
    (root / "step-2" / ".metadata").write_bytes(hostile.foreign_metadata(len(data)))
    state: dict[str, Any] = {"object": None}
    with MemoryStorageReader(root, memory_root=memory_root, job="job") as reader:
        dcp_mem.load(state, checkpoint_id="step-2", storage_reader=reader)
    assert state == {"object": [2.0]}


def test_error_survives_the_way_to_other_ranks() -> None:
    error = dcp_mem.SizeRefused("w in __0_0.distcp", 1 << 50, 4)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DcpMemError)
    assert str(again) == str(error)
