"""`dcp-mem export`: of one save and no other, and nothing but its own files is touched."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import Result

from dcp_mem import StorageUnavailable
from dcp_mem.operations import export
from dcp_mem.operations.reading import Reading
from dcp_mem.storage.posix_upload import PosixUpload
from tests.support.checkpoints.jobs import Job
from tests.support.shell import Shell
from tests.support.storage.file_systems import mounted_tmpfs

NUMBERS = 400_000


def _save(job: Job, value: float, *, persist: bool = True) -> str:
    """Save step-1 anew; return the id of the save."""
    with job.writer(agent="thread", persist=persist) as writer:
        state = {name: torch.full((NUMBERS,), value) for name in ("a", "b")}
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
        return writer.status()[0].save_id


def _export(job: Job, *arguments: str) -> Result:
    return Shell(job).run("export", *arguments)


def test_what_lay_in_the_target_keeps_its_modes(job: Job, tmp_path: Path) -> None:
    _save(job, 1.0)
    target, outside = tmp_path / "target", tmp_path / "outside"
    (target / "private").mkdir(parents=True, mode=0o700)
    own = {target / "key": 0o600, target / "private" / "run.sh": 0o700, outside: 0o600}
    for path, mode in own.items():
        path.touch()
        path.chmod(mode)
    (target / "link").symlink_to(outside)
    (target / "dangling").symlink_to(tmp_path / "nowhere")
    result = _export(job, "step-1", str(target), "--json")
    assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mode & 0o777 for path in own} == own
    assert (target / "private").stat().st_mode & 0o777 == 0o700
    assert all("key" not in file for file in json.loads(result.stdout)["files"])


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_what_is_saved_anew_meanwhile_is_not_mixed_in(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _save(job, 1.0)
    loads, load = list[str](), Reading.load

    def load_and_save_anew(self: Reading, *given: Any, **options: Any) -> None:
        load(self, *given, **options)
        loads.append("load")
        if len(loads) == 1:
            _save(job, 2.0)

    def copy_and_save_anew(*given: Any) -> None:
        copy(*given)
        if not loads:
            loads.append("copy")
            _save(job, 2.0)

    copy = export._copy_file
    monkeypatch.setattr(Reading, "load", load_and_save_anew)
    monkeypatch.setattr(export, "_copy_file", copy_and_save_anew)
    monkeypatch.setattr(export, "SHARD_NBYTES", NUMBERS * 5)  # a file for each tensor
    target = tmp_path / "target"
    result = _export(job, "step-1", str(target), "--format", kind)
    assert result.exit_code == 1, result.output
    assert loads
    assert not (target / ".metadata").exists()
    assert not target.is_file()
    assert not (target / "model.safetensors.index.json").exists()


def test_a_save_id_names_that_save(job: Job, tmp_path: Path) -> None:
    first = _save(job, 1.0)
    second = _save(job, 2.0, persist=False)
    for number, save_id in ((1, first), (2, second)):
        target = tmp_path / f"{number}.pt"
        result = _export(job, save_id, str(target), "--format", "torch")
        assert result.exit_code == 0, result.output
        assert torch.load(target)["a"].unique().tolist() == [number]


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_full_disk_is_an_error(job: Job, tmp_path: Path, kind: str) -> None:
    _save(job, 1.0)
    with mounted_tmpfs(tmp_path / "small", "2m") as directory:
        result = _export(job, "step-1", str(directory / "out"), "--format", kind)
        assert result.exit_code == 1, result.output
        assert "No space left" in result.output
        assert not [path for path in directory.rglob("*") if path.is_file()]


def test_what_was_rejected_in_memory_can_be_exported(job: Job, tmp_path: Path) -> None:
    _save(job, 1.0, persist=False)
    assert Shell(job).run("reject", "step-1", "--why", "NaN").exit_code == 0
    result = _export(job, "step-1", str(tmp_path / "kept"))
    assert result.exit_code == 0, result.output
    assert os.path.exists(tmp_path / "kept" / ".metadata")


def test_what_leaves_memory_while_it_is_exported_leaves_nothing_at_the_target(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(job, 1.0, persist=False)
    finish = PosixUpload.finish

    def vanish(upload: PosixUpload) -> None:
        finish(upload)
        shutil.rmtree(job.directory)
        raise StorageUnavailable("target", "no answer")

    monkeypatch.setattr(PosixUpload, "finish", vanish)
    result = _export(job, "step-1", str(tmp_path / "kept"))
    assert result.exit_code == 1
    assert "can't be exported from memory just now" in result.output
    assert not [path for path in tmp_path.joinpath("kept").rglob("*") if path.is_file()]
