"""Which saved chunks hold a wanted box: the interval index against looking at every pair."""

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_mem.format.catalog import Ints
from dcp_mem.planning import chunk_index
from dcp_mem.planning.chunk_index import Boxes, ChunkIndex, Overlaps
from dcp_mem.planning.plan_columns import widened
from tests.support.variants import examples

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent."""
Found = list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]
"""Wanted box, row, and offset and extent of what they have in common."""

SEEDS = st.integers(0, 1 << 32)


# -- random tensors --------------------------------------------------------------------------------


def _grid(random: Random, size: Sequence[int]) -> list[Box]:
    """Cells between random cuts, some of them empty."""
    sides = [_cuts(random, length) for length in size]
    return [_box(cell) for cell in itertools.product(*sides)]


def _cuts(random: Random, length: int) -> list[tuple[int, int]]:
    cuts = sorted(random.randint(0, length) for _ in range(random.randint(0, 4)))
    return list(itertools.pairwise([0, *cuts, length]))


def _ragged(random: Random, size: Sequence[int]) -> list[Box]:
    """Cut in one dimension, and each piece in another one in a way of its own: cells in no grid."""
    if len(size) < 2:
        return _grid(random, size)
    one, other = random.sample(range(len(size)), 2)
    boxes = []
    for start, stop in _cuts(random, size[one]):
        for start_of_other, stop_of_other in _cuts(random, size[other]):
            sides = [(0, length) for length in size]
            sides[one], sides[other] = (start, stop), (start_of_other, stop_of_other)
            boxes.append(_box(sides))
    return boxes


def _scattered(random: Random, size: Sequence[int]) -> list[Box]:
    """Boxes anywhere, that overlap and leave gaps: more than a catalog should ever hold."""
    boxes = []
    for _ in range(random.randint(0, 8)):
        starts = [random.randint(0, length) for length in size]
        extents = tuple(
            random.randint(0, length - start) for start, length in zip(starts, size, strict=True)
        )
        boxes.append((tuple(starts), extents))
    return boxes


def _box(sides: Sequence[tuple[int, int]]) -> Box:
    return tuple(start for start, _ in sides), tuple(stop - start for start, stop in sides)


def _cut_up(random: Random, size: Sequence[int]) -> list[Box]:
    return random.choice([_grid, _ragged, _scattered])(random, size)


# -- columns ---------------------------------------------------------------------------------------


def _columns(boxes: Sequence[Box], width: int) -> tuple[Ints, Ints]:
    """Padded as a catalog's columns are."""
    offset, extent = np.zeros((len(boxes), width), np.int64), np.ones((len(boxes), width), np.int64)
    for row, (start, lengths) in enumerate(boxes):
        offset[row, : len(start)], extent[row, : len(lengths)] = start, lengths
    return offset, extent


def _index(saved: Sequence[Sequence[Box]], width: int) -> tuple[ChunkIndex, list[tuple[int, Box]]]:
    """Index the chunks of several entries, by offset; return also the rows with their entries."""
    rows = [(entry, box) for entry, boxes in enumerate(saved) for box in sorted(boxes)]
    first = np.cumsum([0, *map(len, saved)])
    return ChunkIndex(*_columns([box for _, box in rows], width), first), rows


def _find(index: ChunkIndex, wanted: Sequence[tuple[int, Box]], width: int) -> Found:
    entry = np.array([entry for entry, _ in wanted], np.int64)
    return _as_list(index.find(Boxes(entry, *_columns([box for _, box in wanted], width))))


def _as_list(found: Overlaps) -> Found:
    columns = (
        found.wanted.tolist(),
        found.row.tolist(),
        found.offset.tolist(),
        found.extent.tolist(),
    )
    return [
        (one, row, tuple(offset), tuple(extent))
        for one, row, offset, extent in zip(*columns, strict=True)
    ]


def _pair_by_pair(
    rows: Sequence[tuple[int, Box]], wanted: Sequence[tuple[int, Box]], width: int
) -> Found:
    found: Found = []
    for number, (entry, (start, extent)) in enumerate(wanted):
        for row, (other_entry, (other_start, other_extent)) in enumerate(rows):
            if entry != other_entry:
                continue
            low = tuple(map(max, start, other_start))
            high = tuple(
                min(one + length, other + other_length)
                for one, length, other, other_length in zip(
                    start, extent, other_start, other_extent, strict=True
                )
            )
            if all(one < other for one, other in zip(low, high, strict=True)):
                missing = width - len(low)
                lengths = tuple(other - one for one, other in zip(low, high, strict=True))
                found.append((number, row, low + (0,) * missing, lengths + (1,) * missing))
    return found


