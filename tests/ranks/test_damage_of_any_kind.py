"""Any damage, wherever it lies, sends a load elsewhere: it never raises, and never passes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import dcp_mem
from dcp_mem.reader import RecoveryReport
from tests.support.checkpoints.jobs import (
    Job,
    Loaded,
    load_anew,
    make_state,
    number_of,
    save,
    wait_until,
)
from tests.support.processes.forks import forked, raised_by
from tests.support.seeds import SEED

pytestmark = pytest.mark.timeout(600)

ROUNDS = int(os.environ.get("DAMAGE_ROUNDS", "40"))
"""How many damages are tried; more of them outside the gate."""


def _flip(data: bytearray, chance: Random) -> None:
    for _ in range(chance.choice([1, 1, 5])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _zero_a_part(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    length = min(len(data) - start, chance.choice([8, 512, 4096]))
    data[start : start + length] = bytes(length)


def _zero_all(data: bytearray, chance: Random) -> None:
    data[:] = bytes(len(data))


def _garbage(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    length = min(len(data) - start, chance.choice([3, 100, 2000]))
    data[start : start + length] = chance.randbytes(length)


def _cut(data: bytearray, chance: Random) -> None:
    del data[chance.randrange(len(data)) :]


def _insert(data: bytearray, chance: Random) -> None:
    data[chance.randrange(len(data)) : 0] = b"\0"


DAMAGES: list[Callable[[bytearray, Random], None]] = [
    _flip,
    _flip,
    _zero_a_part,
    _zero_all,
    _garbage,
    _cut,
    _insert,
]


def _is_verified(job: Job, number: int) -> bool:
    """Whether a checkpoint in memory has checksums, and shares no file with another one."""
    directory = job.directory / f"step-{number}" / ".dcp_mem"
    (catalog,) = directory.glob("catalog-*")
    return bool(list(directory.glob("checksums-*"))) and catalog.stat().st_nlink == 1


def _save_two(job: Job) -> None:
    """Save step-1 and step-2, durable and with checksums in memory."""
    with job.writer(agent="thread") as writer:
        for number in (1, 2):
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)
            wait_until(lambda number=number: _is_verified(job, number), "checksums")  # type: ignore[misc]


def _loaded(job: Job, verify: bool = True) -> Loaded | Exception:
    loaded: list[Loaded] = []
    error = raised_by(lambda: loaded.append(load_anew(job, record=False, verify=verify)))
    return error or loaded[0]


def _damage_often(job: Job, url: Path, rounds: int) -> list[str]:
    """Damage a file and load, many times over; return what went wrong."""
    wrong, outcomes = [], []
    roots = (job.directory, url)
    files = sorted(path for root in roots for path in root.glob("step-*/**/*") if path.is_file())
    for number in range(rounds):
        chance = Random(SEED * 1000 + number)
        # Mostly one place alone is left, so that damage can't hide behind the other.
        lost = chance.choice([None, *roots, *roots])
        left = [path for path in files if lost is None or lost not in path.parents]
        path, act = chance.choice(left), chance.choice(DAMAGES)
        whole = path.read_bytes()
        data = bytearray(whole)
        if data:
            act(data, chance)
        alone = Job(None if lost == url else job.url, job.memory)
        aside = job.directory.with_name("aside")
        if lost == job.directory:
            job.directory.rename(aside)
        try:
            path.write_bytes(data)
            outcome = _loaded(alone)
        finally:
            path.write_bytes(whole)
            if lost == job.directory:
                shutil.rmtree(job.directory, ignore_errors=True)
                aside.rename(job.directory)
        what = f"round {number}: {act.__name__} of {path} ({len(whole)} bytes)"
        if isinstance(outcome, Exception):
            wrong.append(f"{what}: {type(outcome).__name__}: {outcome}")
        elif outcome.number == 1 and not outcome.report.passed_over:
            wrong.append(f"{what}: step-1, and the report says nothing")
        else:
            outcomes.append(outcome.number)
    assert len(set(outcomes)) == 2 or rounds < 20
    return wrong


def test_damage_anywhere_sends_a_load_elsewhere(memory_root: Path, tmp_path: Path) -> None:
    """The state that is loaded is that of one save, whole: `load_anew` compares all of it."""
    url = tmp_path / "storage"
    job = Job(str(url), str(memory_root))
    forked(_save_two, job)
    print(f"replay with DCP_MEM_SEED={SEED}")
    wrong = forked(_damage_often, job, url, ROUNDS, timeout=580.0)
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
    forked(_save_two, job)
    for path in job.directory.glob("step-2/.dcp_mem/checksums-*"):
        path.unlink()
    (segment,) = job.directory.glob("step-2/__*.distcp")
    segment.write_bytes(bytes(segment.stat().st_size))
    loaded = forked(_load_by_columns, job)
    assert isinstance(loaded, RecoveryReport), loaded
    assert (loaded.checkpoint_id, loaded.source) == ("step-2", "storage")


def _load_by_columns(job: Job) -> RecoveryReport:
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
    loaded = forked(_loaded, job, verify)
    assert isinstance(loaded, Loaded), loaded
    assert loaded.number == 1
    assert any("can't be read" in line for line in loaded.report.passed_over)
