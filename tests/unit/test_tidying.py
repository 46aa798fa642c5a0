"""Tidying a checkpoint's directory: what a save puts there meanwhile stays."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dcp_mem.common.values import Outcome
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory import locks, recycling
from dcp_mem.memory.locks import in_turn
from tests.support.checkpoints.jobs import Job, load, save


def test_what_is_published_while_its_directory_is_tidied_stays(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_job.writer(keep_memory=1) as writer:
        memory = writer._saver.open_session().memory
        directory = memory.make_checkpoint_directory("step-1")
        saved: list[str] = []

        def listed(path: str) -> Sequence[str]:
            entries = os.listdir(path)
            if path == directory and not saved:
                # Who tidies is held up now, and the save doesn't wait for a turn any longer.
                saved.append(path)
                save(writer, 1)
            return entries

        monkeypatch.setattr(recycling, "files_in", listed)
        memory.tidy(directory)
        assert saved
        assert [one.name for one in memory.checkpoints()] == ["step-1"]
        assert load(memory_job.reader()) == 1


def test_a_directory_that_is_tidied_away_as_a_save_makes_it_is_made_again(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_job.writer(keep_memory=1) as writer:
        memory = writer._saver.open_session().memory
        mkdir = os.mkdir
        tidied: list[str] = []

        def make(path: str, mode: int = 0o777) -> None:
            if path.endswith(".dcp_mem") and not tidied:
                tidied.append(path)
                memory.tidy(os.path.dirname(path))  # it has nothing yet
            mkdir(path, mode)

        monkeypatch.setattr(os, "mkdir", make)
        save(writer, 1)
        assert tidied
        assert load(memory_job.reader()) == 1


def test_remains_of_a_save_that_never_completed_are_tidied_away(memory_job: Job) -> None:
    with memory_job.writer(keep_memory=1) as writer:
        save(writer, 1)
        memory = writer._saver.open_session().memory
        (checkpoint,) = memory.checkpoints()
        kept = sorted(os.listdir(checkpoint.directory))
        own = sorted(os.listdir(os.path.join(checkpoint.directory, ".dcp_mem")))
        for stray in ("__0_0-00000000.distcp", "notes.txt", ".dcp_mem/catalog-0000"):
            Path(checkpoint.directory, stray).write_bytes(b"x")
        slots = len(os.listdir(memory.slots))
        memory.tidy(checkpoint.directory)
        assert sorted(os.listdir(checkpoint.directory)) == kept
        assert sorted(os.listdir(os.path.join(checkpoint.directory, ".dcp_mem"))) == own
        assert len(os.listdir(memory.slots)) == slots + 1  # the segment's memory


def test_the_record_of_a_flush_stays_where_its_directory_is_tidied_meanwhile(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_job.writer(keep_memory=1) as writer:
        save(writer, 1)
        memory = writer._saver.open_session().memory
        (checkpoint,) = memory.checkpoints()
        tidying = threading.Thread(target=memory.tidy, args=(checkpoint.directory,))
        rename = os.rename

        def rename_late(source: str, target: str) -> None:
            if target.endswith("flush.json"):
                tidying.start()
                tidying.join(0.5)  # it waits for its turn
            rename(source, target)

        monkeypatch.setattr(locks, "_PROBE_SECONDS", 60)
        monkeypatch.setattr(os, "rename", rename_late)
        durable = FlushRecord(save_id=checkpoint.manifest.save_id, outcome=Outcome.DURABLE)
        memory.record_flush(checkpoint, durable)
        tidying.join()
        (found,) = memory.checkpoints()
        assert found.flush == durable


def test_shared_turns_run_at_once_and_an_exclusive_one_waits(tmp_path: Path) -> None:
    directory, shared = str(tmp_path), threading.Barrier(2, timeout=10)
    order: list[str] = []

    def add() -> None:
        with in_turn(directory, is_shared=True):
            shared.wait()
            shared.wait()
            order.append("added")

    adding = threading.Thread(target=add)
    adding.start()
    with in_turn(directory, is_shared=True):
        shared.wait()  # both are in their turns
    shared.wait()
    with in_turn(directory):
        order.append("tidied")
    adding.join()
    assert order == ["added", "tidied"]
