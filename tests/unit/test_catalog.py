"""The catalog, as a file, as DCP's pickled metadata and as DCP's objects."""

import collections
import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_mem import ManifestInvalid, UntrustedMetadata
from dcp_mem.format import catalog as catalog_module
from dcp_mem.format import column_file
from dcp_mem.format.catalog import (
    BYTES,
    Catalog,
    Extent,
    Properties,
    Rows,
    catalog_key,
    catalog_of_rows,
)
from dcp_mem.format.catalog_conversion import (
    MetadataNotDescribable,
    RankItems,
    catalog_of,
    metadata_of,
)
from dcp_mem.format.checksums import checksum
from dcp_mem.format.layout import Layout, layout_of
from dcp_mem.format.metadata import read_metadata, with_storage
from dcp_mem.format.metadata_template import template_of
from dcp_mem.format.names import segment_file
from dcp_mem.format.shared_runs import Runs
from dcp_mem.format.torch_names import properties
from tests.support.checkpoints.roundtrip import properties_of
from tests.support.variants import examples

SEEDS = st.integers(0, 2**32 - 1)
SAVE_ID = "0123abcd"
Tails = Mapping[int, Sequence[Extent]]
Storage = dict[MetadataIndex, _StorageInfo]
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.quint4x2, torch.quint2x4},
    key=str,
)
LAYOUTS = (torch.strided, torch.strided, torch.sparse_coo, torch.sparse_csr)
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
ODD_PLANNER_DATA: list[Any] = [
    5,
    "text",
    (1, 2),
    {"a": ["a"]},
    {1: ("a",)},
    {"a": (1.5,)},
    {"a": (True,)},
    collections.OrderedDict(a=("a",)),
    {"set": {1, 2}, "none": None, "long": 1 << 3000},
    [{"same": "same"}] * 3,
    [[str(number)] for number in range(300)],
]

# -- random catalogs -------------------------------------------------------------------------------


def _random_catalog(random: Random) -> tuple[Catalog, Tails]:
    """Any catalog that means something, and tails that go with it."""
    names = list({_random_name(random): None for _ in range(random.randint(0, 8))})
    random.shuffle(names)
    width = random.randint(0, 4)
    table = list({_random_properties(random): None for _ in range(random.randint(1, 3))})
    ranks = sorted(random.sample([*range(5), 1000, 1 << 20], random.randint(1, 4)))
    items = [0] * len(ranks)
    entries, rows, first = [], [], [0]
    largest = random.choice([3, 300, 70_000, 1 << 33, 1 << 60])
    for name in random.sample(range(len(names)), random.randint(0, len(names))):
        kind = random.randrange(-1, len(table))
        dimensions = random.randint(0, width) if kind >= 0 else 0
        offsets = {
            tuple(random.randint(0, largest) for _ in range(dimensions))
            for _ in range(random.randint(0, 4))
        }
        for offset in sorted(offsets) if kind >= 0 else [()]:
            writer = random.randrange(-1, len(ranks))
            if writer >= 0:
                # Now and then an item of this rank is skipped: another rank has written it again.
                items[writer] += random.choice([1, 1, 2])
            number = items[writer] - 1 if writer >= 0 else -1
            rows.append((_random_box(random, offset, largest, width), writer, number))
        size = [random.randint(0, largest) for _ in range(dimensions)]
        entries.append((name, kind, dimensions, size + [1] * (width - dimensions)))
        first.append(len(rows))
    layouts = [_layout(random, random.randint(0, 4)) for _ in range(random.randint(1, 3))]
    layout_of = [random.randrange(len(layouts)) for _ in ranks]
    tails = {
        rank: [(random.randint(0, 2**63 - 1), random.randint(0, 2**63 - 1)) for _ in range(count)]
        for rank, count in zip(ranks, items, strict=True)
    }
    planner_pickle = (
        pickle.dumps(random.choice(ODD_PLANNER_DATA), 3) if random.random() < 0.2 else b""
    )
    has_paths = not planner_pickle and random.random() < 0.8
    boxes = [row[0] for row in rows]
    return catalog_of_rows(
        Rows(
            first=np.array(first, np.int64),
            offset=np.array([offset for offset, _ in boxes], np.int64).reshape(len(rows), width),
            extent=np.array([extent for _, extent in boxes], np.int64).reshape(len(rows), width),
            writer=np.array([row[1] for row in rows], np.int64),
            number=np.array([row[2] for row in rows], np.int64),
        ),
        names=names,
        paths=[_random_path(random, name) for name in names] if has_paths else None,
        table=table,
        name=np.array([entry[0] for entry in entries], np.int64),
        properties=np.array([entry[1] for entry in entries], np.int64),
        dimensions=np.array([entry[2] for entry in entries], np.int64),
        size=np.array([entry[3] for entry in entries], np.int64).reshape(len(entries), width),
        ranks=np.array(ranks, np.int64),
        layout_of=np.array(layout_of, np.int64),
        layouts=layouts,
        planner_pickle=planner_pickle,
    ), tails


