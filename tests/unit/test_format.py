"""What the bytes mean: frames, layouts, manifests, checksums, names, and untrusted metadata."""

import collections
import enum
import io
import itertools
import json
import os
import pathlib
import pickle
import resource
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from xxhash import xxh3_128

import dcp_mem.format.checksums
from dcp_mem import DcpMemError, ManifestInvalid, SizeRefused, UntrustedMetadata
from dcp_mem.common.values import Segment, Transfer
from dcp_mem.format import names
from dcp_mem.format.checksums import (
    BlockChecksums,
    block_count,
    blocks_of,
    checksum,
    combined,
    hasher,
)
from dcp_mem.format.frames import QUANTISED, Spec, frame, frame_pieces, frames_key, lay_out
from dcp_mem.format.layout import ALIGNMENT
from dcp_mem.format.manifest import (
    FlushRecord,
    ItemTable,
    Manifest,
    NodeManifest,
    StoredParts,
)
from dcp_mem.format.metadata import read_metadata
from dcp_mem.format.records import VERSION, facts_of
from dcp_mem.format.segments import Segments
from tests.support.checkpoints.manifests import make_manifest, of_four_ranks
from tests.support.checkpoints.roundtrip import bits, random_tensor
from tests.support.variants import examples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

# -- frames ----------------------------------------------------------------------------------------

