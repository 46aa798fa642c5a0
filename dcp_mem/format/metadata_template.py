"""DCP's `.metadata` of a catalog: a pickle, written without making the objects that it describes.

Everything that occurs more than once (classes, keys, names, shapes, file names) is written once, at
the beginning, and referred to by number. What remains of a chunk, or of its storage data, is a
record of fixed length, so all of them are written at once, as a matrix of bytes. Save ids, and
where the items of tails lie, are filled in save by save.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import BYTES, MEMORY_FORMATS, Catalog, Ints, Properties, Tails
from dcp_mem.format.locations import DistinctShapes, TailLocations, distinct_shapes, locations_of
from dcp_mem.format.names import DCP_VERSION, segment_file

Matrix = npt.NDArray[np.uint8]
Column = npt.NDArray[Any]
"""One little-endian number for each record."""
LONG8 = pickle.LONG1 + b"\x08"
"""An integer of eight bytes, whatever its value."""
NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ
"""Make an object of the class on the stack, without calling its `__init__`."""
STATE, BUILD = pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS + pickle.BUILD
"""Stand around the attributes of an object that has just been made."""
_LARGEST_BININT = (1 << 31) - 1
_LARGEST_LONG1 = 255
_LARGEST_BINGET = 255


class Memo:
    """Values that a pickle writes once, at its beginning, and then refers to by number.

    `data`: the opcodes so far; they leave nothing on the unpickler's stack.
    """

    def __init__(self, first: int) -> None:
        self.data = bytearray()
        self._next = first
        self._shared: dict[bytes, bytes] = {}

    def share(self, code: bytes) -> bytes:
        """Return the opcodes that refer to the value that `code` writes; write it if it is new."""
        if code not in self._shared:
            number = self.keep(code)
            is_short = number <= _LARGEST_BINGET
            self._shared[code] = (
                pickle.BINGET + bytes([number])
                if is_short
                else pickle.LONG_BINGET + struct.pack("<I", number)
            )
        return self._shared[code]

    def keep(self, code: bytes) -> int:
        """Write a value and return its number."""
        return int(self.keep_all([code])[0])

    def keep_all(self, codes: Sequence[bytes]) -> Ints:
        """Write values and return their numbers."""
        numbers = np.arange(self._next, self._next + len(codes))
        self._next += len(codes)
        puts = slices(records(len(codes), pickle.LONG_BINPUT, short(numbers), pickle.POP))
        self.data += b"".join(chain.from_iterable(zip(codes, puts, strict=True)))
        return numbers


def refer(numbers: Ints) -> list[bytes]:
    """Return the opcodes that refer to each of these numbers of the memo."""
    return slices(records(len(numbers), pickle.LONG_BINGET, short(numbers)))


def global_name(module: str, name: str) -> bytes:
    """Return the opcodes of a class or function."""
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def string(text: str) -> bytes:
    """Return the opcodes of a text."""
    return strings([text])[0]


def strings(texts: Iterable[str]) -> list[bytes]:
    """Return the opcodes of each text."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    heads = slices(records(len(encoded), pickle.BINUNICODE, short(lengths)))
    return [head + text for head, text in zip(heads, encoded, strict=True)]


def integer(value: int) -> bytes:
    """Return the opcodes of any integer, in as many bytes as it takes."""
    if -_LARGEST_BININT <= value <= _LARGEST_BININT:
        return pickle.BININT + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    head = (
        pickle.LONG1 + bytes([length])
        if length <= _LARGEST_LONG1
        else pickle.LONG4 + struct.pack("<i", length)
    )
    return head + value.to_bytes(length, "little", signed=True)


def integers(column: Ints) -> tuple[bytes, Column]:
    """Return the opcode and the operands of these integers, all with the same number of bytes."""
    if int(column.max(initial=0)) > _LARGEST_BININT:
        return LONG8, column.astype("<i8")
    return pickle.BININT, column.astype("<i4")


def short(column: Ints) -> Column:
    """Return the integers in four bytes each, as lengths and numbers of the memo have.

    `column`: integers of at least 0, below 2**32.
    """
    return column.astype("<u4")


def records(rows: int, *pieces: bytes | Column) -> Matrix:
    """Return records as uint8[rows, bytes].

    `pieces`: bytes that all records have, and columns with a number for each.
    """
    matrix = np.empty((rows, width(pieces)), np.uint8)
    start = 0
    for piece in pieces:
        stop = start + width([piece])
        matrix[:, start:stop] = (
            np.frombuffer(piece, np.uint8)
            if isinstance(piece, bytes)
            else piece.view(np.uint8).reshape(rows, piece.itemsize)
        )
        start = stop
    return matrix


