"""Several nodes on one machine: ranks with memory roots of their own."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_mem
from dcp_mem import (
    MemoryStorageReader,
    MemoryStorageWriter,
    NoRecoverableCheckpoint,
)
from dcp_mem.policy import pieces
from tests.support.channels import PROBE_NBYTES, UsedChannel
from tests.support.processes.forks import forked_ranks, on_ranks


def _state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.arange(4096.0).view(64, 64) + value, mesh, [Shard(0)])
    return {"sharded": sharded, "replicated": torch.full((33,), value), "step": int(value)}


def _node_root(memory_root: Path, ranks_per_node: int) -> Path:
    return memory_root / f"node{dist.get_rank() // ranks_per_node}"


def _save_on_two_nodes(memory_root: Path, path: str) -> list[list[str]]:
    """What each node holds after two saves: the segments that lie there, and the state."""
    root = _node_root(memory_root, 2)
    writer = MemoryStorageWriter(path, memory_root=root, job="job")
    for step in (1, 2):
        dcp.save(_state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
    names = sorted(
        (one.parents[1].name for one in root.glob("job/*/.dcp_mem/manifest.json")), reverse=True
    )
    newest = root / "job" / names[0]
    manifest = json.loads((newest / ".dcp_mem/manifest.json").read_text())
    files = sorted(name.name for name in newest.glob("*.distcp"))
    writer.close()
    return [names, files, [str(len(manifest["body"]["segments"]["nodes"]))]]


def _load(memory_root: Path, path: str | None, nodes: Sequence[int]) -> tuple[str, str, bool]:
    """What a load brings where each rank is on one of these nodes."""
    reader = MemoryStorageReader(
        path, memory_root=memory_root / f"node{nodes[dist.get_rank()]}", job="job"
    )
    state = _state(0)
    dcp.load(state, storage_reader=reader)
    report = reader.report()
    return report.checkpoint_id, report.source, _is_saved(state)


def _is_saved(state: dict[str, Any]) -> bool:
    expected = _state(2)
    same = torch.equal(
        state["sharded"].full_tensor(), expected["sharded"].full_tensor()
    ) and torch.equal(state["replicated"], expected["replicated"])
    return same and state["step"] == 2


def _refusal(memory_root: Path, nodes: Sequence[int]) -> list[str]:
    reader = MemoryStorageReader(
        memory_root=memory_root / f"node{nodes[dist.get_rank()]}", job="job"
    )
    try:
        dcp.load(_state(0), storage_reader=reader)
    except CheckpointException as error:
        return [f"{type(failure[0]).__name__}: {failure[0]}" for failure in error.failures.values()]
    return []


def _load_where_a_read_fails(
    memory_root: Path, path: str | None, nodes: Sequence[int], rank: int
) -> tuple[str, str, bool]:
    """Load while a rank's segment can be opened in memory, and not be read."""

    flock = fcntl.flock

    def lock_and_cut(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if file.parent.name == "step-2" and file.name.startswith(f"__{rank}_"):
            os.truncate(file, 64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", lock_and_cut)
        return _load(memory_root, path, nodes)


@contextmanager
def _lines_that_err(times: int) -> Iterator[None]:
    """Each rank sends so many of its messages with a bit that is wrong."""
    send, left = UsedChannel.send, [times]

    def send_badly(line: Any, data: Any) -> Any:
        if 800 < len(data) != PROBE_NBYTES and left[0]:
            left[0] -= 1
            data = bytearray(data)
            data[500] ^= 1
        return send(line, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UsedChannel, "send", send_badly)
        yield


def _load_over_a_line_that_errs_once(
    memory_root: Path, nodes: Sequence[int]
) -> tuple[str, str, bool]:
    with _lines_that_err(1):
        return _load(memory_root, None, nodes)


def _load_straight(memory_root: Path, nodes: Sequence[int]) -> tuple[str, str, bool]:
    """Load values that are large enough for direct reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_LARGE", 1)
        return _load_over_a_line_that_errs_once(memory_root, nodes)


def test_every_node_gets_the_manifest_but_holds_only_its_own_segments(
    memory_root: Path, tmp_path: Path
) -> None:
    held = forked_ranks(_save_on_two_nodes, 4, memory_root, str(tmp_path / "run"))
    assert all(names == ["step-2", "step-1"] for names, _, _ in held)
    assert [file.split("_0-")[0] for file in held[0][1]] == ["__0", "__1"]
    assert [file.split("_0-")[0] for file in held[2][1]] == ["__2", "__3"]
    assert all(nodes == ["2"] for _, _, nodes in held)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """step-1 and step-2 of four ranks on two nodes, in their memory and on storage (`run`)."""
    directory = tmp_path_factory.mktemp("nodes")
    forked_ranks(_save_on_two_nodes, 4, directory, str(directory / "run"))
    return directory


@pytest.fixture
def saved(original: Path, memory_root: Path) -> Path:
    """A copy of the nodes' memory, to be damaged."""
    left_out = shutil.ignore_patterns(".agent", "run")
    shutil.copytree(original, memory_root, dirs_exist_ok=True, ignore=left_out)
    return memory_root


@pytest.fixture
def stored(original: Path, tmp_path: Path) -> str:
    """A copy of what is on storage."""
    return str(shutil.copytree(original / "run", tmp_path / "run"))


AS_BEFORE = (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("nodes", "source"),
    [
        # Replicated items lie on one of the nodes only.
        pytest.param(AS_BEFORE, "memory and peers", id="as before"),
        pytest.param((1, 1, 0, 0), "memory and peers", id="ranks moved"),
        pytest.param((0, 0, 2, 1), "memory and peers", id="beside a node that has nothing"),
        pytest.param(
            (2, 0, 1, 2), "memory and peers", id="the first rank on a node that has nothing"
        ),
        pytest.param((0, 1), "memory and peers", id="fewer ranks"),
        pytest.param((0, 1, 2), "memory and peers", id="another sharding"),
    ],
)
def test_nodes_put_together_what_lies_in_their_memory(
    saved: Path, nodes: Sequence[int], source: str
) -> None:
    assert forked_ranks(_load, len(nodes), saved, None, nodes) == [("step-2", source, True)] * len(
        nodes
    )


@on_ranks(3)
def test_a_direct_load_puts_it_together_as_well(saved: Path) -> None:
    nodes = (0, 2, 1)
    state = _state(0)
    reader = MemoryStorageReader(memory_root=saved / f"node{nodes[dist.get_rank()]}", job="job")
    dcp_mem.load(state, storage_reader=reader)
    assert (reader.report().source, _is_saved(state)) == ("memory and peers", True)


def test_what_no_node_has_comes_from_storage_and_the_rest_from_memory(
    saved: Path, stored: str
) -> None:
    shutil.rmtree(saved / "node1")
    assert (
        forked_ranks(_load, 2, saved, stored, (0, 1))
        == [("step-2", "memory and peers and storage", True)] * 2
    )
    shutil.rmtree(saved / "node0")
    assert forked_ranks(_load, 4, saved, stored, AS_BEFORE) == [("step-2", "storage", True)] * 4


def test_a_checkpoint_that_lacks_segments_is_refused_on_all_ranks_alike(saved: Path) -> None:
    shutil.rmtree(saved / "node1")
    for refusal in forked_ranks(_refusal, 3, saved, (0, 1, 1)):
        assert len(refusal) == 3
        for text in refusal:
            assert text.startswith(NoRecoverableCheckpoint.__name__)
            assert "step-2" in text
            assert "no node has the segments of ranks 2, 3" in text


def test_a_torn_segment_makes_all_ranks_take_the_older_checkpoint(saved: Path) -> None:
    (segment,) = (saved / "node1" / "job" / "step-2").glob("__3_0-*.distcp")
    segment.write_bytes(segment.read_bytes()[:1000])
    outcomes = forked_ranks(_load, 4, saved, None, AS_BEFORE)
    assert outcomes == [("step-1", "memory and peers", False)] * 4


def test_a_segment_that_can_be_opened_and_not_read_comes_from_elsewhere(
    saved: Path, stored: str
) -> None:
    outcomes = forked_ranks(_load_where_a_read_fails, 4, saved, stored, AS_BEFORE, 2)
    assert outcomes == [("step-2", "memory and peers and storage", True)] * 4


@pytest.mark.parametrize("nodes", [(0, 1), (1, 1, 0, 0)], ids=["alone", "for a neighbour as well"])
def test_a_piece_that_changes_on_its_way_to_a_node_is_sent_again(
    saved: Path, nodes: Sequence[int]
) -> None:
    found = forked_ranks(_load_over_a_line_that_errs_once, len(nodes), saved, nodes)
    assert found == [("step-2", "memory and peers", True)] * len(nodes)


def test_what_comes_straight_into_a_tensor_is_sent_again_there_too(saved: Path) -> None:
    found = forked_ranks(_load_straight, 2, saved, (1, 0))
    assert found == [("step-2", "memory and peers", True)] * 2


@on_ranks(2)
def test_a_line_that_always_errs_is_given_up(saved: Path) -> None:
    nodes = (0, 1)
    with _lines_that_err(100):
        refusal = _refusal(saved, nodes)
    assert any("came otherwise than it was sent, 3 times" in text for text in refusal), refusal


def test_a_checkpoint_that_was_copied_to_another_node_by_hand_is_loaded(memory_root: Path) -> None:
    with MemoryStorageWriter(None, memory_root=memory_root, job="job") as writer:
        dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=writer)
    there = memory_root / "there"
    there.mkdir(mode=0o700)
    (there / "job").mkdir(mode=0o700)
    shutil.copytree(memory_root / "job" / "step-1", there / "job" / "step-1")
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=MemoryStorageReader(None, memory_root=there, job="job"))
    assert torch.equal(state["w"], torch.ones(3))