def _random_box(
    random: Random, offset: Sequence[int], largest: int, width: int
) -> tuple[list[int], list[int]]:
    padding = width - len(offset)
    extent = [random.choice([0, 1, random.randint(0, largest)]) for _ in offset]
    return [*offset] + [0] * padding, extent + [1] * padding


def _random_name(random: Random) -> str:
    parts = [
        "a",
        "layers",
        "0",
        "1",
        "12",
        "007",
        "-3",
        "",
        "ü",
        "\N{SNOWMAN}",
        "\U0001f600",
        "\ud800",
        "\udc00",
        "x.y",
        "\n",
    ]
    return ".".join(random.choice(parts) for _ in range(random.randint(1, 4)))


def _random_path(random: Random, name: str) -> tuple[str | int, ...] | None:
    chosen = random.random()
    if chosen < 0.1:
        return None
    if chosen < 0.2:
        return random.choice([(), ("other", 5), (1 << 70, "\ud800", "\udc00"), (name, name), ("",)])
    parts = name.split(".", random.choice([0, 1, -1]))
    return tuple(
        int(part) if part.isdecimal() and str(int(part)) == part and random.random() < 0.7 else part
        for part in parts
    )


def _random_properties(random: Random) -> Properties:
    return properties(
        random.choice(DTYPES),
        random.choice(LAYOUTS),
        random.random() < 0.5,
        random.random() < 0.5,
        random.choice(MEMORY_FORMATS),
    )


def _layout(random: Random, items: int) -> Layout:
    step = random.choice([64, 1 << 31, 1 << 40])
    offsets = np.arange(items, dtype=np.int64) * step
    payloads = offsets + 16 if random.random() < 0.5 else np.full(items, -1, np.int64)
    return layout_of(
        np.stack([offsets, np.full(items, 48, np.int64), payloads, np.full(items, 32, np.int64)])
    )


def _assert_same(found: Catalog, expected: Catalog) -> None:
    rows = ("first", "offset", "extent", "writer", "number")
    for name in (*rows, *(field.name for field in dataclasses.fields(Catalog))):
        one, other = getattr(found, name), getattr(expected, name)
        if isinstance(other, Runs):
            continue
        if isinstance(other, np.ndarray):
            assert one.dtype == np.int64, name
            assert one.shape == other.shape, name
            assert np.array_equal(one, other), name
        elif name == "layouts":
            assert [(layout.key, layout.nbytes) for layout in one] == [
                (layout.key, layout.nbytes) for layout in other
            ]
            assert [layout.key for layout in one] == [layout.key for layout in other]
        elif name == "planner_pickle" or other is None:
            assert one == other, name
        else:
            assert list(one) == list(other), name
    if found.paths is not None and expected.paths is not None:
        for path, other_path in zip(found.paths, expected.paths, strict=True):
            assert list(map(type, path or ())) == list(map(type, other_path or ()))


# -- as a file -------------------------------------------------------------------------------------