def width(pieces: Sequence[bytes | Column]) -> int:
    """Return the bytes that these pieces of a record take."""
    return sum(len(piece) if isinstance(piece, bytes) else piece.dtype.itemsize for piece in pieces)


def slices(matrix: Matrix) -> list[bytes]:
    """Return each record on its own.

    `matrix`: uint8[records, bytes], as `records` returns it.
    """
    data, step = matrix.tobytes(), matrix.shape[1]
    return [data[start : start + step] for start in range(0, len(data), step)]


_ID_LENGTH = 8
_PLACEHOLDER = "0" * _ID_LENGTH
_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _META, _MEMORY_FORMAT = (
    global_name("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
)
_STORAGE = global_name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE, _LAYOUT = global_name("torch", "Size"), global_name("torch.serialization", "_get_layout")
_IN_RECORDS = (
    *(_TENSOR, _BYTES, _CHUNK, _INDEX, _STORAGE, _SIZE),
    *map(
        string,
        (
            "properties",
            "size",
            "chunks",
            "offsets",
            "sizes",
            "fqn",
            "index",
            "offset",
            "relative_path",
            "length",
        ),
    ),
)
_FIRST_OF_PYTHON_3 = 3
"""The first pickle protocol that names modules as Python 3 does."""
_OFFSET, _LENGTH = -4, -2
"""Index of offset and length among the pieces of a record of storage data."""


@value_class(eq=False, kw_only=True)
class MetadataTemplate:
    """A pickled `Metadata` with gaps for what differs from save to save."""

    data: bytes
    ids: Ints
    offsets: Ints  # where the offset of each tail item begins, a number of eight bytes
    lengths: Ints  # where the length of each tail item begins, a number of eight bytes
    checkpoint_id: int  # where the checkpoint's name goes, behind all other gaps
    tail: TailLocations

    def render(
        self,
        save_id: str,
        tails: Tails,
        checkpoint_id: str | None = None,
    ) -> bytes:
        """Return the bytes of `.metadata` for one save.

        Raises ManifestInvalid, ValueError.
        """
        written = save_id.encode()
        if len(written) != _ID_LENGTH:
            raise ValueError(
                f"a save id of {len(written)} bytes in place of {_ID_LENGTH}: {save_id!r}"
            )
        data = np.frombuffer(bytearray(self.data), np.uint8)
        data[self.ids[:, None] + np.arange(_ID_LENGTH)] = np.frombuffer(written, np.uint8)
        extents = self.tail.extents(tails).astype("<i8").view(np.uint8).reshape(-1, 2, 8)
        data[self.offsets[:, None] + np.arange(8)] = extents[:, 0]
        data[self.lengths[:, None] + np.arange(8)] = extents[:, 1]
        filled = data.tobytes()
        name = pickle.NONE if checkpoint_id is None else string(checkpoint_id)
        return filled[: self.checkpoint_id] + name + filled[self.checkpoint_id :]


@value_class(eq=False, kw_only=True)
class _Numbers:
    """Numbers in the memo: of each name, file, entry's size, row's offset and row's extent."""

    names: Ints
    files: Ints
    size: Ints
    offset: Ints
    extent: Ints


def template_of(catalog: Catalog) -> MetadataTemplate:
    """Return the pickle of a catalog's metadata.

    1. Write into the memo what occurs more than once.
    2. Make the records of storage data: of items in layouts, and with gaps of items in tails.
    3. Put the pickle together, noting where the gaps lie.

    Raises ManifestInvalid.
    """
    planner_pickle, used = _planner_pickle(catalog.planner_pickle)
    memo = Memo(used)
    planner_data = memo.share(planner_pickle)  # first: its own numbers begin at 0
    for code in _IN_RECORDS:
        memo.share(code)  # next: references to the lowest numbers are shortest
    places = locations_of(catalog)
    files, ids = _keep_files(memo, catalog.ranks.tolist())
    numbers = _keep(memo, catalog, files)
    known = _known(memo, catalog, numbers)
    if catalog.paths is not None:
        planner_data = _paths(memo, catalog, numbers)
    fixed = _stored(
        memo, catalog, numbers, places.rows, integers(places.offsets), integers(places.lengths)
    )
    unknown = (LONG8, np.zeros(len(places.tail.rows), "<i8"))
    tail = _stored(memo, catalog, numbers, places.tail.rows, unknown, unknown)
    head, storage_meta = memo.share(_METADATA) + NEW + STATE, _storage_meta(memo)

    data = bytearray(pickle.PROTO + b"\x04")
    ids = [len(data) + position for position in ids]
    data += memo.data  # nothing is added to it any more
    data += head + string("state_dict_metadata") + known + string("planner_data") + planner_data
    data += string("storage_data") + STATE + records(len(places.rows), *fixed).tobytes()
    starts = len(data) + np.arange(len(places.tail.rows)) * width(tail)
    data += records(len(places.tail.rows), *tail).tobytes() + pickle.SETITEMS
    data += string("storage_meta")
    ids.append(len(data) + storage_meta.rindex(_PLACEHOLDER.encode()))
    data += storage_meta
    name = len(data)
    # Torch 2.6 has no field for the version, and ignores it.
    data += BUILD + string("version") + string(DCP_VERSION)
    data += BUILD + pickle.STOP
    offsets, lengths = starts + width(tail[:_OFFSET]), starts + width(tail[:_LENGTH])
    return MetadataTemplate(
        data=bytes(data),
        ids=np.array(ids, np.int64),
        offsets=offsets,
        lengths=lengths,
        checkpoint_id=name,
        tail=places.tail,
    )


# -- planner data ---------------------------------------------------------------------------------


def _planner_pickle(data: bytes) -> tuple[bytes, int]:
    """Return a pickle as part of another (None for no data), and how many numbers it takes.

    Its frames are left out: they would reach beyond its end.
    """
    if not data:
        return pickle.NONE, 0
    try:
        words = [
            (word.name, argument, position) for word, argument, position in pickletools.genops(data)
        ]
    except Exception as error:
        raise ManifestInvalid(f"a catalog's planner data is no pickle: {error}") from None
    if words[0][0] != "PROTO" or int(words[0][1] or 0) < _FIRST_OF_PYTHON_3:
        raise ManifestInvalid("a catalog's planner data is pickled with names of Python 2")
    code = [
        data[start:stop]
        for (name, _, start), (_, _, stop) in pairwise(words)
        if name not in ("PROTO", "FRAME")
    ]
    puts = [
        int(number or 0) for name, number, _ in words if name in ("PUT", "BINPUT", "LONG_BINPUT")
    ]
    memoized = sum(name == "MEMOIZE" for name, _, _ in words)
    return b"".join(code), max([len(puts) + memoized, *(number + 1 for number in puts)])


def _paths(memo: Memo, catalog: Catalog, numbers: _Numbers) -> bytes:
    """Return the opcodes of the dict of those names that have a path."""
    named = [
        (name, path)
        for name, path in zip(catalog.names, catalog.paths or (), strict=True)
        if path is not None
    ]
    parts = dict.fromkeys(chain.from_iterable(path for _, path in named))
    known: dict[str | int, bytes] = dict(zip(catalog.names, refer(numbers.names), strict=True))
    texts = [part for part in parts if isinstance(part, str) and part not in known]
    known |= zip(texts, refer(memo.keep_all(strings(texts))), strict=True)
    known |= {part: integer(part) for part in parts if isinstance(part, int)}
    of_part = known.__getitem__
    items = [
        known[name] + pickle.MARK + b"".join(map(of_part, path)) + pickle.TUPLE
        for name, path in named
    ]
    return STATE + b"".join(items) + pickle.SETITEMS


# -- what is written once, into the memo ----------------------------------------------------------


def _keep(memo: Memo, catalog: Catalog, files: Ints) -> _Numbers:
    shapes = distinct_shapes(catalog)
    kept = _keep_shapes(memo, shapes)
    has_offset = catalog.has_offset()[catalog.entry_of_row()]
    return _Numbers(
        names=memo.keep_all(strings(catalog.names)),
        files=files,
        size=kept[shapes.size],
        offset=np.where(has_offset, kept[shapes.offset], memo.keep(pickle.NONE)),
        extent=kept[shapes.extent],
    )


def _keep_shapes(memo: Memo, shapes: DistinctShapes) -> Ints:
    """Write a `torch.Size` for each shape."""
    opcode, values = integers(shapes.values)
    codes: list[bytes] = []
    for dimensions in np.unique(shapes.dimensions).tolist():
        rows = values[shapes.dimensions == dimensions]
        columns = [np.ascontiguousarray(rows[:, column]) for column in range(dimensions)]
        sizes: list[bytes | Column] = [piece for column in columns for piece in (opcode, column)]
        head, end = memo.share(_SIZE) + pickle.MARK, pickle.TUPLE + pickle.TUPLE1 + pickle.REDUCE
        codes += slices(records(len(rows), head, *sizes, end))
    return memo.keep_all(codes)


def _keep_files(memo: Memo, ranks: Sequence[int]) -> tuple[Ints, list[int]]:
    """Write the names of all ranks' segments; return them and where their save ids begin."""
    numbers, ids = [], []
    for rank in ranks:
        code = string(segment_file(rank, _PLACEHOLDER))
        ids.append(len(memo.data) + code.rindex(_PLACEHOLDER.encode()))
        numbers.append(memo.keep(code))
    return np.array(numbers, np.int64), ids


def _keep_properties(memo: Memo, one: Properties) -> int:
    values = [
        global_name(*one.dtype.rsplit(".", 1)),
        memo.share(_LAYOUT) + string(one.layout) + pickle.TUPLE1 + pickle.REDUCE,
        _boolean(one.requires_grad),
        memo.share(_MEMORY_FORMAT)
        + integer(MEMORY_FORMATS[one.memory_format])
        + pickle.TUPLE1
        + pickle.REDUCE,
        _boolean(one.pin_memory),
    ]
    return memo.keep(
        memo.share(_PROPERTIES) + NEW + pickle.MARK + b"".join(values) + pickle.TUPLE + pickle.BUILD
    )


def _boolean(value: bool) -> bytes:
    return pickle.NEWTRUE if value else pickle.NEWFALSE


# -- what is written as records -------------------------------------------------------------------


def _known(memo: Memo, catalog: Catalog, numbers: _Numbers) -> bytes:
    """Return the opcodes of `state_dict_metadata`."""

    def key(text: str) -> bytes:
        return memo.share(string(text)) + pickle.LONG_BINGET

    names, is_tensor = short(numbers.names[catalog.name]), catalog.properties >= 0
    table = np.array([_keep_properties(memo, one) for one in catalog.table], np.int64)
    tensors = records(
        int(is_tensor.sum()),
        *(pickle.LONG_BINGET, names[is_tensor], memo.share(_TENSOR), NEW, STATE),
        *(key("properties"), short(table[catalog.properties[is_tensor]])),
        *(key("size"), short(numbers.size[is_tensor])),
        *(memo.share(string("chunks")), pickle.EMPTY_LIST, pickle.MARK),
    )
    is_bytes = catalog.properties == BYTES
    others = records(
        int(is_bytes.sum()), pickle.LONG_BINGET, names[is_bytes], memo.share(_BYTES), NEW
    )
    chunks = records(
        len(catalog.writer),
        *(memo.share(_CHUNK), NEW, STATE),
        *(key("offsets"), short(numbers.offset)),
        *(key("sizes"), short(numbers.extent), BUILD),
    )
    written, bounds = chunks.tobytes(), (catalog.first * chunks.shape[1]).tolist()
    tensor, other, end = iter(slices(tensors)), iter(slices(others)), pickle.APPENDS + BUILD
    items = [
        next(tensor) + written[start:stop] + end if kind >= 0 else next(other)
        for kind, (start, stop) in zip(catalog.properties.tolist(), pairwise(bounds), strict=True)
        if kind >= BYTES
    ]
    return STATE + b"".join(items) + pickle.SETITEMS


def _stored(
    memo: Memo,
    catalog: Catalog,
    numbers: _Numbers,
    rows: Ints,
    offsets: tuple[bytes, Column],
    lengths: tuple[bytes, Column],
) -> list[bytes | Column]:
    """Return the pieces of the records of `storage_data` of these rows."""

    def key(text: str) -> bytes:
        return memo.share(string(text))

    name = numbers.names[catalog.name[catalog.entry_of_row()[rows]]]
    return [
        *(memo.share(_INDEX), NEW, STATE),
        *(key("fqn"), pickle.LONG_BINGET, short(name)),
        *(key("index"), pickle.NONE),
        *(key("offset"), pickle.LONG_BINGET, short(numbers.offset[rows]), BUILD),
        *(memo.share(_STORAGE), NEW, STATE),
        *(key("relative_path"), pickle.LONG_BINGET, short(numbers.files[catalog.writer[rows]])),
        *(key("offset"), offsets[0], offsets[1]),
        *(key("length") + lengths[0], lengths[1]),
        BUILD,
    ]


def _storage_meta(memo: Memo) -> bytes:
    """Return the opcodes of `StorageMeta`, with the keys of torch 2.13, which 2.6 accepts.

    The last key, its value and the end are missing.
    """
    state = [
        *(string("save_id"), string(_PLACEHOLDER)),
        *(string("load_id"), pickle.NONE, string("modules"), pickle.EMPTY_LIST),
        string("checkpoint_id"),
    ]
    return memo.share(_META) + NEW + STATE + b"".join(state)