DTYPES = [
    dtype
    for dtype in sorted(
        {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
    )
    if dtype not in QUANTISED
    and str(dtype)[len("torch.") :].strip("1234567") not in ("int", "uint")
]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SPECS = st.tuples(st.sampled_from(DTYPES), SHAPES.map(torch.Size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_frame_around_a_payload_is_what_torch_loads(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (1,), (7, 3), (2, 0, 3), (1, 1, 1, 1), (10_000,)]:
        tensor = random_tensor(dtype, *shape)
        made = frame(dtype, shape)
        assert made.payload_nbytes == tensor.nbytes
        assert made.nbytes == len(made.head) + made.payload_nbytes + len(made.tail)
        assert len(made.head) % ALIGNMENT == 0 or not tensor.nbytes, (
            "the payload must lie at an aligned offset"
        )
        stream = made.head + bits(tensor) + made.tail
        for weights_only in (True, False):
            loaded = torch.load(io.BytesIO(stream), weights_only=weights_only)
            assert (loaded.dtype, loaded.shape) == (dtype, torch.Size(shape))
            assert loaded.is_contiguous()
            assert not loaded.requires_grad
            assert bits(loaded) == bits(tensor)


def test_a_frame_does_not_depend_on_values() -> None:
    frame.cache_clear()
    first = frame(torch.float32, (100, 7))
    frame.cache_clear()
    assert frame(torch.float32, (100, 7)) == first


@pytest.mark.parametrize("nbytes", [(4 << 30) - 1, 4 << 30, (4 << 30) + 1, (8 << 30) + 7])
def test_a_frame_of_a_huge_tensor_takes_no_memory(nbytes: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = frame(torch.uint8, (nbytes,))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert made.payload_nbytes == nbytes
    assert len(made.head) + len(made.tail) < 4096


# -- layouts ---------------------------------------------------------------------------------------


@given(st.lists(SPECS, max_size=12))
def test_items_of_a_layout_are_aligned_and_do_not_overlap(specs: list[Spec]) -> None:
    layout = lay_out(specs)
    assert len(layout) == len(specs)
    end = 0
    for offset, length, payload, nbytes, (dtype, shape) in zip(
        layout.offsets,
        layout.lengths,
        layout.payload_offsets,
        layout.payload_nbytes,
        specs,
        strict=True,
    ):
        assert offset % ALIGNMENT == 0
        assert offset >= end
        assert offset <= payload
        assert payload + nbytes <= offset + length
        assert nbytes == torch.empty(shape, dtype=dtype).nbytes
        assert payload % ALIGNMENT == 0 or not nbytes
        end = offset + length
    assert layout.nbytes >= end
    assert layout.nbytes % ALIGNMENT == 0


@given(st.lists(SPECS, min_size=1, max_size=12))
def test_frames_and_payloads_fill_every_byte_of_a_layout(specs: list[Spec]) -> None:
    layout = lay_out(specs)
    written = np.zeros(layout.nbytes, dtype=int)
    segment = bytearray(layout.nbytes)
    for offset, piece in frame_pieces(layout, specs):
        written[offset : offset + len(piece)] += 1
        segment[offset : offset + len(piece)] = piece
    tensors = [random_tensor(dtype, *shape, seed=i) for i, (dtype, shape) in enumerate(specs)]
    for tensor, offset, nbytes in zip(
        tensors, layout.payload_offsets, layout.payload_nbytes, strict=True
    ):
        written[offset : offset + nbytes] += 1
        segment[offset : offset + nbytes] = bits(tensor)
    assert (written == 1).all()  # what lies between items, too: a slot may have held other bytes
    for tensor, offset, length in zip(tensors, layout.offsets, layout.lengths, strict=True):
        loaded = torch.load(io.BytesIO(segment[offset : offset + length]), weights_only=True)
        assert (loaded.dtype, loaded.shape, bits(loaded)) == (
            tensor.dtype,
            tensor.shape,
            bits(tensor),
        )


@given(st.lists(SPECS, max_size=6), st.lists(SPECS, max_size=6))
def test_frames_have_the_same_key_only_if_they_are_the_same(
    one: list[Spec], other: list[Spec]
) -> None:
    assert (frames_key(one) == frames_key(other)) == (one == other)


def test_shapes_that_lie_at_the_same_offsets_have_frames_of_their_own() -> None:
    wide, tall = [(torch.float32, torch.Size([1, 2]))], [(torch.float32, torch.Size([2, 1]))]
    # The columns are equal, because they hold no shapes.
    assert lay_out(wide).key == lay_out(tall).key
    assert frames_key(wide) != frames_key(tall)


@given(st.lists(SPECS, min_size=1, max_size=8), st.data())
def test_a_description_hides_payloads_that_are_not_as_planned(
    specs: list[Spec], data: st.DataObject
) -> None:
    plain = data.draw(st.lists(st.booleans(), min_size=len(specs), max_size=len(specs)))
    layout = lay_out(specs)
    described = layout.with_payloads_where(plain)
    assert np.array_equal(described.offsets, layout.offsets)
    for shown, offset, described_offset in zip(
        plain, layout.payload_offsets, described.payload_offsets, strict=True
    ):
        assert described_offset == (offset if shown else -1)
    assert (described.key == layout.key) == all(plain)


# -- checksums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@given(stream=st.binary(max_size=300), data=st.data())
def test_checksums_of_blocks_do_not_depend_on_how_the_bytes_pass_by(
    stream: bytes, data: st.DataObject, block: int
) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    items = list(zip(edges[::2], edges[1::2], strict=False))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8))), len(stream)]
    offsets, lengths = [start for start, _ in items], [stop - start for start, stop in items]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.format.checksums, "BLOCK", block)
        blocks = blocks_of(np.array(offsets, dtype=np.int64), np.array(lengths, dtype=np.int64))
        checksums = BlockChecksums(blocks)
        for start, stop in data.draw(st.permutations(list(itertools.pairwise(cuts)))):
            hashed = hasher()
            assert checksums.add(start, memoryview(stream)[start:stop], hashed) == crc32c(
                stream[start:stop]
            )
            assert hashed.digest() == xxh3_128(stream[start:stop]).digest()
    cut = [range(start, stop, block) or [start] for start, stop in items]
    assert blocks.first.tolist() == [0, *itertools.accumulate(map(len, cut))]
    expected = [
        crc32c(stream[low : min(low + block, stop)])
        for lows, (_, stop) in zip(cut, items, strict=True)
        for low in lows
    ]
    assert checksums.result().tolist() == expected


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_checksum_of_two_pieces_follows_from_theirs(first: bytes, second: bytes) -> None:
    assert combined(checksum(first), checksum(second), len(second)) == checksum(first + second)


def test_the_checksum_is_crc32c() -> None:
    assert checksum(b"123456789") == 0xE3069283
    assert checksum(memoryview(b"")) == 0