@settings(max_examples=examples(300))
@given(SEEDS)
def test_a_catalog_survives_being_written_down(seed: int) -> None:
    catalog, _ = _random_catalog(Random(seed))
    data = catalog.to_bytes()
    found = Catalog.from_bytes(data)
    _assert_same(found, catalog)
    assert found.to_bytes() == data
    assert catalog_key(found.to_bytes()) == catalog_key(data)


@settings(max_examples=examples(300))
@given(SEEDS, st.data())
def test_a_damaged_catalog_is_refused(seed: int, data: st.DataObject) -> None:
    written = bytearray(_random_catalog(Random(seed))[0].to_bytes())
    position = data.draw(st.integers(0, len(written) - 1))
    change = data.draw(st.sampled_from(["flip", "cut", "insert", "append"]))
    if change == "flip":
        written[position] ^= data.draw(st.integers(1, 255))
    elif change == "cut":
        del written[position:]
    elif change == "insert":
        written.insert(position, data.draw(st.integers(0, 255)))
    else:
        written += bytes(position + 1)
    with pytest.raises(ManifestInvalid):
        Catalog.from_bytes(bytes(written))


@pytest.mark.random
def test_a_foreign_catalog_with_a_right_checksum_is_refused_or_fits_together() -> None:
    accepted: list[bool] = []

    @settings(max_examples=examples(300))
    @given(SEEDS, st.data())
    def read_what_was_changed(seed: int, data: st.DataObject) -> None:
        catalog, tails = _random_catalog(Random(seed))
        written = bytearray(catalog.to_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            written[data.draw(st.integers(12, len(written) - 1))] = data.draw(st.integers(0, 255))
        written[8:12] = checksum(memoryview(written)[12:]).to_bytes(4, "little")
        try:
            found = Catalog.from_bytes(bytes(written))
            list(found.paths or ())
            rendered = template_of(found).render(SAVE_ID, tails)
            metadata = metadata_of(found, SAVE_ID, tails)
        except (ManifestInvalid, UntrustedMetadata):
            accepted.append(False)
        else:
            accepted.append(True)
            assert pickle.loads(rendered) == metadata
            _assert_same(Catalog.from_bytes(found.to_bytes()), found)

    read_what_was_changed()
    assert set(accepted) == {False, True}


@pytest.mark.parametrize(
    "data", [b"", b"dcpmemC1", b"x" * 100, bytes(1000), b"dcpmemL1" + bytes(64)], ids=repr
)
def test_what_is_no_catalog_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        Catalog.from_bytes(data)


def test_a_catalog_of_a_later_version_asks_for_a_newer_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog, _ = _random_catalog(Random(1))
    with monkeypatch.context() as patch:
        patch.setattr(catalog_module, "VERSION", catalog_module.VERSION + 1)
        data = catalog.to_bytes()
    with pytest.raises(ManifestInvalid, match="use the dcp_mem that wrote it"):
        Catalog.from_bytes(data)


def _small(change: Callable[[dict[str, Any]], None] = lambda _: None) -> Catalog:
    """Make a catalog of two tensors, one in two chunks, and a byte item; one layout of two."""
    layout = layout_of(np.array([[0, 64], [60, 60], [8, 72], [40, 40]], np.int64))
    facts: dict[str, Any] = {
        "names": ("a", "b", "c"),
        "paths": [("a",), ("b",), ("c",)],
        "table": (properties(torch.float32, torch.strided, False, False),),
        "name": np.array([0, 1, 2]),
        "properties": np.array([0, 0, BYTES]),
        "dimensions": np.array([1, 2, 0]),
        "size": np.array([[4, 1], [2, 2], [1, 1]]),
        "first": np.array([0, 2, 3, 4]),
        "offset": np.array([[0, 0], [2, 0], [0, 0], [0, 0]]),
        "extent": np.array([[2, 1], [2, 1], [2, 2], [1, 1]]),
        "writer": np.array([0, 1, 0, 0]),
        "number": np.array([0, 0, 1, 2]),
        "ranks": np.array([0, 1]),
        "layout_of": np.array([0, 0]),
        "layouts": (layout,),
    }
    change(facts)
    rows = {name: facts.pop(name) for name in ("first", "offset", "extent", "writer", "number")}
    return catalog_of_rows(Rows(**rows), **facts)


def _at(column: str, position: Any, value: int) -> Callable[[dict[str, Any]], None]:
    def change(facts: dict[str, Any]) -> None:
        facts[column][position] = value

    return change


CONTRADICTIONS = {
    "a name out of range": _at("name", 0, 3),
    "a negative name": _at("name", 0, -1),
    "an entry twice": _at("name", 0, 1),
    "properties out of range": _at("properties", 0, 1),
    "an unknown kind": _at("properties", 0, -4),
    "too many dimensions": _at("dimensions", 0, 3),
    "negative dimensions": _at("dimensions", 0, -1),
    "a byte item of dimensions": _at("dimensions", 2, 1),
    "a byte item of two rows": _at("first", 2, 2),
    "rows out of order": _at("offset", (0, 0), 3),
    "a negative size": _at("size", (0, 0), -1),
    "a negative offset": _at("offset", (0, 0), -1),
    "a huge extent": _at("extent", (0, 0), 1 << 62),
    "a writer out of range": _at("writer", 0, 2),
    "a negative writer": _at("writer", 0, -2),
    "an item without a number": _at("number", 0, -1),
    "a negative rank": _at("ranks", 0, -1),
    "a rank twice": _at("ranks", 0, 1),
    "a layout out of range": _at("layout_of", 0, 1),
    "a negative layout": _at("layout_of", 0, -1),
    "a name twice": lambda facts: facts.update(names=("a", "b", "a")),
    "fewer paths than names": lambda facts: facts.update(names=("a", "b", "c", "d")),
    "two kinds of planner data": lambda facts: facts.update(planner_pickle=b"N."),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_catalog_that_contradicts_itself_is_neither_made_nor_read(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_same(Catalog.from_bytes(_small().to_bytes()), _small())
    with pytest.raises(ManifestInvalid):
        _small(CONTRADICTIONS[what])
    if "paths" in what:
        return  # can't be written down at all
    with monkeypatch.context() as patch:
        patch.setattr(catalog_module, "_refuse_contradictions", lambda _: None)
        data = _small(CONTRADICTIONS[what]).to_bytes()
    with pytest.raises(ManifestInvalid):
        Catalog.from_bytes(data)


@pytest.mark.parametrize(
    ("row", "value"), [(0, -1), (1, -1), (2, -2), (3, -1), (2, 30), (3, 60), (1, 1 << 62)], ids=str
)
def test_a_layout_whose_items_reach_out_is_refused(row: int, value: int) -> None:
    columns = np.array([[0, 64], [60, 60], [8, 72], [40, 40]], np.int64)
    columns[row, 0] = value
    data = dataclasses.replace(_small(), layouts=(layout_of(columns),)).to_bytes()
    with pytest.raises(ManifestInvalid):
        Catalog.from_bytes(data)


@pytest.mark.parametrize(("column", "row"), [("sides", 1), ("sides", 2), ("entries", 3)])
@pytest.mark.parametrize("value", [99, -1, [2, 0, 1]], ids=str)
def test_runs_that_do_not_fit_are_refused(column: str, row: int, value: Any) -> None:
    with pytest.raises(ManifestInvalid, match="runs"):
        _changed_file(column, lambda found: found[row].T.__setitem__(..., value))


@pytest.mark.parametrize("column", ["entries", "sides", "segments", "items", "boxes", "places"])
@pytest.mark.parametrize("cut", [np.s_[:-1], np.s_[:, :-1], np.s_[0]], ids=str)
def test_columns_of_other_shapes_are_refused(column: str, cut: Any) -> None:
    with pytest.raises(ManifestInvalid):
        _changed_file(column, lambda found: found[cut])


def _changed_file(column: str, change: Callable[[Any], Any]) -> Catalog:
    """Read the file of a catalog one of whose columns is changed, in place or to what is returned.

    Each column is changed in the file alone: its checksum is right.
    """
    packed = column_file.unpack(_small().to_bytes(), catalog_module.VERSION)
    changed = change(packed.columns[column])
    columns = packed.columns if changed is None else {**packed.columns, column: changed}
    data = column_file.pack(dataclasses.replace(packed, columns=columns), catalog_module.VERSION)
    return Catalog.from_bytes(data)


# -- as DCP's pickle and DCP's objects -------------------------------------------------------------


class _InPython(pickle._Unpickler):
    """The unpickler that is written in Python, which notices more than the one in C."""


@settings(max_examples=examples(300))
@given(SEEDS)
def test_what_is_rendered_unpickles_to_the_metadata_of_the_catalog(seed: int) -> None:
    catalog, tails = _random_catalog(Random(seed))
    rendered = template_of(Catalog.from_bytes(catalog.to_bytes())).render(SAVE_ID, tails)
    expected = metadata_of(catalog, SAVE_ID, tails)
    for found in (
        pickle.loads(rendered),
        _InPython(io.BytesIO(rendered)).load(),
        read_metadata(rendered),
    ):
        assert type(found) is Metadata
        assert found == expected
        assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
        assert pickle.dumps(found)
        assert _types_of(found) == _types_of(expected)


def _types_of(metadata: Metadata) -> set[type]:
    """Types of what is equal to things of other types, too."""
    tensors = [
        one
        for one in metadata.state_dict_metadata.values()
        if isinstance(one, TensorStorageMetadata)
    ]
    chunks = [chunk for one in tensors for chunk in one.chunks]
    paths = list(metadata.planner_data.values()) if type(metadata.planner_data) is dict else []
    return {
        *(type(part) for path in paths if type(path) is tuple for part in path),
        *(type(one.size) for one in tensors),
        *(type(chunk.offsets) for chunk in chunks),
        *(type(chunk.sizes) for chunk in chunks),
        *(type(index.offset) for index in metadata.storage_data),
    }


def test_entries_may_be_named_like_what_torch_and_the_pickle_name() -> None:
    for names in (("size", "offset", "fqn"), ("N", "Metadata", "torch"), ("torch.Size", "", "c")):
        catalog = dataclasses.replace(_small(), names=names, paths=[(name,) for name in names])
        found = pickle.loads(template_of(catalog).render(SAVE_ID, {0: [(1, 2)]}))
        assert tuple(found.state_dict_metadata) == names
        assert found == metadata_of(catalog, SAVE_ID, {0: [(1, 2)]})


@pytest.mark.parametrize("tails", [{}, {0: []}, {1: [(1, 2)]}], ids=repr)
def test_a_manifest_that_lacks_an_item_of_the_tail_is_refused(tails: Tails) -> None:
    with pytest.raises(ManifestInvalid, match="aren't of one save"):
        template_of(_small()).render(SAVE_ID, tails)
    with pytest.raises(ManifestInvalid, match="aren't of one save"):
        metadata_of(_small(), SAVE_ID, tails)


@pytest.mark.parametrize("save_id", ["", "abc", "0123456789", "äöüß1"])
def test_a_save_id_of_another_length_is_refused(save_id: str) -> None:
    with pytest.raises(ValueError, match="save id"):
        template_of(_small()).render(save_id, {0: [(1, 2)]})


def test_names_that_look_like_the_placeholder_are_left_alone() -> None:
    names = ("00000000", "__0_0-00000000.distcp", "c")
    catalog = dataclasses.replace(
        _small(), names=names, paths=[(name,) for name in names], ranks=np.array([0, 10**8])
    )
    found = pickle.loads(template_of(catalog).render(SAVE_ID, {0: [(1, 2)]}))
    assert tuple(found.state_dict_metadata) == names
    assert found.storage_data[MetadataIndex(names[0], [2])].relative_path == segment_file(
        10**8, SAVE_ID
    )


@pytest.mark.parametrize("data", ODD_PLANNER_DATA, ids=lambda data: repr(data)[:20])
def test_planner_data_of_a_planner_of_ones_own_is_taken_along(data: Any) -> None:
    catalog = dataclasses.replace(_small(), paths=None, planner_pickle=pickle.dumps(data, 3))
    found = pickle.loads(template_of(catalog).render(SAVE_ID, {0: [(1, 2)]}))
    assert found.planner_data == data
    assert found == metadata_of(catalog, SAVE_ID, {0: [(1, 2)]})


class _Touches:
    def __init__(self, file: FilePath) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._file}",)


def test_planner_data_that_would_do_something_is_refused(tmp_path: FilePath) -> None:
    catalog = dataclasses.replace(
        _small(), paths=None, planner_pickle=pickle.dumps(_Touches(tmp_path / "mark"), 3)
    )
    with pytest.raises(UntrustedMetadata, match="system"):
        metadata_of(catalog, SAVE_ID, {0: [(1, 2)]})
    with pytest.raises(UntrustedMetadata, match="system"):
        read_metadata(template_of(catalog).render(SAVE_ID, {0: [(1, 2)]}))
    assert not list(tmp_path.iterdir())


def test_planner_data_that_is_no_pickle_is_refused() -> None:
    cut, framed = pickle.dumps([1, 2, 3], 3)[:-1], pickle.dumps([1, 2, 3], 4)
    for damaged in (b"x", b"\x80\x03N", cut, framed, pickle.dumps({1}, 2), b"N."):
        with pytest.raises(ManifestInvalid):
            template_of(dataclasses.replace(_small(), paths=None, planner_pickle=damaged))


# -- the catalog of metadata that torch made -------------------------------------------------------


def _random_state(random: Random, depth: int = 2) -> dict[str, Any]:
    return {
        random.choice(["a", "b.c", "ü", "w", "x"]) + str(i): _random_value(random, depth)
        for i in range(3)
    }


def _random_value(random: Random, depth: int) -> Any:
    chosen = random.choice(["tensor", "tensor", "object", "list", "dict"][: 3 if not depth else 5])
    if chosen == "tensor":
        shape = [random.randint(0, 3) for _ in range(random.randint(0, 4))]
        dtypes = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool)
        return torch.zeros(shape, dtype=random.choice(dtypes))
    if chosen == "object":
        return random.choice([1, "text", None, [1, 2], {3}])
    if chosen == "list":
        return [_random_value(random, depth - 1), torch.zeros(1), _random_value(random, depth - 1)]
    return _random_state(random, depth - 1)


def _planned(random: Random) -> tuple[list[SavePlan], Metadata]:
    """Plan random state dicts, and shards, with torch's planners; ranks share some entries."""
    shared, ranks = _random_state(random), random.randint(1, 3)
    planners, plans = [], []
    cuts = sorted(random.randint(0, 8) for _ in range(ranks - 1))
    for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, 8], strict=True)):
        planner = DefaultSavePlanner()
        planner.set_up_planner(
            {**shared, f"own{rank}": _random_value(random, 1)}, is_coordinator=rank == 0
        )
        plan = planner.create_local_plan()
        chunk = ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([stop - start, 5]))
        data = TensorWriteData(chunk, TensorProperties(torch.float16), torch.Size([8, 5]))
        if stop > start:
            shard = WriteItem(
                MetadataIndex("shards", chunk.offsets), WriteItemType.SHARD, tensor_data=data
            )
            plan = dataclasses.replace(plan, items=[*plan.items, shard])
        planners.append(planner)
        plans.append(plan)
    plans, metadata = planners[0].create_global_plan(plans)
    return plans, metadata


