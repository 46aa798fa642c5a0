"""A catalog says the same, whether its rows are all made or only those that are needed."""

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcp_mem.errors import ManifestInvalid
from dcp_mem.format import catalog as catalog_module
from dcp_mem.format import catalog_conversion
from dcp_mem.format.catalog import Catalog, Ints, Rows
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.locations import LayoutItems, refuse_missing_tails
from dcp_mem.format.metadata import LazyMetadata, read_metadata
from dcp_mem.format.metadata_by_entry import EntryStorageData, numel_of
from dcp_mem.planning.find_reads import find_reads
from dcp_mem.planning.global_plan import merge
from dcp_mem.planning.plan_catalog import share_written
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan
from dcp_mem.planning.reads import Reads
from tests.support.checkpoints.catalogs import read_catalog, some_plans, some_written
from tests.support.checkpoints.plans import joint
from tests.support.checkpoints.worlds import plan_of, shard_item
from tests.support.variants import examples

SEEDS = st.integers(0, 1 << 32)
RANKS = st.integers(1, 24)
Tails = dict[int, list[tuple[int, int]]]


def _drawn(seed: int, ranks: int) -> tuple[list[LocalPlan], Catalog]:
    """Draw the plans of some ranks; return them, and what a load reads of their catalog."""
    random = Random(seed)
    plans = some_plans(random, ranks)
    return plans, _catalog_of(random, plans)


def _catalog_of(random: Random, plans: list[LocalPlan]) -> Catalog:
    plan = merge(joint(plans))
    return read_catalog(plan, share_written(some_written(random, plan, plan.masks())))


@contextmanager
def _entry_by_entry() -> Iterator[None]:
    """Let catalogs be looked at as those of very many rows, which are never all made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_module, "_MANY_ROWS", -1)
        patch.setattr(catalog_conversion, "_FEW_ROWS_OF_ENTRY", -1)
        for column in ("offset", "extent", "writer", "number"):
            patch.setattr(Catalog, column, property(_refused))
        yield


def _refused(_: Catalog) -> Any:
    raise AssertionError("a column of all rows was asked for")


def _tails(catalog: Catalog) -> Tails:
    """Return tails that have just the items that the catalog has beyond its layouts."""
    items, rows = LayoutItems(catalog), np.flatnonzero(catalog.writer >= 0)
    found: Tails = {}
    for rank, number in zip(
        catalog.ranks[catalog.writer[rows]].tolist(),
        items.beyond(catalog.writer[rows], catalog.number[rows]).tolist(),
        strict=True,
    ):
        of_rank = found.setdefault(rank, [])
        of_rank.extend((64 * place, 9) for place in range(len(of_rank), number + 1))
    return found


@settings(max_examples=examples(60))
@given(SEEDS, RANKS, st.data())
def test_some_rows_of_it_are_the_same_rows(seed: int, ranks: int, data: st.DataObject) -> None:
    _, catalog = _drawn(seed, ranks)
    some = data.draw(st.lists(st.sampled_from(range(len(catalog.writer))), max_size=9)) or [0]
    rows = np.unique(np.array(some, np.int64))
    entry = catalog.entry_of_row()[rows]
    found = catalog.rows_at(entry, rows - catalog.first[entry])
    for name in ("offset", "extent", "writer", "number"):
        assert np.array_equal(getattr(found, name), getattr(catalog, name)[rows]), name
    assert np.array_equal(np.repeat(np.arange(len(catalog.name)), np.diff(found.first)), entry)
    one = int(entry[0])
    within = slice(int(catalog.first[one]), int(catalog.first[one + 1]))
    offset, extent = catalog.boxes_of(one)
    assert np.array_equal(offset, catalog.offset[within])
    assert np.array_equal(extent, catalog.extent[within])


@settings(max_examples=examples(60))
@given(SEEDS, RANKS)
def test_it_is_known_which_tails_lack_an_item(seed: int, ranks: int) -> None:
    _, catalog = _drawn(seed, ranks)
    highest = catalog.most_numbers().tolist()
    tails = _tails(catalog)
    for ways in (nullcontext, _entry_by_entry):
        with ways():
            assert catalog.most_numbers().tolist() == highest
            refuse_missing_tails(catalog, tails)
            for rank in [rank for rank, of_rank in tails.items() if of_rank][:3]:
                with pytest.raises(ManifestInvalid, match="aren't of one save"):
                    refuse_missing_tails(catalog, {**tails, rank: tails[rank][:-1]})


def test_a_load_finds_the_same_reads_in_it() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples(60), deadline=None)
    @given(SEEDS, RANKS, st.integers(0, 23))
    def find_both_ways(seed: int, ranks: int, rank: int) -> None:
        plans, catalog = _drawn(seed, ranks)
        tails = _tails(catalog)
        plan = plans[rank % ranks]
        values = _values(plan)
        expected = find_reads(plan, values, catalog, "0123abcd", tails)
        with _entry_by_entry():
            found = find_reads(plan, values, catalog, "0123abcd", tails)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert _as_plain(found) == _as_plain(expected)
            seen["direct reads"] += len(found.payloads.file)
            seen["other items"] += len(found.rest())

    find_both_ways()
    assert seen["direct reads"]
    assert seen["other items"]


def test_a_load_makes_only_the_rows_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of fifty ranks has its part of forty tensors."""
    shapes = [(50 * 2, 4), (50, 3)]
    worlds = [
        [
            shard_item(
                f"layer{number}", shape, (rank * shape[0] // 50, 0), (shape[0] // 50, shape[1])
            )
            for number in range(40)
            for shape in [shapes[number % 2]]
        ]
        for rank in range(50)
    ]
    plans = [plan_of(items) for items in worlds]
    catalog = _catalog_of(Random(1), plans)
    made: list[int] = []
    real = Catalog.rows_at

    def noted(catalog: Catalog, entry: Ints, row: Ints) -> Rows:
        made.append(len(entry))
        return real(catalog, entry, row)

    monkeypatch.setattr(Catalog, "rows_at", noted)
    tails = _tails(catalog)
    with _entry_by_entry():
        assert find_reads(plans[7], _values(plans[7]), catalog, "0123abcd", tails) is not None
    assert made == [40]
    assert len(catalog.writer) == 40 * 50


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, RANKS)
def test_metadata_that_is_made_entry_by_entry_is_equal_to_all_of_it(seed: int, ranks: int) -> None:
    _, catalog = _drawn(seed, ranks)
    tails = _tails(catalog)
    expected = metadata_of(catalog, "0123abcd", tails, "step-1")
    with _entry_by_entry():
        found = metadata_of(catalog, "0123abcd", tails, "step-1")
        assert isinstance(found.storage_data, EntryStorageData)
        assert found == expected
        assert expected == found
        copied = pickle.loads(pickle.dumps(found))
        for one in copied.state_dict_metadata.values():
            assert not isinstance(one, TensorStorageMetadata) or type(one.chunks) is list
        assert (copied, type(copied.storage_data)) == (expected, dict)
        assert read_metadata(pickle.dumps(LazyMetadata(lambda: found))) == expected
        data = expected.storage_data
        assert list(found.storage_data) == list(found.storage_data.keys())
        assert len(found.storage_data) == len(data)
        assert dict(found.storage_data.items()) == dict(found.storage_data) == data
        assert bool(found.storage_data) == bool(data)
        assert {info.relative_path for info in found.storage_data.values()} == {
            info.relative_path for info in data.values()
        }
        for index, info in data.items():
            assert found.storage_data[index] == info
            elsewhere = None if index.offset else torch.Size([1 << 40] * len(index.offset or [0]))
            assert found.storage_data.get(MetadataIndex(index.fqn, elsewhere)) == data.get(
                MetadataIndex(index.fqn, elsewhere)
            )
        assert MetadataIndex("nobody") not in found.storage_data
        assert found.storage_data.get(cast(Any, "nobody")) is None
        for name, known in expected.state_dict_metadata.items():
            of_name = found.state_dict_metadata[name]
            assert type(of_name) is type(known)
            if isinstance(known, TensorStorageMetadata):
                assert isinstance(of_name, TensorStorageMetadata)
                assert of_name.chunks[:] == known.chunks
                assert [
                    of_name.chunks[number] for number in range(len(known.chunks))
                ] == known.chunks
                assert repr(of_name) == repr(known)
                assert numel_of(of_name.chunks) == numel_of(known.chunks)