# -- manifests -------------------------------------------------------------------------------------

TEXTS = st.text((string.printable + '\N{SNOWMAN}\0"\\').replace("/", ""), max_size=12)
NUMBERS = st.integers(0, 1 << 50)
TAILS = st.lists(st.tuples(NUMBERS, st.integers(0, 1 << 40)), max_size=3).map(tuple)


@st.composite
def _manifests(draw: st.DrawFn) -> Manifest:
    """Manifests whose files are named as segments are: by rank and save id."""
    save_id, few = draw(TEXTS), st.sampled_from(draw(st.lists(TEXTS, min_size=1, max_size=3)))
    ranks = draw(st.lists(st.integers(0, 4096), max_size=5, unique=True))
    tails = [draw(TAILS) for _ in ranks]
    segments = (
        Segment(
            rank=rank,
            node=draw(few),
            file=names.segment_file(rank, save_id),
            nbytes=draw(NUMBERS) + max(map(sum, tail), default=0),
            layout=draw(few),
            tail=tail,
        )
        for rank, tail in zip(ranks, tails, strict=True)
    )
    return Manifest(
        name=draw(TEXTS),
        save_id=save_id,
        scope=draw(TEXTS),
        job=draw(TEXTS),
        created=draw(st.floats(0, 2e10)),
        world_size=draw(st.integers(1, 5000)),
        persist=draw(st.booleans()),
        committer=draw(TEXTS),
        segments=Segments.of(save_id, segments),
        catalog=draw(TEXTS),
        stage_seconds=draw(st.floats(0, 1e6)),
    )


MANIFESTS = _manifests()
RECORDS = st.builds(
    FlushRecord,
    save_id=TEXTS,
    outcome=st.sampled_from(["", "durable", "failed", "refused", "skipped"]),
    error=TEXTS,
    attempts=st.integers(0, 99),
    durable=st.floats(0, 2e10),
    seconds=st.floats(0, 1e6),
)


@given(MANIFESTS)
def test_a_manifest_survives_being_written_down(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


@given(RECORDS)
def test_a_flush_record_survives_being_written_down(record: FlushRecord) -> None:
    assert FlushRecord.from_json(record.to_json()) == record


@given(st.dictionaries(TEXTS, st.lists(st.integers(0, 3 << 20), max_size=5), max_size=3))
def test_a_node_manifest_survives_being_written_down(columns: dict[str, list[int]]) -> None:
    tables = {
        file: ItemTable(
            np.stack([column, column + 1, np.where(column % 2, column, -1), column]),
            np.arange(block_count(column + 1), dtype="<u4"),
        )
        for file, column in (
            (file, np.array(numbers, dtype="<i8")) for file, numbers in columns.items()
        )
    }
    found = NodeManifest.from_json(
        NodeManifest(save_id="abc", node="node", tables=tables).to_json()
    )
    assert (found.save_id, found.node, set(found.tables)) == ("abc", "node", set(tables))
    for file, table in tables.items():
        for name in ("offsets", "lengths", "payload_offsets", "payload_nbytes", "crc32c"):
            column = getattr(found.tables[file], name)
            assert column.dtype == getattr(table, name).dtype
            assert np.array_equal(column, getattr(table, name))


_PARTS = StoredParts(
    part_nbytes=16 << 20, crc32c=(7, 8), hashes=bytes(range(32)), etag="a,b", checked=12.5
)


def test_a_node_manifest_says_what_later_checkpoints_may_be_made_from() -> None:
    manifest = NodeManifest(
        save_id="abc",
        node="node",
        tables={},
        transfer=Transfer(sent_nbytes=7, reused_nbytes=5),
        parts={"__0_0-abc.distcp": _PARTS},
    )
    found = NodeManifest.from_json(manifest.to_json())
    assert (found.parts, found.transfer) == (manifest.parts, manifest.transfer)
    assert found.parts["__0_0-abc.distcp"].hash_of(1) == bytes(range(16, 32))
    assert found.parts["__0_0-abc.distcp"].hash_of(2) == b""


@pytest.mark.parametrize(
    "damage",
    [
        {"hash": "md5"},
        {"part_nbytes": 0},
        {"part_nbytes": "x"},
        {"hashes": "?"},
        {"crc32c": 7},
        {"checked": None},
    ],
)
def test_parts_of_another_kind_are_left_out(damage: dict[str, Any]) -> None:
    written = json.loads(json.dumps(_PARTS, default=facts_of))
    assert StoredParts.from_fields(written) == _PARTS
    assert StoredParts.from_fields({**written, **damage}) is None
    assert StoredParts.from_fields({}) is None
    assert StoredParts.from_fields(None) is None


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(MANIFESTS, st.data())
def test_a_manifest_with_any_byte_changed_is_refused(
    manifest: Manifest, data: st.DataObject
) -> None:
    written = bytearray(manifest.to_json())
    position = data.draw(st.integers(0, len(written) - 1))
    change = data.draw(st.sampled_from(["flip", "cut", "double"]))
    if change == "flip":
        written[position] ^= data.draw(st.integers(1, 255))
    elif change == "cut":
        del written[position:]
    else:
        written.insert(position, written[position])
    try:
        found = Manifest.from_json(bytes(written))
    except ManifestInvalid:
        return
    assert found == manifest, "a damaged manifest was taken for a good one"  # white space, say


NO_MANIFESTS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"format": "dcp_mem/manifest", "version": 1}',
    b"1" * 5000,
]