# -- what is found ---------------------------------------------------------------------------------


def _random_case(random: Random) -> tuple[list[list[Box]], list[tuple[int, Box]], int]:
    """Draw chunks of tensors of 0 to 3 dimensions, some empty, and the boxes wanted of them."""
    sizes = [
        [random.randint(0, 9) for _ in range(random.randint(0, 3))]
        for _ in range(random.randint(1, 6))
    ]
    width = max(1, *map(len, sizes)) + random.randint(0, 1)  # columns have one dimension at least
    wanted = [
        (entry, box)
        for entry, size in enumerate(sizes)
        for box in _cut_up(random, size)
        if random.random() < 0.7
    ]
    random.shuffle(wanted)
    return [_cut_up(random, size) for size in sizes], wanted, width


@settings(max_examples=examples(400))
@given(SEEDS)
def test_exactly_the_chunks_that_share_elements_with_a_box_are_found_in_order(seed: int) -> None:
    saved, wanted, width = _random_case(Random(seed))
    index, rows = _index(saved, width)
    assert _find(index, wanted, width) == _pair_by_pair(rows, wanted, width)


@settings(max_examples=examples(100))
@given(SEEDS, st.integers(1, 5))
def test_what_is_found_does_not_depend_on_how_much_is_compared_at_once(
    seed: int, at_once: int
) -> None:
    saved, wanted, width = _random_case(Random(seed))
    index, rows = _index(saved, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_index, "_AT_ONCE", at_once)
        assert _find(index, wanted, width) == _pair_by_pair(rows, wanted, width)


@settings(max_examples=examples(100))
@given(SEEDS)
def test_what_is_found_of_a_whole_tensor_covers_every_wanted_element_once(seed: int) -> None:
    random = Random(seed)
    size = [random.randint(1, 8) for _ in range(random.randint(1, 3))]
    index, _ = _index([random.choice([_grid, _ragged])(random, size)], len(size))
    covered = np.zeros(size, int)
    wanted = [(0, box) for box in random.choice([_grid, _ragged])(random, size)]
    for _, _, offset, extent in _find(index, wanted, len(size)):
        covered[
            tuple(
                slice(start, start + length) for start, length in zip(offset, extent, strict=True)
            )
        ] += 1
    assert (covered == 1).all()


def test_scalars_are_found_whole_and_empty_tensors_have_nothing_in_common() -> None:
    index, _ = _index([[((), ())], [((0, 0), (0, 4))], [((0,), (3,))]], 2)
    wanted: list[tuple[int, Box]] = [(0, ((), ())), (1, ((0, 0), (0, 4))), (2, ((3,), (0,)))]
    assert _find(index, wanted, 2) == [(0, 0, (0, 0), (1, 1))]


def test_nothing_is_found_where_nothing_is_saved_or_wanted() -> None:
    index, _ = _index([[], [((0,), (2,))]], 1)
    assert _find(index, [(0, ((0,), (2,)))], 1) == []
    assert _find(index, [], 1) == []
    nothing, _ = _index([], 1)
    assert _find(nothing, [], 1) == []


def test_few_of_many_chunks_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rows by a thousand ranks: each wanted row is compared with its neighbours."""
    index, _ = _index([[((row, 0), (1, 5)) for row in range(1000)]], 2)
    compared: list[int] = []
    compare = ChunkIndex._compare

    def counted(index: ChunkIndex, wanted: Boxes, number: Ints, low: Ints, counts: Ints) -> Any:
        compared.append(int(counts.sum()))
        return compare(index, wanted, number, low, counts)

    monkeypatch.setattr(ChunkIndex, "_compare", counted)
    wanted: list[tuple[int, Box]] = [(0, ((row, 0), (2, 5))) for row in range(0, 1000, 2)]
    assert len(_find(index, wanted, 2)) == 1000
    assert sum(compared) == 1000


@pytest.mark.parametrize("width", [2, 3, 5])
def test_columns_are_widened_by_sides_that_change_nothing(width: int) -> None:
    offset, extent = _columns([((1, 2), (3, 4))], 2)
    assert widened(offset, width, 0).tolist() == [[1, 2] + [0] * (width - 2)]
    assert widened(extent, width, 1).tolist() == [[3, 4] + [1] * (width - 2)]
