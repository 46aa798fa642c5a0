"""Files that claim more than they hold are refused in time and memory that their size allows."""

import io
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_mem import DcpMemError, ManifestInvalid, SizeRefused, Transfer, UntrustedMetadata
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import catalog_of
from dcp_mem.format.manifest import (
    FlushRecord,
    Manifest,
    NodeManifest,
    ReplicationRecord,
    Resumes,
    StripeRecord,
)
from dcp_mem.format.metadata import read_metadata
from dcp_mem.format.records import Record
from dcp_mem.format.sizes import refuse_greedy_pickle, refuse_packed_stream
from dcp_mem.memory.exports import ExportRecord, ExportRecords
from dcp_mem.policy.parity import Share, Stripe
from tests.support.checkpoints import hostile

_MOST_BYTES, _MOST_RATIO = 80 << 20, 100
_CASES: list[tuple[Callable[[bytes], Any], str, bytes]] = [
    *((Manifest.from_json, name, data) for name, data in hostile.manifests().items()),
    *((NodeManifest.from_json, name, data) for name, data in hostile.node_manifests().items()),
    *((Catalog.from_bytes, name, data) for name, data in hostile.catalogs().items()),
    *((read_metadata, name, data) for name, data in hostile.pickles().items()),
]


@contextmanager
def little_memory(nbytes: int) -> Iterator[None]:
    """Fail where much more memory than `nbytes` is taken meanwhile."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < _MOST_BYTES + _MOST_RATIO * nbytes


@pytest.mark.parametrize(
    ("parse", "data"),
    [pytest.param(parse, data, id=f"{parse.__qualname__}-{name}") for parse, name, data in _CASES],
)
def test_hostile_files_are_refused_with_little_memory(
    parse: Callable[[bytes], Any], data: bytes
) -> None:
    with (
        little_memory(len(data)),
        pytest.raises((ManifestInvalid, SizeRefused, UntrustedMetadata)),
    ):
        parse(data)


def test_files_that_the_hostile_ones_are_made_of_are_sound() -> None:
    assert Manifest.from_json(hostile.manifest()).nbytes == 8
    assert NodeManifest.from_json(hostile.node_manifest()).node == "n"
    assert read_metadata(hostile.foreign_metadata(4)).storage_data
    assert len(Catalog.from_bytes(hostile.shared_catalog(entries=3)).writer) == 3


# -- fuzzing ---------------------------------------------------------------------------------------

_TEXTS = st.text(max_size=4)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | _TEXTS
    | st.sampled_from([hostile.HUGE, -1, hostile.packed_column(bytes(64))]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value of which one part, at any depth, is another."""
    if not isinstance(value, (dict, list)) or not value or draw(st.integers(0, 3)) == 0:
        return draw(_VALUES)
    changed = dict(value) if isinstance(value, dict) else list(value)
    keys = sorted(changed) if isinstance(changed, dict) else range(len(changed))
    key = draw(st.sampled_from(keys))
    changed[key] = draw(mutated(changed[key]))
    return changed


def _body(file: bytes) -> Any:
    return json.loads(file.partition(b', "body": ')[2][:-1])


@given(mutated(_body(hostile.manifest(metrics={"loss": 1.0}, step=1))))
def test_any_manifest_is_read_or_refused(body: Any) -> None:
    data = hostile.json_file("manifest", json.dumps(body))
    with little_memory(len(data)):
        try:
            found = Manifest.from_json(data)
        except ManifestInvalid:
            return
        assert found.nbytes >= 0
        assert set(found.tails) == set(found.segments.rank)
        assert [one.file for node in found.nodes for one in found.of_node(node)]
        assert Manifest.from_json(found.to_json()) == found or found.created != found.created


_STRIPE = Stripe(keeper=1, nbytes=8, shares=(Share(0, 0, 8, 0),))
_RECORDS: list[Record] = [
    FlushRecord(save_id="0", transfer=Transfer(parts=1)),
    ReplicationRecord(save_id="0"),
    Resumes(),
    StripeRecord("0", _STRIPE, (1, 2)),
    ExportRecords(records=(ExportRecord(name="n", save_id="0", step=1),)),
]


@pytest.mark.parametrize("record", _RECORDS, ids=lambda record: record.form)
@given(st.data())
def test_any_other_record_is_read_or_refused(record: Record, data: st.DataObject) -> None:
    assert type(record).from_json(record.to_json()) == record
    body = json.dumps(data.draw(mutated(_body(record.to_json()))))
    with suppress(ManifestInvalid):
        found = type(record).from_json(hostile.json_file(record.form, body))
        assert json.loads(body).items() <= _body(found.to_json()).items() or "NaN" in body


