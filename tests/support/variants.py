"""What the gate leaves to `bash .ci/test --all`: slow variants of claims that it shows already."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.seeds import IS_EXPLORING

T = TypeVar("T")

VARIANT = pytest.mark.variant
_is_all = False


def add_option(parser: pytest.Parser) -> None:
    """Have pytest know `--all`."""
    parser.addoption("--all", action="store_true", help="run the variants, too (docs/testing.md)")


def configure(config: pytest.Config) -> None:
    """Note, before tests are imported, whether `--all` was given."""
    global _is_all
    _is_all = config.getoption("--all")


def examples(number: int) -> int:
    """Return how many examples Hypothesis tries where a test wants so many: the gate, a third."""
    return number if _is_all or IS_EXPLORING else max(number // 3, 20)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the variants, but for tests that the command line names one by one."""
    if config.getoption("--all"):
        return
    variants = {item for item in items if item.get_closest_marker("variant")}
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        # Unit tests are quick, mostly.
        if item not in variants and hasattr(item, "callspec") and not _is_unit(item):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for matrix in matrices.values():
        in_gate = corners([_parameters(item) for item in matrix])
        variants |= {item for number, item in enumerate(matrix) if number not in in_gate}
    named = [_test_of(one) for one in config.args if "::" in one]
    left_out = [item for item in items if item in variants and not _is_named(item.nodeid, named)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def with_variants(cases: Sequence[T], gate: Iterable[T]) -> list[ParameterSet]:
    """Return the cases as parameters, of which the gate has those in `gate`."""
    kept = list(gate)
    assert all(case in cases for case in kept), kept
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in kept else VARIANT
        )
        for case in cases
    ]


def corners(cases: Sequence[Mapping[str, object]]) -> set[int]:
    """Return the numbers of a few cases in which each value of each parameter comes up.

    Values are paired evenly, and always in the same way.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing = set().union(*values)
    met: Counter[tuple[tuple[str, str], ...]] = Counter()
    chosen = set[int]()

    def rank(number: int) -> tuple[int, int, int]:
        return -len(values[number] & missing), sum(met[one] for one in _met(values[number])), number

    while missing:
        best = min((number for number in range(len(cases)) if values[number] & missing), key=rank)
        chosen.add(best)
        met.update(_met(values[best]))
        missing -= values[best]
    return chosen


def _met(values: set[tuple[str, str]]) -> list[tuple[tuple[str, str], ...]]:
    """What meets in a case: each value by itself, and each two of them."""
    return [some for size in (1, 2) for some in combinations(sorted(values), size)]


def _is_unit(item: pytest.Item) -> bool:
    """Whether a test starts next to nothing: it lies in tests/unit."""
    return item.path.parent.name == "unit"


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    parameters: Mapping[str, object] = item.callspec.params  # type: ignore[attr-defined]
    return parameters


def _test_of(argument: str) -> str:
    """The part of an argument behind the file's directories, which may be given in any way."""
    path, _, test = argument.partition("::")
    return f"{path.rpartition('/')[2]}::{test}"


def _is_named(nodeid: str, named: Sequence[str]) -> bool:
    """Whether the command line names this very test, its function or its class."""
    own = _test_of(nodeid)
    return any(own == one or own.startswith((f"{one}[", f"{one}::")) for one in named)