def _rank_items(
    random: Random, ranks: Sequence[Sequence[MetadataIndex]]
) -> tuple[list[RankItems], Tails]:
    """Some of each rank's items in a layout, and the others in its tail."""
    items, tails = [], {}
    for rank, indexes in enumerate(ranks):
        fixed = random.randint(0, len(indexes))
        items.append(RankItems(rank, indexes, _layout(random, fixed)))
        tails[rank] = [(random.randint(0, 1 << 50), random.randint(0, 99)) for _ in indexes[fixed:]]
    return items, tails


def _storage_data(items: Sequence[RankItems], tails: Tails) -> Storage:
    found: Storage = {}
    for one in items:
        extents = [
            *zip(one.layout.offsets.tolist(), one.layout.lengths.tolist(), strict=True),
            *tails[one.rank],
        ]
        for index, (offset, length) in zip(one.indexes, extents, strict=True):
            found[index] = _StorageInfo(segment_file(one.rank, SAVE_ID), offset, length)
    return found


def _assert_same_content(found: Metadata, expected: Metadata) -> None:
    """Equal, but that chunks may be in another order."""
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    for name, known in expected.state_dict_metadata.items():
        one = found.state_dict_metadata[name]
        assert type(one) is type(known)
        if isinstance(one, TensorStorageMetadata) and isinstance(known, TensorStorageMetadata):
            assert (properties_of(one), one.size) == (properties_of(known), known.size)
            places = [
                {(chunk.offsets, chunk.sizes) for chunk in each.chunks} for each in (one, known)
            ]
            assert places[0] == places[1]
    assert found.planner_data == expected.planner_data
    assert found.storage_data == expected.storage_data
    assert found.storage_meta == expected.storage_meta
    assert dataclasses.fields(found) == dataclasses.fields(expected)
    # Metadata of torch 2.6 has no version.
    assert getattr(found, "version", "1.0.0") == getattr(expected, "version", "1.0.0")


