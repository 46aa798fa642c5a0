"""The ledger of unstable tests: failing among others twice, and passing alone, ends a run."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import REPOSITORY

_ONE, _OTHER = "tests/ranks/test_a.py::test_one[x y]", "tests/unit/test_b.py::test_other"


@pytest.fixture
def ledger(tmp_path: Path) -> ModuleType:
    """The script, with a ledger and pytest's cache of its own."""
    spec = importlib.util.spec_from_file_location("ledger", REPOSITORY / ".ci" / "ledger.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    vars(script).update(LEDGER=tmp_path / "unstable.txt", CACHE=tmp_path / ".pytest_cache")
    (tmp_path / ".pytest_cache" / "v" / "cache").mkdir(parents=True)
    (tmp_path / "unstable.txt").write_text("# Tests that failed and passed alone.\n")
    return script


@pytest.fixture
def note(ledger: ModuleType) -> Callable[..., int]:
    """Note tests that failed among others and passed alone; return how the run ends."""

    def run(*tests: str) -> int:
        Path(ledger.CACHE, "unstable").write_text(json.dumps(dict.fromkeys(tests, True)))
        return int(ledger.note())

    return run


def test_a_test_that_is_unstable_twice_fails_the_run(
    ledger: ModuleType, note: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert note(_ONE) == 0
    assert ledger.known() == {_ONE}
    assert note(_OTHER) == 0
    assert "AGAIN" not in capsys.readouterr().out
    assert note(_ONE, f"{_OTHER} of another file") == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in told if "AGAIN" in line] == [_ONE]


def test_a_test_stands_in_the_ledger_once_and_may_come_again_when_its_line_is_gone(
    ledger: ModuleType, note: Callable[..., int]
) -> None:
    assert [note(_ONE) for _ in range(3)] == [0, 1, 1]
    head, *lines = ledger.LEDGER.read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [_ONE]
    ledger.LEDGER.write_text(f"{head}\n")
    assert note(_ONE) == 0


def test_what_failed_in_the_last_run_is_counted(
    ledger: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    last = Path(ledger.CACHE, "v", "cache", "lastfailed")
    for failed in ([], [_ONE], [_ONE, _OTHER]):
        last.write_text(json.dumps(dict.fromkeys(failed, True)))
        assert ledger.count() == 0
        assert capsys.readouterr().out == f"{len(failed)}\n"
