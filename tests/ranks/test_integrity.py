"""Damage is found and named: a load returns what was saved, or an older save, or an error."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from dcp_mem import (
    CheckpointNotFound,
    NoRecoverableCheckpoint,
    RankFailed,
    SegmentCorrupt,
    SizeRefused,
)
from tests.support.checkpoints.damage import cut, empty, flip, remove, stored_tables
from tests.support.checkpoints.jobs import (
    Job,
    Loaded,
    load_anew,
    make_state,
    save,
    save_two,
    save_two_with_torch,
)
from tests.support.processes.forks import forked, forked_ranks, raised_by

pytestmark = pytest.mark.timeout(120)


Outcome = Loaded | Exception


@dataclass(frozen=True)
class Saved:
    """A job with step-1 and step-2, both complete in memory and durable in a directory."""

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

    def load(self, *names: str | None) -> list[list[Outcome]]:
        """Load these names in turn in fresh processes; return the outcome by name and rank."""
        return list(map(list, zip(*forked_ranks(_load, self.ranks, self.job, names), strict=True)))


def _load(job: Job, names: Sequence[str | None]) -> list[Outcome]:
    return [_outcome(lambda name=name: load_anew(job, name)) for name in names]  # type: ignore[misc]


def _outcome(act: Callable[[], Loaded]) -> Outcome:
    loaded: list[Loaded] = []
    return raised_by(lambda: loaded.append(act())) or loaded[0]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="1 rank", marks=pytest.mark.variant),
        pytest.param(2, id="2 ranks"),
    ],
)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("original")
    (directory / "memory").mkdir(mode=0o700)
    job = Job(str(directory / "storage"), str(directory / "memory"))
    forked_ranks(save_two, request.param, job)
    return Saved(job, request.param)


@pytest.fixture
def saved(original: Saved, memory_root: Path, tmp_path: Path) -> Saved:
    """A copy to be damaged."""
    shutil.copytree(original.job.memory, memory_root, dirs_exist_ok=True)
    shutil.copytree(original.stored, tmp_path / "storage")
    return Saved(Job(str(tmp_path / "storage"), str(memory_root)), original.ranks)


# -- kinds of damage -------------------------------------------------------------------------------


DAMAGES = {"flipped": flip, "cut": cut, "emptied": empty, "removed": remove}


def _only(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


def _segment(directory: Path, rank: int) -> Path:
    return _only(directory, f"__{rank}_0-*.distcp")


def _flip_payload(directory: Path, rank: int) -> None:
    """Flip a bit of the rank's sharded tensor, or of whichever is its largest."""
    segment = _segment(directory, rank)
    table = stored_tables(directory)[segment.name]
    largest = int(table.payload_nbytes.argmax())
    flip(segment, int(table.payload_offsets[largest] + table.payload_nbytes[largest] // 2))


def _assert_fell_back(outcomes: Sequence[Outcome], *words: str) -> None:
    """Every rank took the older checkpoint, and says why, alike."""
    for loaded in outcomes:
        assert isinstance(loaded, Loaded), loaded
        assert loaded.number == 1
        reason = "\n".join(loaded.report.passed_over)
        assert all(word in reason for word in ("step-2", *words)), reason
    assert (
        len({loaded.report.passed_over for loaded in outcomes if isinstance(loaded, Loaded)}) == 1
    )


def _assert_refused(outcomes: Sequence[Outcome], *kinds: type[Exception]) -> None:
    """Every rank got an error that names the checkpoint."""
    for error in outcomes:
        assert isinstance(error, kinds), error
        assert "step-2" in str(error)


# -- on storage ------------------------------------------------------------------------------------


def test_a_flipped_bit_on_storage_is_named_and_got_round(saved: Saved) -> None:
    last = saved.ranks - 1
    _flip_payload(saved.without_memory().stored / "step-2", last)
    newest, named = saved.load(None, "step-2")
    _assert_fell_back(newest, f"segment of rank {last} in {saved.stored}", "CRC32C")
    corrupt = named[last]
    assert isinstance(corrupt, SegmentCorrupt)
    assert (corrupt.checkpoint, corrupt.rank, corrupt.source) == ("step-2", last, str(saved.stored))
    assert "sharded: CRC32C" in str(corrupt)
    _assert_refused(named, SegmentCorrupt, RankFailed)
    assert all(f"segment of rank {last}" in str(error) for error in named)


def _load_unverified(job: Job) -> str:
    try:
        load_anew(job, "step-2", verify=False)
    except AssertionError as error:
        return str(error)
    return ""


def test_without_verification_the_flipped_bit_is_loaded(saved: Saved) -> None:
    last = saved.ranks - 1
    _flip_payload(saved.without_memory().stored / "step-2", last)
    assert "sharded" in forked_ranks(_load_unverified, saved.ranks, saved.job)[last]


def _flip_everywhere(job: Job) -> int:
    """Flip a bit at the start, middle and end of each item; return how many were found."""
    directory, found = Path(job.url or "") / "step-2", 0
    for file, table in stored_tables(directory).items():
        for offset, length in zip(table.offsets.tolist(), table.lengths.tolist(), strict=True):
            for position in (offset, offset + length // 2, offset + length - 1):
                flip(directory / file, position)
                found_by = _outcome(lambda: load_anew(job, "step-2"))
                assert isinstance(found_by, SegmentCorrupt), (file, position)
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
    newest, named = saved.load(None, "step-2")
    _assert_fell_back(newest, f"segment of rank {last}: ")
    _assert_refused(named, CheckpointNotFound)
    for error in named:
        assert isinstance(error, CheckpointNotFound)
        assert isinstance(error, FileNotFoundError)
        assert error.available == ("step-1",)
        assert f"storage: segment of rank {last}: " in str(error)


@pytest.mark.parametrize(
    "pattern", [".dcp_mem/manifest-*.json", ".dcp_mem/catalog-*", ".dcp_mem/node-*.json"]
)
def test_what_describes_a_stored_checkpoint_may_be_damaged(saved: Saved, pattern: str) -> None:
    path = _only(saved.without_memory().stored / "step-2", pattern)
    whole = path.read_bytes()
    for damage in DAMAGES.values():
        damage(path)
        newest, named = saved.load(None, "step-2")
        _assert_fell_back(newest)
        _assert_refused(named, CheckpointNotFound, SegmentCorrupt, RankFailed)
        path.write_bytes(whole)


def test_metadata_that_belongs_to_another_save_is_not_loaded(saved: Saved) -> None:
    path = saved.without_memory().stored / "step-2" / ".metadata"
    path.write_bytes((saved.stored / "step-1" / ".metadata").read_bytes())
    newest, named = saved.load(None, "step-2")
    _assert_fell_back(newest, "isn't save")
    _assert_refused(named, CheckpointNotFound)


@pytest.mark.parametrize("damage", [empty, remove])
def test_without_metadata_nothing_is_committed(
    saved: Saved, damage: Callable[[Path], None]
) -> None:
    damage(saved.without_memory().stored / "step-2" / ".metadata")
    newest, named = saved.load(None, "step-2")
    assert [one.number for one in newest if isinstance(one, Loaded)] == [1] * saved.ranks
    _assert_refused(named, CheckpointNotFound)


def test_damage_in_what_only_torchs_readers_need_does_not_concern_ours(saved: Saved) -> None:
    path = saved.without_memory().stored / "step-2" / ".metadata"
    path.write_bytes(b"\x80garbage" + path.read_bytes()[9:])
    for outcomes in saved.load(None, "step-2"):
        assert [one.number for one in outcomes if isinstance(one, Loaded)] == [2] * saved.ranks


def _flip_throughout(job: Job, path: Path, step: int) -> int:
    """Flip one bit in every `step` bytes of a file of step-2; return how many were found."""
    found = 0
    for position in range(0, path.stat().st_size, step):
        flip(path, position)
        assert isinstance(_outcome(lambda: load_anew(job, "step-2")), Exception), position
        flip(path, position)
        found += 1
    assert load_anew(job, "step-2").number == 2
    return found


@pytest.mark.parametrize("pattern", ["manifest-*.json", "catalog-*"])
def test_no_flipped_bit_of_what_describes_a_stored_checkpoint_goes_unnoticed(
    saved: Saved, pattern: str
) -> None:
    path = _only(saved.without_memory().stored / "step-2" / ".dcp_mem", pattern)
    assert forked(_flip_throughout, saved.job, path, 29) > 15


@pytest.mark.parametrize("pattern", ["manifest.json", "catalog-*"])
def test_no_flipped_bit_of_what_describes_a_checkpoint_in_memory_goes_unnoticed(
    saved: Saved, pattern: str
) -> None:
    alone = saved.without_storage()
    path = _only(alone.held / "step-2" / ".dcp_mem", pattern)
    assert forked(_flip_throughout, alone.job, path, 29) > 15


def test_all_that_is_damaged_is_listed_when_nothing_is_left(saved: Saved) -> None:
    stored = saved.without_memory().stored
    cut(_segment(stored / "step-2", 0))
    empty(_only(stored / "step-1", ".dcp_mem/manifest-*.json"))
    (outcomes,) = saved.load(None)
    for error in outcomes:
        assert isinstance(error, NoRecoverableCheckpoint)
        lines = str(error).splitlines()
        assert lines[0] == f"no recoverable checkpoint in memory (job job) and {stored}:"
        assert [line.split()[1].rstrip(":") for line in lines[1:]] == ["step-2", "step-1"]


# -- in memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["__0_0-*.distcp", ".dcp_mem/manifest.json", ".dcp_mem/catalog-*"]
)
def test_damage_in_memory_makes_the_load_turn_to_storage_or_to_an_older_checkpoint(
    saved: Saved, pattern: str
) -> None:
    alone = saved.without_storage()
    for name, damage in DAMAGES.items():
        if (pattern, name) == ("__0_0-*.distcp", "flipped"):
            continue  # once there are checksums, as test_verified_memory.py shows
        originals = {path: path.read_bytes() for path in (saved.held / "step-2").glob(pattern)}
        for path in originals:
            damage(path)
        for outcomes in saved.load(None, "step-2"):
            for loaded in outcomes:
                assert isinstance(loaded, Loaded), loaded
                assert (loaded.number, loaded.report.checkpoint_id) == (2, "step-2")
                assert "storage" in loaded.report.source
        newest, named = alone.load(None, "step-2")
        for loaded in newest:
            assert isinstance(loaded, Loaded), loaded
            assert (loaded.number, loaded.report.source) == (1, "memory")
        _assert_refused(named, CheckpointNotFound, SegmentCorrupt, RankFailed)
        for path, data in originals.items():
            path.write_bytes(data)
            path.chmod(0o600)


def test_memory_without_metadata_or_with_a_damaged_one_is_loaded_all_the_same(saved: Saved) -> None:
    alone = saved.without_storage()
    for path in (
        alone.held / "step-2" / ".metadata",
        *(alone.held / "step-2" / ".dcp_mem").glob("metadata-*"),
    ):
        for damage in (flip, cut, empty, remove):
            damage(path)
            for outcomes in alone.load(None, "step-2"):
                assert [one.number for one in outcomes if isinstance(one, Loaded)] == [
                    2
                ] * saved.ranks


def test_damage_in_both_places_leaves_the_older_checkpoint(saved: Saved) -> None:
    cut(_segment(saved.held / "step-2", 0))
    _flip_payload(saved.stored / "step-2", 0)
    _assert_fell_back(saved.load(None)[0], "CRC32C")


def test_what_each_place_has_whole_is_put_together(saved: Saved) -> None:
    if saved.ranks == 1:
        pytest.skip("one segment lies whole in one place or the other")
    cut(_segment(saved.held / "step-2", 0))
    _flip_payload(saved.stored / "step-2", 1)
    for loaded in saved.load(None)[0]:
        assert isinstance(loaded, Loaded), loaded
        assert (loaded.number, loaded.report.source) == (2, "memory and storage")


def test_a_directory_under_another_name_is_no_checkpoint(saved: Saved) -> None:
    """What says that it is step-2 isn't step-3, and doesn't hide the rest."""
    (saved.held / "step-2").rename(saved.held / "step-3")
    (newest, named) = saved.without_storage().load(None, "step-3")
    assert [one.number for one in newest if isinstance(one, Loaded)] == [1] * saved.ranks
    assert all(isinstance(error, CheckpointNotFound) for error in named)


# -- several nodes ---------------------------------------------------------------------------------


def _save_on_nodes(job: Job) -> None:
    with replace(job, memory=f"{job.memory}/node{dist.get_rank()}").writer(
        agent="thread"
    ) as writer:
        save(writer, 1)
        writer.wait(timeout=60)


def _load_on_nodes(job: Job) -> Outcome:
    return _outcome(lambda: load_anew(replace(job, memory=f"{job.memory}/node{dist.get_rank()}")))


def test_what_lies_in_several_nodes_memory_is_put_together(
    memory_root: Path, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked_ranks(_save_on_nodes, 2, job)
    for url in (job.url, None):
        for loaded in forked_ranks(_load_on_nodes, 2, replace(job, url=url)):
            assert isinstance(loaded, Loaded)
            assert (loaded.number, loaded.report.source) == (1, "memory and peers")


# -- what torch wrote ------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_of_torch_is_got_round_too(
    memory_root: Path, tmp_path: Path, pattern: str
) -> None:
    forked(save_two_with_torch, tmp_path)
    path = _only(tmp_path / "step-2", pattern)
    whole = path.read_bytes()
    job = Job(str(tmp_path), str(memory_root))
    for damage in (cut, empty, remove):
        damage(path)
        newest, named = forked(_load, job, (None, "step-2"))
        assert isinstance(newest, Loaded)
        assert newest.number == 1
        assert isinstance(named, (CheckpointNotFound, SegmentCorrupt, SizeRefused))
        path.write_bytes(whole)
