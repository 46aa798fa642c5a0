"""Names of checkpoints: what is a name, and where torch's own readers find it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import ConfigError, MemoryStorageWriter
from tests.support.checkpoints.jobs import Job, load, make_state, number_of
from tests.support.checkpoints.plans import SAVES
from tests.support.checkpoints.roundtrip import Places
from tests.support.processes.forks import forked, forked_ranks


def test_a_name_is_a_name_wherever_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, below = tmp_path / "run", tmp_path / "run" / "code"
    below.mkdir(parents=True)
    for directory in (tmp_path, root, below):
        monkeypatch.chdir(directory)
        absolute = f"{root}/step-1", f"{below}/../step-1/", f"file://{root}/step-1"
        for given in ("step-1", *absolute):
            assert _named(str(root), given) == "step-1"
        assert _named("s3://bucket/run", "s3://bucket/run/step-1") == "step-1"
        for wrong in ("run/step-1", "./step-1", f"{below}/step-1", "s3://other/run/step-1"):
            with pytest.raises(ConfigError, match="is no name under"):
                dcp_mem.delete(root, wrong)


def _named(root: str, given: str) -> object:
    """The name that a save under this checkpoint id has."""
    writer = MemoryStorageWriter(root)
    writer.reset(given)
    told = writer.storage_meta()
    return None if told is None else told.checkpoint_id


def _save_and_load_from(directory: Path, job: Job, road: str) -> tuple[int, int]:
    """Save, load in both ways, and look for the name on storage: all by a plain name."""
    os.chdir(directory)
    with job.writer(agent="thread") as writer:
        SAVES[road](make_state(1), checkpoint_id="step-1", storage_writer=writer)
        writer.wait("step-1", timeout=60)
    with job.reader() as reader:
        through_dcp = load(reader, "step-1")
    state = make_state(0)
    with job.reader() as reader:
        dcp_mem.load(state, checkpoint_id="step-1", storage_reader=reader)
    return through_dcp, number_of(state)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("road", list(SAVES))
def test_a_plain_name_is_saved_loaded_and_deleted_from_below_the_root(
    job: Job, road: str, ranks: int
) -> None:
    root = Path(str(job.url))
    below = root / "code"
    below.mkdir(parents=True)
    assert forked_ranks(_save_and_load_from, ranks, below, job, road) == [(1, 1)] * ranks
    assert (root / "step-1" / ".metadata").exists()
    assert list(below.iterdir()) == []
    forked(_delete_from, below, job)
    assert not (root / "step-1" / ".metadata").exists()


def _delete_from(directory: Path, job: Job) -> None:
    os.chdir(directory)
    dcp_mem.delete(str(job.url), "step-1")


def _save_and_load(job: Job, name: str) -> int:
    with job.writer(agent="thread") as writer:
        dcp_mem.save(make_state(1), checkpoint_id=name, storage_writer=writer)
        writer.wait(name, timeout=60)
    with job.reader() as reader:
        return load(reader, name)


@pytest.mark.parametrize("name", ["ckpt_dir_$0_cached", "epoch=1,loss=0.5@a%20+b~c:d", "$"])
def test_a_name_may_have_all_of_these_characters(job: Job, name: str) -> None:
    assert forked(_save_and_load, job, name) == 1
    assert Path(str(job.url), name, ".metadata").exists()


@pytest.mark.parametrize("road", list(SAVES))
def test_the_metadata_has_the_checkpoints_name_as_torchs_writers_have_it(
    places: Places, road: str
) -> None:
    with places.writer() as writer:
        returned = SAVES[road](
            {"x": torch.ones(3), "n": 1}, checkpoint_id="step-1", storage_writer=writer
        )
        writer.wait("step-1", timeout=60)
    stored = places.directory("storage", "step-1")
    for directory in (places.shown("step-1"), stored):
        metadata = dcp.FileSystemReader(str(directory)).read_metadata()
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.checkpoint_id == "step-1"
    assert returned.storage_meta is not None
    assert returned.storage_meta.checkpoint_id == "step-1"