def test_tails_that_lack_an_item_are_noticed_before_somebody_looks() -> None:
    _, catalog = _drawn(3, 5)
    assert any(_tails(catalog).values())
    with _entry_by_entry(), pytest.raises(ManifestInvalid, match="aren't of one save"):
        metadata_of(catalog, "0123abcd", {})


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 24), st.sampled_from([1, 7, 1 << 20]))
def test_rows_that_fall_are_found_whatever_is_looked_at_at_once(
    seed: int, ranks: int, at_once: int
) -> None:
    _, catalog = _drawn(seed, ranks)
    falling = [
        entry
        for entry in range(len(catalog.name))
        if (np.diff(catalog.boxes_of(entry)[0], axis=0) != 0).any()
    ]
    with _entry_by_entry(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_module, "_ROWS_AT_ONCE", at_once)
        catalog_module._refuse_contradictions(catalog)
        for entry in falling[:1]:
            runs = catalog.offset_runs[entry]
            for run in runs.tolist():  # turned round: each of these runs falls now
                first, step, length = catalog.boxes.first, catalog.boxes.step, catalog.boxes.length
                if length[run] >= 0:
                    first[run] += step[run] * (length[run] - 1)
                    step[run] *= -1
                else:
                    listed = slice(int(first[run]), int(first[run] - length[run]))
                    catalog.boxes.values[listed] = catalog.boxes.values[listed][::-1].copy()
            with pytest.raises(ManifestInvalid, match="order of its rows"):
                Catalog.from_bytes(catalog.to_bytes())


def _values(plan: LocalPlan) -> list[Any]:
    """Return a tensor for each item that is one, all in the same memory."""
    found: list[Any] = []
    for number, kind in enumerate(plan.kind.tolist()):
        shape = plan.extent[number, : plan.dimensions[number]].tolist()
        dtype = plan.table[plan.properties[number]].dtype if kind != ItemKind.OBJECT else ""
        found.append(_tensor(shape, dtype) if kind != ItemKind.OBJECT else None)
    return found


_MEMORY = torch.zeros(1 << 16, dtype=torch.uint8)


def _tensor(shape: list[int], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype.removeprefix("torch."))
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    return _MEMORY[: count * kind.itemsize].view(kind).view(shape)


def _as_plain(reads: Reads) -> list[Any]:
    direct = [
        (file, payloads.address.tolist(), payloads.offset.tolist(), payloads.nbytes.tolist())
        for file, payloads in reads.direct_reads()
    ]
    return [
        direct,
        [(one.request, one.file, one.offset, one.length, one.saved) for one in reads.everything()],
    ]
