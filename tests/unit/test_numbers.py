"""The numbers of saves: what a process goes on with, and what it learns of."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.order import Place, SaveNumber, newest_first
from dcp_mem.runtime.numbers import RunNumbers

RUN = "0000abcd"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobMemory:
    monkeypatch.setattr("dcp_mem.runtime.numbers.run_token", lambda: RUN)
    return JobMemory(str(tmp_path), "job")


def _place(number: SaveNumber, run: str) -> Place:
    return Place(number=number, run=run, key=(str(number), run))


def _saved(memory: JobMemory, numbers: RunNumbers, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Save alone, as a rank without collectives does, and leave the checkpoint in memory."""
    known = max(numbers.newest(), memory.newest_number())
    number, run = numbers.begin(known, *numbers.run(memory.manifests()))
    manifest = SimpleNamespace(number=number, generation=number.generation, run=run)
    there = [*memory.manifests(), manifest]
    monkeypatch.setattr(memory, "manifests", lambda: there)
    return _place(number, run)


def test_ranks_that_save_without_each_other_go_on_with_one_generation(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [RunNumbers(memory), RunNumbers(memory)]
    saved = [_saved(memory, ranks[turn % 2], monkeypatch) for turn in range(6)]
    assert [place.number for place in saved] == [SaveNumber(1, count) for count in range(1, 7)]
    assert newest_first(saved, lambda place: place) == saved[::-1]


def test_a_run_that_learns_of_a_newer_generation_is_newer_than_all_that_it_has_saved(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = RunNumbers(memory)
    saved = [_saved(memory, numbers, monkeypatch) for _ in range(3)]
    saved.append(_place(SaveNumber(2, 1), "0000ffff"))  # another run's, which this one has loaded
    number, run = numbers.begin(SaveNumber(2, 1), *numbers.run(memory.manifests()))
    saved.append(_place(number, run))
    assert number == SaveNumber(3, 1)
    assert newest_first(saved, lambda place: place) == saved[::-1]
    assert numbers.run(memory.manifests()) == (3, run)
