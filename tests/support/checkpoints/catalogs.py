"""Catalogs of random worlds."""

from collections.abc import Sequence
from random import Random

import numpy as np

from dcp_mem.format.catalog import Catalog
from dcp_mem.format.layout import layout_of
from dcp_mem.format.names import FROZEN
from dcp_mem.planning.global_plan import GlobalPlan
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_written
from dcp_mem.planning.plan_columns import LocalPlan
from tests.support.checkpoints.worlds import plan_of, random_world, regular_world


def some_plans(random: Random, ranks: int) -> list[LocalPlan]:
    """Draw plans; some ranks also have names without items."""
    draw = random.choice([random_world, regular_world, regular_world])
    return [
        plan_of(items, [f"names.of{rank}"] * (random.random() < 0.2))
        for rank, items in enumerate(draw(random, ranks))
    ]


def some_written(random: Random, plan: GlobalPlan, masks: Sequence[bytes]) -> list[WrittenItems]:
    """Return what ranks may have written: in another order, and in part in second segments."""
    layouts = [layout_of(np.array([[0], [64], [8], [size]], np.int64)) for size in (4, 8, 24)]
    firsts, seconds = [], []
    for rank, mask in enumerate(masks):
        count = int(plan.plan.lengths[rank])
        rows = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), count=count))
        if random.random() < 0.3:
            rows = np.array(random.sample(rows.tolist(), len(rows)), np.int64)
        cut = random.randint(0, len(rows)) if random.random() < 0.3 else len(rows)
        firsts.append(WrittenItems(rank, rows[:cut], random.choice(layouts)))
        if cut < len(rows):
            seconds.append(WrittenItems(FROZEN + rank, rows[cut:], layouts[0]))
    return [*firsts, *seconds]


def read_catalog(plan: GlobalPlan, written: Sequence[WrittenItems]) -> Catalog:
    data = catalog_of_written(plan, written).to_bytes()
    assert data == catalog_of_written(plan, written).to_bytes()
    return Catalog.from_bytes(data)
