"""Plans, metadata, saves and loads beside what torch makes of the same state."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

import dcp_mem
from dcp_mem.format.catalog import Catalog, Ints
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.layout import layout_of
from dcp_mem.planning import global_plan
from dcp_mem.planning.joint_plan import (
    JointPlan,
    PlanRows,
    SeriesNumbers,
    in_order,
    join_plans,
    plan_of_rank,
)
from dcp_mem.planning.plan_catalog import WrittenItems, catalog_of_written
from dcp_mem.planning.plan_columns import COLUMNS, LocalPlan, NotDescribable
from dcp_mem.planning.state_structure import DescribedState, Structure
from tests.support.checkpoints.roundtrip import State, properties_of

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent."""


class TorchPlanner(dcp.DefaultSavePlanner):
    """Torch's default planner under another name, so that dcp_mem leaves the planning to torch."""


class TorchLoadPlanner(dcp.DefaultLoadPlanner):
    """The same for loads."""


def save_by_torch(state: State, **options: Any) -> Metadata:
    """`dcp.save`, planned by torch."""
    metadata: Metadata = dcp.save(state, planner=TorchPlanner(), **options)
    return metadata


def load_by_torch(state: State, **options: Any) -> None:
    """`dcp.load`, planned by torch."""
    dcp.load(state, planner=TorchLoadPlanner(), **options)


SAVES: Mapping[str, Callable[..., Metadata]] = {
    "dcp.save": dcp.save,
    "dcp_mem.save": dcp_mem.save,
    "torch's planner": save_by_torch,
}
"""The roads of a save: two that dcp_mem plans, and that of torch."""

_BEGUN: Mapping[str, Callable[..., Any]] = {
    "save": dcp_mem.save,
    "dcp.save": dcp.save,
    "async": dcp_mem.async_save,
    "async by dcp": dcp.async_save,
}


def begin_save(road: str, writer: dcp_mem.MemoryStorageWriter, state: State, name: str) -> Any:
    """Save on a road: "save", "dcp.save", "async" or "async by dcp"; returns what that returns."""
    return _BEGUN[road](state, checkpoint_id=name, storage_writer=writer)


def save_by(road: str, writer: dcp_mem.MemoryStorageWriter, state: State, name: str) -> None:
    """Save on one of these roads, and wait."""
    begun = begin_save(road, writer, state, name)
    if road.startswith("async"):
        begun.result()


LOADS: Mapping[str, Callable[..., object]] = {
    "dcp.load": dcp.load,
    "dcp_mem.load": dcp_mem.load,
    "torch's planner": load_by_torch,
}
"""The roads of a load."""


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what dcp_mem logs."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("dcp_mem"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def why_torch_plans(lines: Sequence[str]) -> list[str]:
    """Return why saves were left to torch, going by the log."""
    found = (re.search(r"is planned by torch(?:, which takes longer)?: (.*)", one) for one in lines)
    return [match[1] for match in found if match]


def joint(plans: Sequence[LocalPlan]) -> JointPlan:
    """Join the plans of all ranks at once."""
    return join_plans([plan_of_rank(rank, plan) for rank, plan in enumerate(plans)])


def rows_of(plan: JointPlan) -> PlanRows:
    """Every item of every rank, by rank and then in the order of its plan."""
    return SeriesNumbers(in_order(plan)).items(np.arange(len(plan.name)))


def merge(plans: Sequence[LocalPlan], *, to_lowest_rank: bool = False) -> PlanRows:
    """The items that are written; `rank` and `row`: of each, the writer and its row there."""
    merged = global_plan.merge(joint(plans), to_lowest_rank=to_lowest_rank)
    bits = [
        np.unpackbits(np.frombuffer(mask, np.uint8), count=len(plan))
        for mask, plan in zip(merged.masks(), plans, strict=True)
    ]
    rows, written = rows_of(merged.plan), np.concatenate(bits).astype(bool)
    columns = {
        name: getattr(rows, name)[written] for name in (*COLUMNS, "rank", "row", "series", "place")
    }
    return replace(rows, **columns)


def written(plan: PlanRows, rank: int) -> Ints:
    """Rows that a rank writes, in an order that isn't theirs."""
    rows: Ints = plan.row[plan.rank == rank][::-1].copy()
    return rows


def metadata_of_plan(plans: Sequence[LocalPlan]) -> Metadata:
    """Of segments in which every item lies behind the layout, at multiples of 64."""
    merged = merge(plans)
    rows = [written(merged, rank) for rank in range(len(plans))]
    nothing = layout_of(np.zeros((4, 0), np.int64))
    catalog = catalog_of_written(
        global_plan.merge(joint(plans)),
        [WrittenItems(rank, of_rank, nothing) for rank, of_rank in enumerate(rows)],
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