@pytest.mark.parametrize(
    "read", [Manifest.from_json, NodeManifest.from_json, FlushRecord.from_json]
)
@pytest.mark.parametrize("data", NO_MANIFESTS, ids=lambda data: repr(data[:20]))
def test_what_is_no_manifest_is_refused(read: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        read(data)


def _manifest() -> Manifest:
    segments = of_four_ranks(lambda rank: 10 + rank)
    return make_manifest(segments, world_size=4, committer="node0")


def test_a_manifest_of_a_later_version_asks_for_a_newer_release() -> None:
    written = _manifest().to_json()
    later = written.replace(f'"version": {VERSION}'.encode(), f'"version": {VERSION + 1}'.encode())
    assert later != written
    with pytest.raises(ManifestInvalid, match="use the dcp_mem that wrote it"):
        Manifest.from_json(later)


def test_manifests_of_one_kind_are_not_taken_for_another() -> None:
    with pytest.raises(ManifestInvalid):
        NodeManifest.from_json(_manifest().to_json())
    with pytest.raises(ManifestInvalid):
        Manifest.from_json(FlushRecord(save_id="aa").to_json())


# -- names -----------------------------------------------------------------------------------------


def test_segments_are_recognised_by_name_and_nothing_else_is() -> None:
    match = names.SEGMENT.fullmatch(names.segment_file(12, names.new_save_id()))
    assert match is not None
    assert (match[1], match[2]) == ("12", "0")
    for other in (
        "__0_0.distcp",
        ".metadata",
        "__0_0-xyz.distcp",
        "__0_0-0123456789.distcp",
        "x__0_0-01234567.distcp",
    ):
        assert names.SEGMENT.fullmatch(other) is None, other


# -- metadata --------------------------------------------------------------------------------------


def _metadata() -> Metadata:
    memory_formats = [torch.contiguous_format, torch.channels_last, torch.preserve_format]
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.complex32,
        torch.quint8,
        torch.uint64,
    ]
    layouts = [
        torch.strided,
        torch.sparse_coo,
        torch.sparse_csr,
        torch.strided,
        torch.strided,
        torch.strided,
    ]
    described: dict[str, Any] = {
        f"t{i}": TensorStorageMetadata(
            TensorProperties(
                dtype=dtype, layout=layout, memory_format=memory_formats[i % 3], requires_grad=i > 2
            ),
            torch.Size([4, i]),
            [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, i]))],
        )
        for i, (dtype, layout) in enumerate(zip(dtypes, layouts, strict=True))
    }
    described["object"] = BytesStorageMetadata()
    planner_data = {
        "t0": ("t0",),
        "object": ("nested", 0, "object"),
        "other": {"set": {1, 2}, "none": None},
    }
    storage_data = {
        MetadataIndex("t0", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 10),
        MetadataIndex("object"): _StorageInfo("__1_0.distcp", 5, 7),
    }
    meta = StorageMeta(checkpoint_id=pathlib.PurePosixPath("/a/b"), save_id="12345678")
    if hasattr(meta, "modules"):  # not in torch 2.6
        meta.modules = ["m"]
    return Metadata(
        described, planner_data=planner_data, storage_data=storage_data, storage_meta=meta
    )


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_is_read_whatever_protocol_wrote_it(protocol: int) -> None:
    assert read_metadata(pickle.dumps(_metadata(), protocol=protocol)) == _metadata()


