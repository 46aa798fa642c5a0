"""Any damage, wherever it lies, sends a load elsewhere: it never raises, and never passes."""

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

import dcp_mem
from tests.support.checkpoints.damaged_loads import (
    chosen_damage,
    files_of,
    load_damaged,
    load_or_error,
    save_two_verified,
)
from tests.support.checkpoints.jobs import Job, Loaded, make_state, number_of, save
from tests.support.processes.forks import forked
from tests.support.seeds import SEED

pytestmark = pytest.mark.timeout(600)

ROUNDS = int(os.environ.get("DAMAGE_ROUNDS", "20"))
"""How many damages are tried; more of them outside the gate."""


def _damage_often(job: Job, rounds: int) -> list[str]:
    """Damage a file and load, many times over; return what went wrong."""
    wrong, outcomes = [], set()
    files = files_of(job)
    for number in range(rounds):
        chance = Random(SEED * 1000 + number)
        damage = chosen_damage(job, files, chance)
        loaded, problem = load_damaged(job, damage, chance)
        outcomes.add(loaded)
        if problem:
            wrong.append(f"round {number}: {damage}: {problem}")
    assert {1, 2} <= outcomes or rounds < 20
    return wrong


def test_damage_anywhere_sends_a_load_elsewhere(memory_root: Path, tmp_path: Path) -> None:
    """The state that is loaded is that of one save, whole: `load_anew` compares all of it."""
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked(save_two_verified, job)
    print(f"replay with DCP_MEM_SEED={SEED}")
    wrong = forked(_damage_often, job, ROUNDS, timeout=580.0)
    assert not wrong, "\n".join(wrong)


def _save_unsummed(job: Job) -> None:
    with job.writer() as writer:
        for number in (1, 2):
            save(writer, number)


def test_nothing_is_taken_of_a_segment_that_turns_out_damaged(
    memory_root: Path, tmp_path: Path
) -> None:
    """Its tensors can be read without checksums, and its byte items can't: none of it counts."""
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked(save_two_verified, job)
    for path in job.directory.glob("step-2/.dcp_mem/checksums-*"):
        path.unlink()
    (segment,) = job.directory.glob("step-2/__*.distcp")
    segment.write_bytes(bytes(segment.stat().st_size))
    loaded = forked(_load_by_columns, job)
    assert not isinstance(loaded, Exception), loaded
    assert (loaded.checkpoint_id, loaded.source) == ("step-2", "storage")


def _load_by_columns(job: Job) -> Any:
    state = make_state(0)
    with job.reader() as reader:
        dcp_mem.load(state, storage_reader=reader)
        assert number_of(state) == 2
        return reader.report()


@pytest.mark.parametrize("verify", [True, False])
def test_segments_of_zeros_are_passed_over_without_checksums_as_well(
    memory_root: Path, verify: bool
) -> None:
    job = Job(None, str(memory_root))
    forked(_save_unsummed, job)
    directory = job.directory / "step-2"
    for path in directory.glob(".dcp_mem/checksums-*"):
        path.unlink()
    (segment,) = directory.glob("__*.distcp")
    segment.write_bytes(bytes(segment.stat().st_size))
    loaded = forked(load_or_error, job, verify)
    assert isinstance(loaded, Loaded), loaded
    assert loaded.number == 1
    assert any("can't be read" in line for line in loaded.report.passed_over)
