"""Plans and metadata beside what torch makes of the same state."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from dcp_mem.format.catalog import Catalog, Ints
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.layout import layout_of
from dcp_mem.planning.global_plan import GlobalPlan
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_plan
from dcp_mem.planning.plan_columns import NotDescribable
from dcp_mem.planning.state_structure import DescribedState, Structure
from tests.support.checkpoints.roundtrip import State, properties_of

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent."""


def written(plan: GlobalPlan, rank: int) -> Ints:
    """Rows that a rank writes, in an order that isn't theirs."""
    rows: Ints = plan.rows_of(rank)[::-1].copy()
    return rows


def metadata_of_plan(plan: GlobalPlan, ranks: int) -> Metadata:
    """Of segments in which every item lies behind the layout, at multiples of 64."""
    rows = [written(plan, rank) for rank in range(ranks)]
    nothing = layout_of(np.zeros((4, 0), np.int64))
    catalog = catalog_of_plan(
        plan, [WrittenItems(rank, of_rank, nothing) for rank, of_rank in enumerate(rows)]
    )
    tails = {
        rank: [(64 * position, 9) for position in range(len(of_rank))]
        for rank, of_rank in enumerate(rows)
    }
    return metadata_of(Catalog.from_bytes(catalog.to_bytes()), "0123abcd", tails)


def is_valid(plans: list[SavePlan], metadata: Metadata) -> bool:
    """Ask torch whether a global plan is valid. It returns a list of errors, older torch a bool."""
    answer: Any = _validate_global_plan(plans, metadata)
    return answer is True or answer == []


def assert_same_content(ours: Metadata, theirs: Metadata) -> None:
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, expected in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(expected), name
        if isinstance(expected, TensorStorageMetadata):
            assert isinstance(found, TensorStorageMetadata)
            assert found.size == expected.size, name
            assert len(found.chunks) == len(expected.chunks), name
            key = _sides
            assert sorted(map(key, found.chunks)) == sorted(map(key, expected.chunks)), name
            assert all(
                type(each.offsets) is type(each.sizes) is torch.Size for each in found.chunks
            ), name
            assert properties_of(found) == properties_of(expected), name
    assert ours.planner_data == theirs.planner_data


def _sides(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def are(found: Sequence[Any] | None, expected: Sequence[Any]) -> bool:
    return found is not None and len(found) == len(expected) and all(map(_is, found, expected))


def assert_noticed(structure: Structure, changed: State) -> None:
    """Recognised only where a fresh description would be the same."""
    leaves = structure.recognise(changed)
    fresh: Structure | None = None
    with contextlib.suppress(NotDescribable, ValueError):
        fresh = Structure(changed)
    if leaves is not None:
        assert fresh is not None
        assert fresh.plan.is_same(structure.plan)
        assert are(leaves, DescribedState(changed).leaves)


def _is(one: object, other: object) -> bool:
    return one is other