def test_metadata_of_torchs_own_writer_is_read_paths_and_all(tmp_path: Path) -> None:
    state = {"a": torch.randn(3), "nested": {"b": 1, "c": torch.zeros(2, 2)}}
    written = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert isinstance(written, Metadata)
    data = (tmp_path / ".metadata").read_bytes()
    assert b"PosixPath" in data
    found, stock = read_metadata(data), dcp.FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == stock.state_dict_metadata == written.state_dict_metadata
    assert found.planner_data == stock.planner_data
    assert found.storage_data == stock.storage_data
    assert found.storage_meta is not None
    assert os.fspath(found.storage_meta.checkpoint_id) == str(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_plans_that_megatron_keeps_with_its_metadata_are_read(protocol: int) -> None:
    whole = torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), whole)
    tensor = TensorWriteData(chunk, TensorProperties.create_from_tensor(torch.ones(2, 3)), whole)
    items = [
        WriteItem(MetadataIndex("t", [0, 0], 0), WriteItemType.SHARD, tensor_data=tensor),
        WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO, BytesIOWriteData(7)),
    ]
    metadata: Any = _metadata()
    metadata.all_local_plans = [SavePlan(items), SavePlan([])]
    found: Any = read_metadata(pickle.dumps(metadata, protocol=protocol))
    assert found == metadata
    assert found.all_local_plans == metadata.all_local_plans


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("kind", ["PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"])
def test_paths_of_any_system_and_python_are_labels(module: str, kind: str) -> None:
    data = pickle.dumps(_metadata(), protocol=3)
    assert b"cpathlib\nPurePosixPath\n" in data
    meta = read_metadata(
        data.replace(b"cpathlib\nPurePosixPath\n", f"c{module}\n{kind}\n".encode())
    ).storage_meta
    assert meta is not None
    assert os.fspath(meta.checkpoint_id) == "/a/b"  # type: ignore[arg-type]


class _ByName:
    """Pickles as `getattr(kind, name)`, as some Python versions pickle members of enums."""

    def __init__(self, kind: object, name: str) -> None:
        self._reduced = (getattr, (kind, name))

    def __reduce__(self) -> Any:
        return self._reduced


def test_members_of_enums_are_read_by_name() -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    metadata = Metadata({}, planner_data=_ByName(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))
    found = read_metadata(pickle.dumps(metadata))
    assert found.planner_data is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


class _Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> Any:
        return self._reduced


class _Sneaks(enum.Enum):
    ONE = 1


