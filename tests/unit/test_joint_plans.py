"""A plan that is made along the tree is the plan that rank 0 would make of all ranks' plans."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_mem.common.sendable import decoded, encoded
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format import catalog
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.layout import layout_of
from dcp_mem.planning import global_plan
from dcp_mem.planning.contradictions import PlanInvalid
from dcp_mem.planning.global_plan import merge
from dcp_mem.planning.joint_plan import (
    JointPlan,
    SeriesNumbers,
    join_plans,
    plan_of_rank,
)
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_written, share_written
from dcp_mem.planning.plan_columns import COLUMNS, LocalPlan, widened
from tests.support.checkpoints.catalogs import read_catalog, some_plans, some_written
from tests.support.checkpoints.plans import joint, rows_of
from tests.support.checkpoints.worlds import (
    plan_of,
    plans_of,
    random_world,
    regular_world,
    shard_item,
    tensor_item,
    wrong_world,
)
from tests.support.variants import examples

SEEDS = st.integers(0, 1 << 32)
RANKS = st.integers(1, 24)


def _joined_along_a_tree(random: Random, plans: Sequence[LocalPlan]) -> JointPlan:
    """Join the plans of neighbours, and such joint plans, in any order, until one is left."""
    parts = [plan_of_rank(rank, plan) for rank, plan in enumerate(plans)]
    while len(parts) > 1:
        random.shuffle(parts)
        count = random.randint(1, 5)
        parts = [join_plans([_sent(one) for one in parts[:count]]), *parts[count:]]
    return _sent(parts[0])


def _sent(plan: JointPlan) -> JointPlan:

    sent: JointPlan = decoded(encoded(plan))
    return sent


def _rows_of_all(plans: Sequence[LocalPlan]) -> dict[str, Any]:
    """Return what rank 0 has of all plans, one below the other: joined in the plainest way."""
    names = list(dict.fromkeys(name for plan in plans for name in plan.names))
    paths = {
        name: path
        for plan in plans[::-1]
        for name, path in zip(plan.names, plan.paths, strict=True)
    }
    table = list(dict.fromkeys(one for plan in plans for one in plan.table))
    width = max(plan.size.shape[1] for plan in plans)
    rows = [
        (
            rank,
            row,
            names.index(plan.names[plan.name[row]]),
            plan.kind[row],
            -1 if plan.properties[row] < 0 else table.index(plan.table[plan.properties[row]]),
            plan.dimensions[row],
            *widened(plan.size, width, 1)[row],
            *widened(plan.offset, width, 0)[row],
            *widened(plan.extent, width, 1)[row],
        )
        for rank, plan in enumerate(plans)
        for row in range(len(plan))
    ]
    columns = np.array(rows, np.int64).reshape(-1, 6 + 3 * width).T
    return {
        "names": tuple(names),
        "paths": tuple(paths[name] for name in names),
        "table": tuple(table),
        **dict(
            zip(("rank", "row", "name", "kind", "properties", "dimensions"), columns, strict=False)
        ),
        "size": columns[6 : 6 + width].T,
        "offset": columns[6 + width : 6 + 2 * width].T,
        "extent": columns[6 + 2 * width :].T,
    }


@settings(max_examples=examples(150))
@given(SEEDS, RANKS)
def test_a_plan_joined_along_any_tree_has_every_item_of_every_rank(seed: int, ranks: int) -> None:
    random = Random(seed)
    plans = some_plans(random, ranks)
    joined = _joined_along_a_tree(random, plans)
    found = rows_of(joined)
    expected = _rows_of_all(plans)
    for field in ("names", "paths", "table"):
        assert getattr(found, field) == expected[field], field
    for field in (*COLUMNS, "rank", "row"):
        assert np.array_equal(getattr(found, field), expected[field]), field
    assert joined.ranks.tolist() == list(range(ranks))
    assert joined.lengths.tolist() == list(map(len, plans))
    assert joined.count == sum(map(len, plans))


@settings(max_examples=examples(50))
@given(SEEDS, RANKS)
def test_some_series_of_a_joint_plan_are_those_items_of_the_whole(seed: int, ranks: int) -> None:
    random = Random(seed)
    numbers = SeriesNumbers(joint(some_plans(random, ranks)))
    plan, whole = numbers.plan, numbers.items(np.arange(len(numbers.plan.name)))
    some = np.array(random.sample(range(len(plan.name)), len(plan.name) // 2), np.int64)
    wanted, found = np.isin(whole.series, some), numbers.items(some)
    for field in (*COLUMNS, "rank", "row", "series", "place"):
        assert np.array_equal(getattr(found, field), getattr(whole, field)[wanted]), field


@pytest.mark.parametrize("to_lowest_rank", [False, True], ids=["balanced", "to the lowest rank"])
@pytest.mark.parametrize("items_at_once", [1, 40])
def test_tree_and_portions_do_not_change_the_plan(
    items_at_once: int, to_lowest_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples(120))
    @given(SEEDS, RANKS)
    def plan_both_ways(seed: int, ranks: int) -> None:
        random = Random(seed)
        plans = some_plans(random, ranks)
        whole = merge(joint(plans), to_lowest_rank=to_lowest_rank)
        written = some_written(random, whole, whole.masks())
        expected = read_catalog(whole, written)
        with monkeypatch.context() as patch:
            patch.setattr(global_plan, "_ITEMS_AT_ONCE", items_at_once)
            joined = _joined_along_a_tree(random, plans)
            parts = merge(joined, to_lowest_rank=to_lowest_rank)
            assert parts.masks() == whole.masks()
            found = read_catalog(parts, share_written(written))
        for field in (
            "name",
            "properties",
            "size",
            "first",
            "offset",
            "extent",
            "writer",
            "number",
        ):
            assert np.array_equal(getattr(found, field), getattr(expected, field)), field
        seen["alike"] += len(whole.names.specimens) < len(whole.names.name)
        seen["several series"] += bool((whole.names.count > 1).any())
        seen["dealt out"] += bool(whole.shares.any())

    plan_both_ways()
    assert seen["alike"]
    assert seen["several series"]
    assert bool(seen["dealt out"]) is not to_lowest_rank


def test_offsets_that_do_not_fit_in_32_bits_are_kept() -> None:
    step = 1_500_000_000
    world = [
        [
            shard_item("a", (9 * step,), (rank * 3 * step + turn * step,), (step,))
            for turn in (1, 0, 2)
        ]
        for rank in range(3)
    ]
    plans = plans_of(world)
    parts = [plan_of_rank(rank, plan) for rank, plan in enumerate(plans)]
    for several in (parts, parts[::-1], [join_plans(parts[1:]), parts[0]]):
        plan = join_plans(several)
        rows = rows_of(plan)
        expected = np.concatenate([one.offset for one in plans])
        assert rows.offset.tolist() == expected.tolist()
        assert merge(plan).masks() == [bytes([0b11100000])] * 3


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("items_at_once", [1, 40])
def test_tree_and_portions_do_not_change_the_words_of_a_refusal(
    items_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples(200))
    @given(SEEDS, RANKS)
    def plan_both_ways(seed: int, ranks: int) -> None:
        random = Random(seed)
        world = random.choice([random_world, regular_world])(random, ranks)
        if not any(world):
            return
        plans = plans_of(wrong_world(random, world))
        joined = _joined_along_a_tree(random, plans)
        expected = _outcome(joint(plans))
        with monkeypatch.context() as patch:
            patch.setattr(global_plan, "_ITEMS_AT_ONCE", items_at_once)
            assert _outcome(joined) == expected
        seen.update(words for words in WORDS if isinstance(expected, str) and words in expected)

    plan_both_ways()
    assert not set(WORDS) - seen.keys()


WORDS = (
    "twice",
    "overlapping chunks at",
    "something else on another rank",
    "sharded on one rank and not on another",
    "different sizes of the whole",
    "out of bounds",
    "cover",
)


def _outcome(plan: JointPlan) -> str | list[bytes]:
    try:
        return merge(plan).masks()
    except PlanInvalid as error:
        return str(error)


def test_what_is_refused_is_named_though_thousands_of_names_are_like_it() -> None:
    names = [f"layer{number}" for number in range(30)]
    world = [[shard_item(name, (9,), (rank * 3,), (3,)) for name in names] for rank in range(3)]
    world[1][7] = shard_item("layer7", (9,), (2,), (3,))
    with pytest.raises(PlanInvalid, match=r"^layer7: overlapping chunks$"):
        merge(joint(plans_of(world)))
    del world[2][:]
    with pytest.raises(PlanInvalid, match=r"^layer0: chunks cover 6 of 9.*\(and 21 more\)$"):
        merge(joint(plans_of(world)))


# -- how much it is --------------------------------------------------------------------------------


def test_a_joint_plan_of_many_ranks_that_are_alike_is_hardly_larger_than_one() -> None:
    names = [f"model.layers.{number}.weight" for number in range(200)]

    def plan(rank: int) -> LocalPlan:
        items = [shard_item(name, (1024, 8), (rank * 2, 0), (2, 8)) for name in names]
        return plan_of([*items, tensor_item("step")])

    one = len(encoded(plan_of_rank(0, plan(0))))
    many = len(encoded(join_plans([plan_of_rank(rank, plan(rank)) for rank in range(512)])))
    assert many < one + 512 * 64


def _regular_catalog(ranks: int) -> bytes:
    """Write the catalog of 100 names on so many ranks."""
    items = [shard_item(f"layer{number}", (ranks * 2, 4), (0, 0), (2, 4)) for number in range(100)]
    plan = plan_of(items)
    parts = [
        plan_of_rank(rank, replace(plan, offset=plan.offset + np.array([rank * 2, 0])))
        for rank in range(ranks)
    ]
    merged = merge(join_plans(parts))
    layout = layout_of(np.zeros((4, 0), np.int64))
    written = [WrittenItems(rank, np.arange(100), layout) for rank in range(ranks)]
    return catalog_of_written(merged, share_written(written)).to_bytes()


def test_the_catalog_of_a_regular_job_grows_by_bytes_a_rank() -> None:
    few, many = _regular_catalog(10), _regular_catalog(2000)
    assert len(many) < len(few) + 2000 * 5
    found = Catalog.from_bytes(many)
    assert len(found.writer) == 100 * 2000


def test_a_catalog_of_many_rows_is_long_enough_for_a_reader_to_believe_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = _regular_catalog(500)
    monkeypatch.setattr(catalog, "_ROWS_PER_BYTE", 1)
    with pytest.raises(ManifestInvalid, match="more rows"):
        Catalog.from_bytes(short)
    assert len(Catalog.from_bytes(_regular_catalog(500)).writer) == 100 * 500
