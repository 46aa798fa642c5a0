"""Names of checkpoints: what is a name, and where torch's own readers find it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_mem import ConfigError
from dcp_mem.config import checkpoint_name
from tests.support.checkpoints.plans import SAVES
from tests.support.checkpoints.roundtrip import Places


def test_a_name_is_a_name_wherever_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, below = tmp_path / "run", tmp_path / "run" / "code"
    below.mkdir(parents=True)
    for directory in (tmp_path, root, below):
        monkeypatch.chdir(directory)
        assert checkpoint_name(str(root), "step-1") == "step-1"
        for absolute in (f"{root}/step-1", f"{below}/../step-1/", f"file://{root}/step-1"):
            assert checkpoint_name(str(root), absolute) == "step-1"
        assert checkpoint_name("s3://bucket/run", "s3://bucket/run/step-1") == "step-1"
        for wrong in ("run/step-1", "./step-1", f"{below}/step-1", "s3://other/run/step-1"):
            with pytest.raises(ConfigError, match="is no name under"):
                checkpoint_name(str(root), wrong)


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
