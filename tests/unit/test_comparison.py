"""docs/comparison.md: every cell about another tool names its source, and every source is named."""

import re
from collections.abc import Iterator

import pytest

from tests.support import REPOSITORY

PAGE = (REPOSITORY / "docs" / "comparison.md").read_text()
TABLES, SOURCES = PAGE.split("## Sources\n")
SECTIONS = (
    "Checkpoints in node memory",
    "Asynchronous savers",
    "Weight transfer",
    "Bytes that haven't changed",
)
"""Sections whose tables compare tools. "Measured here" links to runs instead."""
SAYS_SO = re.compile(r"\[\d+\]|\]\([^)]+\)|not found|as above")
"""A source by number, a page of our own, or a word that there is none."""


def _rows() -> Iterator[list[str]]:
    for section in SECTIONS:
        text = TABLES.split(f"## {section}\n")[1].split("\n## ")[0]
        table = [line for line in text.splitlines() if line.startswith("| ")]
        for line in table[2:]:
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


@pytest.mark.parametrize("row", list(_rows()), ids=lambda row: row[0])
def test_a_row_names_its_sources(row: list[str]) -> None:
    ours = row[0] == "**dcp_mem**"
    assert ours or all(cell and SAYS_SO.search(cell) for cell in row[1:] if _is_a_claim(cell))


def _is_a_claim(cell: str) -> bool:
    """Whether a cell says more than what follows from its neighbour."""
    return cell not in ("is whole", "needs the base from elsewhere", "")


def test_sources_are_numbered_in_order_and_all_are_used() -> None:
    listed = [int(number) for number in re.findall(r"^(\d+)\. ", SOURCES, re.MULTILINE)]
    used = {int(number) for number in re.findall(r"\[(\d+)\](?!\()", TABLES)}
    assert listed == list(range(1, len(listed) + 1))
    assert used == set(listed)
