"""The gate leaves out slow variants, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from tests.support.variants import corners, with_variants

pytest_plugins = ["pytester"]

_TESTS = """
import pytest
from tests.support.variants import with_variants

def test_plain(): ...

@pytest.mark.variant
def test_variant(): ...

@pytest.mark.parametrize("kind", with_variants(["a", "b"], gate=["b"]))
def test_kinds(kind): ...

@pytest.mark.parametrize("way", ["s3", "abfs"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_matrix(way, step): ...
"""
_CONFTEST = """
from tests.support import variants

def pytest_addoption(parser):
    variants.add_option(parser)

def pytest_collection_modifyitems(config, items):
    variants.leave_out(config, items)
"""
_IN_THE_GATE = [
    "test_kinds[b]",
    "test_matrix[1-s3]",
    "test_matrix[2-abfs]",
    "test_matrix[3-s3]",
    "test_plain",
]
_ALL = sorted(
    [
        *("test_plain", "test_variant", "test_kinds[a]", "test_kinds[b]"),
        *(f"test_matrix[{step}-{way}]" for step in (1, 2, 3) for way in ("s3", "abfs")),
    ]
)


def _passed(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """The tests that pass; everything else is deselected, and that is reported."""
    pytester.makeconftest(_CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    variant\n")
    path = pytester.makepyfile(test_it=_TESTS)
    run = pytester.inline_run(
        "-p", "no:cacheprovider", *(one.replace("FILE", path.name) for one in arguments)
    )
    passed, skipped, failed = run.listoutcomes()
    assert not [*skipped, *failed]
    return sorted(report.nodeid.partition("::")[2] for report in passed)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], _IN_THE_GATE),
        (["FILE"], _IN_THE_GATE),
        (["-k", "kinds"], ["test_kinds[b]"]),
        (["--all"], _ALL),
        (["--all", "-m", "variant"], ["test_kinds[a]", "test_variant"]),
        (["--all", "-k", "kinds"], ["test_kinds[a]", "test_kinds[b]"]),
        (["FILE::test_variant"], ["test_variant"]),
        (["FILE::test_matrix[1-abfs]"], ["test_matrix[1-abfs]"]),
        (["FILE::test_kinds"], ["test_kinds[a]", "test_kinds[b]"]),
    ],
)
def test_variants_are_run_where_all_tests_are_asked_for_or_these_are_named(
    pytester: pytest.Pytester, arguments: list[str], expected: list[str]
) -> None:
    assert _passed(pytester, *arguments) == expected


def test_corners_have_each_value_once_in_as_few_cases_as_it_takes_and_pair_them_evenly() -> None:
    names = ("step", "fault", "way")
    cases = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(range(6), ["reset", "slow", "lost"], ["s3", "abfs"])
    ]
    chosen = [cases[number] for number in corners(cases)]
    assert len(chosen) == 6
    assert {case["step"] for case in chosen} == set(range(6))
    assert {(case["fault"], case["way"]) for case in chosen} == set(
        itertools.product(["reset", "slow", "lost"], ["s3", "abfs"])
    )


def test_a_case_for_the_gate_is_one_that_there_is() -> None:
    with pytest.raises(AssertionError):
        with_variants(["a"], gate=["b"])