def _assert_describes(metadata: Metadata, items: Sequence[RankItems], tails: Tails) -> Catalog:
    expected = with_storage(metadata, _storage_data(items, tails), SAVE_ID)
    catalog = catalog_of(metadata, items)
    read = Catalog.from_bytes(catalog.to_bytes())
    _assert_same(read, catalog)
    _assert_same_content(metadata_of(read, SAVE_ID, tails), expected)
    _assert_same_content(pickle.loads(template_of(read).render(SAVE_ID, tails)), expected)
    return catalog


@settings(max_examples=examples(200))
@given(SEEDS)
def test_metadata_that_torch_made_comes_back_from_its_catalog(seed: int) -> None:
    random = Random(seed)
    plans, metadata = _planned(random)
    catalog = _assert_describes(
        metadata, *_rank_items(random, [[item.index for item in p.items] for p in plans])
    )
    assert not catalog.planner_pickle
    assert (catalog.properties >= BYTES).all()


def _tensor(
    size: Sequence[int], *boxes: tuple[Sequence[int], Sequence[int]]
) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offset), torch.Size(extent)) for offset, extent in boxes
    ]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)


def test_an_item_that_two_ranks_write_is_where_the_last_one_has_it() -> None:
    metadata = Metadata({"a": _tensor([4], ([0], [4])), "b": BytesStorageMetadata()})
    indexes = [MetadataIndex("a", [0]), MetadataIndex("b")]
    items, tails = _rank_items(Random(3), [indexes, indexes[:1], []])
    catalog = _assert_describes(metadata, items, tails)
    assert catalog.ranks[catalog.writer].tolist() == [1, 0]