MARK = "/tmp/dcp_mem-test-unpickled"
ATTACKS: dict[str, object] = {
    "os.system": _Calls(os.system, f"touch {MARK}"),
    "eval": _Calls(eval, f"open({MARK!r}, 'w')"),
    "exec": _Calls(exec, f"open({MARK!r}, 'w')"),
    "open": _Calls(open, MARK, "w"),
    "import": _Calls(__import__, "antigravity"),
    "pickle.loads": _Calls(pickle.loads, b""),
    "torch.load": _Calls(torch.load, MARK),
    "getattr of a class": _ByName(Metadata, "__init__"),
    "getattr of an enum's class": _ByName(enum.Enum, "__class__"),
    "getattr of an unknown enum": _ByName(_Sneaks, "ONE"),
    "a path that touches": _Calls(pathlib.Path(MARK).touch),
    "a partial": _Calls(__import__("functools").partial, os.system, f"touch {MARK}"),
    "a tensor": torch.zeros(1),
    "an ordered dict of attacks": collections.OrderedDict(a=_Calls(os.system, f"touch {MARK}")),
    "numpy": np.float64(1),
    "a layout by a path": _Calls(torch.serialization._get_layout, "__loader__"),
    "a torch function": torch.zeros,
    "a class of ours": DcpMemError("x"),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("where", ["planner data", "whole", "key"])
def test_a_pickle_of_anything_else_is_refused_before_it_is_called(attack: str, where: str) -> None:
    thing: Any = ATTACKS[attack]
    Path(MARK).unlink(missing_ok=True)
    if where == "whole":
        data = pickle.dumps(thing)
    elif where == "planner data":
        data = pickle.dumps(Metadata({}, planner_data=[thing]))
    else:
        data = pickle.dumps(Metadata({"a": thing}))
    with pytest.raises(UntrustedMetadata) as refusal:
        read_metadata(data)
    assert not Path(MARK).exists()
    assert "refused to unpickle" in str(refusal.value)


def test_a_refusal_names_what_was_refused() -> None:
    with pytest.raises(UntrustedMetadata, match=r"posix\.system"):
        read_metadata(pickle.dumps(_Calls(os.system, "true")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
        pickle.dumps({"a": 1}),
        pickle.dumps(None),
        b"\x80\x05",
        b"cos\nsystem\n.",
    ],
    ids=["empty", "garbage", "list", "dict", "none", "cut", "a function"],
)
def test_what_is_no_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(UntrustedMetadata):
        read_metadata(data)


@given(st.data())
@settings(max_examples=examples(200))
def test_damaged_metadata_is_refused_or_is_metadata(data: st.DataObject) -> None:
    written = bytearray(pickle.dumps(_metadata(), protocol=data.draw(st.integers(3, 5))))
    for _ in range(data.draw(st.integers(1, 3))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_metadata(bytes(written))
    except (UntrustedMetadata, SizeRefused):
        return
    assert isinstance(found, Metadata)


def _build(target: str, attribute: str, value: bytes) -> bytes:
    """Pickle the setting of an attribute of an admitted class or function: BUILD with slots."""
    module, name = target.rsplit(".", 1)
    return (
        b"\x80\x02"
        + f"c{module}\n{name}\n".encode()
        + b"N}"  # (None, {attribute: value}) is the state
        + b"X"
        + len(attribute).to_bytes(4, "little")
        + attribute.encode()
        + value
        + b"s\x86b."
    )


@pytest.mark.parametrize(
    ("target", "attribute"),
    [
        ("torch.distributed.checkpoint.metadata.Metadata", "version"),
        ("torch.distributed.checkpoint.metadata.MetadataIndex", "__eq__"),
        ("torch.distributed.checkpoint.filesystem._StorageInfo", "__init__"),
        ("torch.distributed.checkpoint.planner.WriteItem", "__init__"),
        ("pathlib.PosixPath", "__str__"),
        ("torch.serialization._get_layout", "__wrapped__"),
    ],
)
def test_a_pickle_that_changes_a_class_is_refused_and_undone(target: str, attribute: str) -> None:
    classes: Sequence[Any] = [
        Metadata,
        MetadataIndex,
        _StorageInfo,
        WriteItem,
        pathlib.PurePosixPath,
    ]
    before = [dict(vars(each)) for each in classes]
    with pytest.raises(UntrustedMetadata):
        read_metadata(_build(target, attribute, b"X\x04\x00\x00\x00evil"))
    assert [dict(vars(each)) for each in classes] == before
    assert read_metadata(pickle.dumps(_metadata())) == _metadata()


class _Changed:
    """Pickles as a member of an enum, with an attribute changed."""

    def __init__(self, member: enum.Enum) -> None:
        self._reduced = (type(member), (member.value,), {"_name_": "evil"})

    def __reduce__(self) -> Any:
        return self._reduced


def test_a_pickle_that_changes_a_member_of_an_enum_is_refused_and_undone() -> None:
    before = dict(vars(WriteItemType.SHARD))
    with pytest.raises(UntrustedMetadata, match="a change of"):
        read_metadata(pickle.dumps(Metadata({}, planner_data=[_Changed(WriteItemType.SHARD)])))
    assert vars(WriteItemType.SHARD) == before
