"""What it costs each rank of a large job to open a catalog, and to look up what it reads.

Rows of the catalog are runs, which many entries share; few rows are made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.procfs import Growth
from benchmarks.harness.rank_plans import BYTES_OF_OBJECT, SAVE_ID, Model
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.tables import Part, Row, Section, attempt
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.locations import refuse_missing_tails
from dcp_mem.planning.find_reads import find_reads
from dcp_mem.planning.global_plan import merge
from dcp_mem.planning.joint_plan import join_plans, plan_of_rank
from dcp_mem.planning.plan_catalog import catalog_of_written, share_written
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Opening catalogs of large jobs"
ITEMS = 1000
SIZES, QUICK_SIZES = (64, 1024, 4096, 16384), (64, 1024)
JOINED_AT_ONCE = 16
MEMORY_LIMIT = 64 * MIB
BYTES_PER_ROW = 64
"""Of memory, while the catalog is made."""


@dataclass(frozen=True, slots=True)
class Spec:
    ranks: int
    path: Path


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank measured.

    Attributes:
        opening: Seconds of CPU until the catalog is read and checked.
        finding: Seconds of CPU until what the rank reads is found.
        peak: Growth of its memory, in bytes.
    """

    opening: float
    finding: float
    peak: int


def run(settings: Settings) -> Section:
    sizes = QUICK_SIZES if settings.quick else SIZES
    parts = [
        attempt("opening", f"{ranks:,} ranks × {ITEMS:,} items", partial(_part, settings, ranks))
        for ranks in sizes
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, ranks: int) -> Part:
    need(settings.tmpfs, GIB + ranks * ITEMS * BYTES_PER_ROW)
    with scratch(settings.tmpfs) as directory:
        path = directory / "catalog"
        in_fresh_processes(_write, Spec(ranks, path))
        nbytes = path.stat().st_size
        (ours,) = in_fresh_processes(_measure, Spec(ranks, path))
    rows = [
        Row(
            "memory of a rank",
            dcp_mem=f"{ours.peak / MIB:.0f} MiB",
            target=f"≤ {MEMORY_LIMIT // MIB} MiB",
            met=ours.peak <= MEMORY_LIMIT,
        ),
        Row(
            "opening, CPU",
            dcp_mem=f"{ours.opening * 1e3:.1f} ms",
        ),
        Row(
            "finding what to read, CPU",
            dcp_mem=f"{ours.finding * 1e3:.1f} ms",
        ),
    ]
    return Part(
        rows, [f"the catalog's file has {nbytes / 1e3:,.0f} kB, and {ranks * ITEMS:,} rows"]
    )


def _write(_rank: Rank, spec: Spec) -> None:
    """Write the catalog of a first plan."""
    model = Model(spec.ranks, ITEMS)
    parts = [plan_of_rank(rank, model.local_plan(rank)) for rank in range(spec.ranks)]
    while len(parts) > 1:
        starts = range(0, len(parts), JOINED_AT_ONCE)
        parts = [join_plans(parts[start : start + JOINED_AT_ONCE]) for start in starts]
    plan = merge(parts[0])
    written = share_written(model.written(plan.masks()))
    spec.path.write_bytes(catalog_of_written(plan, written).to_bytes())


def _measure(_rank: Rank, spec: Spec) -> Opened:
    rank = spec.ranks // 3
    plan = Model(spec.ranks, ITEMS).local_plan(rank)
    values = _values(plan)
    tails = {other: [(0, BYTES_OF_OBJECT)] for other in range(spec.ranks)}
    data = spec.path.read_bytes()
    growth, started = Growth(), time.process_time()
    catalog = Catalog.from_bytes(data)
    refuse_missing_tails(catalog, tails)
    opened = time.process_time()
    assert find_reads(plan, values, catalog, SAVE_ID, tails) is not None
    return Opened(opened - started, time.process_time() - opened, growth.peak)


def _values(plan: LocalPlan) -> list[Any]:
    """Return a tensor for each item that is one, without memory of its own."""
    scalar = torch.zeros(())
    shapes = zip(plan.extent.tolist(), plan.dimensions.tolist(), plan.kind.tolist(), strict=True)
    return [
        None if kind == ItemKind.OBJECT else scalar.expand(extent[:count])
        for extent, count, kind in shapes
    ]