def test_a_chunk_that_nobody_writes_has_no_place() -> None:
    metadata = Metadata(
        {"a": _tensor([4], ([2], [2]), ([0], [2])), "b": BytesStorageMetadata(), "c": _tensor([1])}
    )
    catalog = _assert_describes(metadata, *_rank_items(Random(3), [[MetadataIndex("a", [2])]]))
    assert catalog.writer.tolist() == [-1, 0, -1]
    assert catalog.offset.tolist() == [[0], [2], [0]]


def test_what_is_written_but_not_in_the_metadata_can_be_found_all_the_same() -> None:
    metadata = Metadata({"a": _tensor([4], ([0], [4]))}, planner_data={"a": ("a",)})
    others = [
        MetadataIndex("a", [1]),
        MetadataIndex("a"),
        MetadataIndex("a", [0, 0]),
        MetadataIndex("x", []),
        MetadataIndex("x"),
        MetadataIndex("a", [0]),
        MetadataIndex("x", [3, 2]),
        MetadataIndex("x", [1, 2]),
    ]
    for seed in range(20):
        _assert_describes(metadata, *_rank_items(Random(seed), [others[:5], others[5:]]))


def test_a_chunk_that_occurs_twice_is_there_once_and_one_of_two_sizes_has_a_place() -> None:
    metadata = Metadata(
        {"a": _tensor([4], ([0], [4]), ([0], [4])), "b": _tensor([4], ([0], [3]), ([0], [4]))}
    )
    indexes = [MetadataIndex("a", [0]), MetadataIndex("b", [0])]
    catalog = _assert_describes(metadata, *_rank_items(Random(3), [indexes]))
    assert np.diff(catalog.first).tolist() == [1, 2]


