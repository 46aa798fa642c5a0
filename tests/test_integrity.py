"""Damage is found, named, and got round: a load gives back what was saved, or an older save, or an error."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_mem import CheckpointNotFound, NoRecoverableCheckpoint, RankFailed, SegmentCorrupt
from dcp_mem.format.manifest import NodeManifest
from tests.forks import forked, forked_ranks, raised_by
from tests.jobs import Job, Loaded, load_anew, make_state, save

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Saved:
    """A job that has saved step-1 and step-2, both complete in memory and durable in a directory."""

    job: Job
    ranks: int

    @property
    def stored(self) -> Path:
        return Path(self.job.url or "")

    @property
    def held(self) -> Path:
        return self.job.directory

    def without_memory(self) -> "Saved":
        """The same after the node was lost."""
        shutil.rmtree(self.job.directory)
        return self

    def without_storage(self) -> "Saved":
        """The same for a reader that is given no path."""
        return replace(self, job=replace(self.job, url=None))

    def load(self, name: str | None = None) -> list[Loaded]:
        """What every rank loads, in fresh processes."""
        return forked_ranks(load_anew, self.ranks, self.job, name)

    def failures(self, name: str | None = None) -> list[Exception]:
        """The error that every rank gets, in fresh processes."""
        errors = forked_ranks(_failure, self.ranks, self.job, name)
        assert all(error is not None for error in errors)
        return [error for error in errors if error is not None]


def _failure(job: Job, name: str | None) -> Exception | None:
    return raised_by(lambda: load_anew(job, name))


def _save_two(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        for number in (1, 2):
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("original")
    (directory / "memory").mkdir(mode=0o700)
    job = Job(str(directory / "storage"), str(directory / "memory"))
    forked_ranks(_save_two, request.param, job)
    return Saved(job, request.param)


@pytest.fixture
def saved(original: Saved, memory_root: Path, tmp_path: Path) -> Saved:
    """A copy to be damaged."""
    shutil.copytree(original.job.memory, memory_root, dirs_exist_ok=True)
    shutil.copytree(original.stored, tmp_path / "storage")
    return Saved(Job(str(tmp_path / "storage"), str(memory_root)), original.ranks)


# -- kinds of damage -----------------------------------------------------------------------------------------------------


def flip(path: Path, position: int | None = None) -> None:
    """Flip a bit, in the middle unless told where."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Leave half of it, and of a slot, which is longer than the segment in it, no more than a part of that."""
    path.write_bytes(path.read_bytes()[: min(path.stat().st_size // 2, 1000)])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = {"flipped": flip, "cut": cut, "emptied": empty, "removed": remove}


def _only(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


def _segment(directory: Path, rank: int) -> Path:
    return _only(directory, f"__{rank}_0-*.distcp")


def _flip_payload(directory: Path, rank: int) -> None:
    """Flip a bit of the rank's sharded tensor, or of whichever is its largest."""
    (manifest,) = [NodeManifest.from_json(path.read_bytes()) for path in directory.glob(".dcp_mem/node-*.json")]
    segment = _segment(directory, rank)
    table = manifest.tables[segment.name]
    largest = int(table.payload_nbytes.argmax())
    flip(segment, int(table.payload_offsets[largest] + table.payload_nbytes[largest] // 2))


def _assert_fell_back(loaded: Sequence[Loaded], *words: str) -> None:
    """Every rank took the older checkpoint, and says why, alike."""
    assert [one.number for one in loaded] == [1] * len(loaded)
    for one in loaded:
        reason = "\n".join(one.report.passed_over)
        assert all(word in reason for word in ("step-2", *words)), reason
        assert one.report.passed_over == loaded[0].report.passed_over


# -- on storage ----------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_on_storage_makes_the_load_take_the_older_checkpoint(saved: Saved) -> None:
    last = saved.ranks - 1
    _flip_payload(saved.without_memory().stored / "step-2", last)
    _assert_fell_back(saved.load(), f"segment of rank {last} in {saved.stored}", "CRC32C")


def test_a_flipped_bit_in_a_named_checkpoint_is_an_error_on_every_rank(saved: Saved) -> None:
    last = saved.ranks - 1
    _flip_payload(saved.without_memory().stored / "step-2", last)
    errors = saved.failures("step-2")
    corrupt = errors[last]
    assert isinstance(corrupt, SegmentCorrupt)
    assert (corrupt.checkpoint, corrupt.rank, corrupt.source) == ("step-2", last, str(saved.stored))
    assert "sharded: CRC32C" in str(corrupt)
    assert all(isinstance(error, (SegmentCorrupt, RankFailed)) for error in errors)
    assert all(f"segment of rank {last}" in str(error) for error in errors)


def _load_unverified(job: Job) -> Exception | None:
    try:
        load_anew(job, "step-2", verify=False)
    except AssertionError as error:
        return error
    return None


def test_without_verification_the_flipped_bit_is_loaded(saved: Saved) -> None:
    last = saved.ranks - 1
    _flip_payload(saved.without_memory().stored / "step-2", last)
    errors = forked_ranks(_load_unverified, saved.ranks, saved.job)
    assert "sharded" in str(errors[last])


def _flip_everywhere(job: Job) -> int:
    """Flip a bit at the beginning, in the middle and at the end of every item in turn; how many were found."""
    directory, found = Path(job.url or "") / "step-2", 0
    for path in directory.glob(".dcp_mem/node-*.json"):
        for file, table in NodeManifest.from_json(path.read_bytes()).tables.items():
            for offset, length in zip(table.offsets.tolist(), table.lengths.tolist(), strict=True):
                for position in (offset, offset + length // 2, offset + length - 1):
                    flip(directory / file, position)
                    assert isinstance(raised_by(lambda: load_anew(job, "step-2")), SegmentCorrupt), (file, position)
                    flip(directory / file, position)
                    found += 1
    assert load_anew(job, "step-2").number == 2
    return found


def test_every_item_is_verified_from_end_to_end(saved: Saved) -> None:
    assert forked(_flip_everywhere, saved.without_memory().job) >= 3 * len(make_state(0))


@pytest.mark.parametrize("damage", [cut, empty, remove])
def test_a_segment_that_is_short_or_missing_on_storage_is_got_round(
    saved: Saved, damage: Callable[[Path], None]
) -> None:
    last = saved.ranks - 1
    damage(_segment(saved.without_memory().stored / "step-2", last))
    _assert_fell_back(saved.load(), f"segment of rank {last}: ")
    for error in saved.failures("step-2"):
        assert isinstance(error, CheckpointNotFound)
        assert isinstance(error, FileNotFoundError)
        assert error.available == ("step-1",)
        assert f"storage: segment of rank {last}: " in str(error)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("pattern", [".metadata", ".dcp_mem/manifest-*.json", ".dcp_mem/node-*.json"])
def test_what_describes_a_stored_checkpoint_may_be_damaged(
    saved: Saved, pattern: str, damage: Callable[[Path], None]
) -> None:
    damage(_only(saved.without_memory().stored / "step-2", pattern))
    if pattern == ".metadata" and damage is remove:
        assert [one.number for one in saved.load()] == [1] * saved.ranks  # to readers it doesn't exist
    else:
        _assert_fell_back(saved.load())
    for error in saved.failures("step-2"):
        assert isinstance(error, (CheckpointNotFound, SegmentCorrupt, RankFailed))
        assert "step-2" in str(error)


def _flip_metadata(job: Job) -> int:
    """Flip a bit in many places of a stored `.metadata`; how many were found."""
    path, found = Path(job.url or "") / "step-2" / ".metadata", 0
    for position in range(0, path.stat().st_size, 23):
        flip(path, position)
        assert raised_by(lambda: load_anew(job, "step-2")) is not None, position
        flip(path, position)
        found += 1
    assert load_anew(job, "step-2").number == 2
    return found


def test_no_flipped_bit_of_the_metadata_goes_unnoticed(saved: Saved) -> None:
    assert forked(_flip_metadata, saved.without_memory().job) > 20


def test_all_that_is_damaged_is_listed_when_nothing_is_left(saved: Saved) -> None:
    stored = saved.without_memory().stored
    cut(_segment(stored / "step-2", 0))
    empty(_only(stored / "step-1", ".dcp_mem/manifest-*.json"))
    for error in saved.failures():
        assert isinstance(error, NoRecoverableCheckpoint)
        lines = str(error).splitlines()
        assert lines[0] == f"no recoverable checkpoint in memory (job job) and {stored}:"
        assert [line.split()[1].rstrip(":") for line in lines[1:]] == ["step-2", "step-1"]


# -- in memory -----------------------------------------------------------------------------------------------------------

HELD = {
    "segment": "__0_0-*.distcp",
    "manifest": ".dcp_mem/manifest.json",
    "metadata": ".dcp_mem/metadata-*",
    "layout": ".dcp_mem/layout-*",
}


each_damage_in_memory = pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        pytest.param(pattern, damage, id=f"{what} {name}")
        for what, pattern in HELD.items()
        for name, damage in DAMAGES.items()
        if (what, name) != ("segment", "flipped")  # memory is not summed: the kernel gives back what was written
    ],
)


@each_damage_in_memory
def test_damage_in_memory_makes_the_load_turn_to_storage(
    saved: Saved, pattern: str, damage: Callable[[Path], None]
) -> None:
    for path in (saved.held / "step-2").glob(pattern):
        damage(path)
    for name in (None, "step-2"):
        for loaded in saved.load(name):
            assert (loaded.number, loaded.report.checkpoint_id) == (2, "step-2")
            assert "storage" in loaded.report.source


@each_damage_in_memory
def test_damage_in_memory_makes_the_load_take_an_older_checkpoint(
    saved: Saved, pattern: str, damage: Callable[[Path], None]
) -> None:
    for path in (saved.held / "step-2").glob(pattern):
        damage(path)
    alone = saved.without_storage()
    assert [(one.number, one.report.source) for one in alone.load()] == [(1, "memory")] * saved.ranks
    for error in alone.failures("step-2"):
        assert isinstance(error, (CheckpointNotFound, SegmentCorrupt, RankFailed))
        assert "step-2" in str(error)


def test_damage_in_both_places_leaves_the_older_checkpoint(saved: Saved) -> None:
    cut(_segment(saved.held / "step-2", 0))
    _flip_payload(saved.stored / "step-2", saved.ranks - 1)
    _assert_fell_back(saved.load(), "CRC32C")


def test_a_newer_save_of_the_name_that_is_damaged_gives_way_to_the_stored_one(saved: Saved) -> None:
    shutil.rmtree(saved.held / "step-1")
    (saved.held / "step-2").rename(saved.held / "step-3")  # says that it is step-2
    shutil.rmtree(saved.stored / "step-2")
    for loaded in saved.load():
        assert loaded.number == 1


# -- several nodes -------------------------------------------------------------------------------------------------------


def _save_on_nodes(job: Job) -> None:
    with replace(job, memory=f"{job.memory}/node{dist.get_rank()}").writer(agent="thread") as writer:
        save(writer, 1)
        writer.wait(timeout=60)


def _load_on_nodes(job: Job) -> Loaded | Exception:
    mine = replace(job, memory=f"{job.memory}/node{dist.get_rank()}")
    error = raised_by(lambda: load_anew(mine))
    return error or load_anew(mine)


def test_what_lies_in_several_nodes_memory_is_loaded_from_storage(memory_root: Path, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked_ranks(_save_on_nodes, 2, job)
    for loaded in forked_ranks(_load_on_nodes, 2, job):
        assert isinstance(loaded, Loaded)
        assert (loaded.number, loaded.report.source) == (1, "storage")
    for error in forked_ranks(_load_on_nodes, 2, replace(job, url=None)):
        assert isinstance(error, NoRecoverableCheckpoint)
        assert "memory: the segments of ranks" in str(error)
        assert "lie in other nodes' memory" in str(error)


# -- what torch wrote ----------------------------------------------------------------------------------------------------


def _save_two_with_torch(directory: Path) -> None:
    for number in (1, 2):
        dcp.save(make_state(number), storage_writer=dcp.FileSystemWriter(str(directory / f"step-{number}")))


@pytest.mark.parametrize("damage", [cut, empty, remove])
@pytest.mark.parametrize("pattern", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_of_torch_is_got_round_too(
    memory_root: Path, tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    forked(_save_two_with_torch, tmp_path)
    damage(_only(tmp_path / "step-2", pattern))
    job = Job(str(tmp_path), str(memory_root))
    assert forked(load_anew, job).number == 1
    error = forked(_failure, job, "step-2")
    assert isinstance(error, (CheckpointNotFound, SegmentCorrupt))