@pytest.mark.parametrize(
    ("record", "change", "why"),
    [
        (_RECORDS[0], {"attempts": "1"}, "attempts: of type str, not int"),
        (_RECORDS[0], {"transfer": {"parts": True}}, "transfer: parts: of type bool, not int"),
        (_RECORDS[0], {"seconds": 10**400}, "too large"),
        (_RECORDS[0], {"colour": 1}, r"misnames a field \(colour\)"),
        (_RECORDS[3], {"stripe": None}, "stripe: of type NoneType, not fields"),
        (_RECORDS[3], {"crc32c": {}}, "crc32c: of type dict, not list"),
        (_RECORDS[4], {"passed": "1"}, "passed: of type str, not int"),
    ],
)
def test_a_record_with_a_field_of_another_kind_is_refused_by_its_name(
    record: Record, change: dict[str, Any], why: str
) -> None:
    body = json.dumps({**_body(record.to_json()), **change})
    with pytest.raises(ManifestInvalid, match=why):
        type(record).from_json(hostile.json_file(record.form, body))


@given(mutated(_body(hostile.node_manifest())))
def test_any_node_manifest_is_read_or_refused(body: Any) -> None:
    data = hostile.json_file("node", json.dumps(body))
    with little_memory(len(data)):
        try:
            found = NodeManifest.from_json(data)
        except ManifestInvalid:
            return
        for table in found.tables.values():
            assert len(table.offsets) == len(table.lengths)


_SOUND_CATALOGS = (
    catalog_of(read_metadata(hostile.foreign_metadata(4)), []).to_bytes(),
    hostile.shared_catalog(entries=3),
)


@st.composite
def mutated_catalogs(draw: st.DrawFn) -> bytes:
    """A catalog's file with another head, or other bytes in its body, and a right checksum."""
    sound = draw(st.sampled_from(_SOUND_CATALOGS))
    (length,) = struct.unpack_from("<I", sound, 12)
    head = json.loads(sound[16 : 16 + length])
    body = bytearray(sound[16 + length :])
    if draw(st.booleans()):
        changed = draw(mutated(head))
        return hostile.column_file(json.dumps(changed).encode(), bytes(body))
    for _ in range(draw(st.integers(1, 4))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return hostile.column_file(json.dumps(head).encode(), bytes(body))


@given(mutated_catalogs())
def test_any_catalog_is_read_or_refused(data: bytes) -> None:
    with little_memory(len(data)):
        try:
            found = Catalog.from_bytes(data)
        except ManifestInvalid:
            return
        assert len(found.entry_names()) <= len(found.names)
        assert len(found.entry_of_row()) == len(found.writer)


@given(
    st.binary(max_size=64)
    | st.builds(
        lambda start, data: start + data,
        st.just(hostile.foreign_metadata(4)[:-1]),
        st.binary(max_size=16),
    )
)
@example(b"p1\n.")
@example(b"p\n.")
def test_any_pickle_is_read_or_refused(data: bytes) -> None:
    with little_memory(len(data)):
        try:
            refuse_greedy_pickle(data, "it")
            read_metadata(data)
        except DcpMemError:
            return


@pytest.mark.parametrize("protocol", range(6))
def test_sound_pickles_of_any_protocol_are_admitted(protocol: int) -> None:
    values = [list(range(3000)), b"x" * 70_000, "t" * 300, -(1 << 90), 1.5, {"a": (1, None)}, set()]
    for value in (values, values * 2, [str(n) for n in range(3000)]):
        refuse_greedy_pickle(pickle.dumps(value, protocol), "it")


# -- torch.save streams ----------------------------------------------------------------------------


def test_compressed_streams_are_refused_with_little_memory() -> None:
    data = hostile.packed_stream(lambda file: torch.save(bytes(1 << 20), file), copies=64)
    with little_memory(len(data)), pytest.raises(SizeRefused, match=r"object: .* are claimed"):
        refuse_packed_stream(memoryview(data), "object")


@pytest.mark.parametrize("value", [torch.zeros(1000), {"a": [torch.ones(3), "b"]}, None, b"x" * 99])
@pytest.mark.parametrize("is_zip", [True, False])
def test_streams_as_torch_writes_them_are_admitted(value: object, is_zip: bool) -> None:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=is_zip)
    refuse_packed_stream(memoryview(file.getvalue()), "object")


@given(st.binary(max_size=40).map(lambda data: b"PK\x05\x06" + data))
def test_any_stream_is_admitted_or_refused(data: bytes) -> None:
    try:
        refuse_packed_stream(memoryview(data), "object")
    except SizeRefused:
        return


def test_blocks_are_counted_before_they_are_made() -> None:
    table = hostile.node_manifest(lengths=np.array([1 << 49], "<i8").tobytes(), crc32c=b"")
    assert NodeManifest.from_json(table).tables