@pytest.mark.parametrize(
    "planner_data",
    [None, {}, {"a": ("a",)}, {"b": ("x", 1)}, {"a": ()}, *ODD_PLANNER_DATA],
    ids=lambda data: repr(data)[:40],
)
def test_planner_data_is_said_as_paths_where_it_can_be(planner_data: Any) -> None:
    metadata = Metadata(
        {"a": _tensor([4], ([0], [4])), "c": BytesStorageMetadata()}, planner_data=planner_data
    )
    catalog = _assert_describes(metadata, *_rank_items(Random(3), [[MetadataIndex("a", [0])]]))
    assert bool(catalog.planner_pickle) == any(planner_data is odd for odd in ODD_PLANNER_DATA)
    found = metadata_of(catalog, SAVE_ID, {0: [(0, 0)]}).planner_data
    assert type(found) is type(planner_data)


@pytest.mark.parametrize(
    "described",
    [
        {"a": 5},
        {5: BytesStorageMetadata()},
        {"a": _tensor([4], ([0, 0], [4, 4]))},
        {"a": TensorStorageMetadata(TensorProperties("float32"), torch.Size([1]), [])},  # type: ignore[arg-type]
        {
            "a": TensorStorageMetadata(
                TensorProperties(memory_format=torch.channels_last_3d), torch.Size([1]), []
            )
        },
    ],
    ids=[
        "no storage metadata",
        "a number as name",
        "other dimensions",
        "no dtype",
        "a memory format DCP can't pickle",
    ],
)
def test_metadata_that_a_catalog_cannot_say_is_refused_by_name(described: Any) -> None:
    with pytest.raises(MetadataNotDescribable):
        catalog_of(Metadata(described), [])


def test_torch_loads_its_own_checkpoint_by_metadata_that_we_rendered(tmp_path: FilePath) -> None:
    state = {
        "a": torch.randn(3, 4),
        "nested": {"b": [1, torch.arange(5)], "c": "text"},
        "empty": torch.zeros(0, 2),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    written = dcp.FileSystemReader(tmp_path).read_metadata()
    (file,) = tmp_path.glob("*.distcp")
    file.rename(tmp_path / segment_file(0, SAVE_ID))
    stored = sorted(written.storage_data.items(), key=lambda each: int(each[1].offset))
    extents = [(info.offset, info.length) for _, info in stored]
    fixed = len(stored) // 2
    columns = np.array([[*extent, -1, 0] for extent in extents[:fixed]], np.int64).T
    catalog = catalog_of(
        written, [RankItems(0, [index for index, _ in stored], layout_of(columns))]
    )
    (tmp_path / ".metadata").write_bytes(template_of(catalog).render(SAVE_ID, {0: extents[fixed:]}))
    loaded = {
        "a": torch.zeros(3, 4),
        "nested": {"b": [0, torch.zeros(5, dtype=torch.int64)], "c": ""},
        "empty": torch.zeros(0, 2),
    }
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(loaded["a"], state["a"])  # type: ignore[arg-type]
    assert loaded["nested"]["c"] == "text"  # type: ignore[index]
    assert torch.equal(loaded["nested"]["b"][1], torch.arange(5))  # type: ignore[index]


def test_a_dtype_that_this_torch_lacks_is_named() -> None:
    data = bytearray(_small().to_bytes().replace(b"torch.float32", b"torch.float77"))
    data[8:12] = checksum(memoryview(data)[12:]).to_bytes(4, "little")
    with pytest.raises(ManifestInvalid, match=r"torch\.float77.*use a newer one"):
        metadata_of(Catalog.from_bytes(bytes(data)), SAVE_ID, {0: [(1, 2)]})
