"""DCP's `.metadata` of a catalog: a pickle, written without making the objects that it describes.

Python's pickler writes what occurs more than once (keys, names, shapes, file names, properties), at
the beginning. What remains of a chunk, or of where an item lies, is a record of fixed length that
refers to these by number, so all records are written at once, as a matrix of bytes. Save ids, and
where the items of tails lie, are filled in save by save.

The agent writes `.metadata`, too, and has no torch: stand-ins are pickled under torch's names.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Mapping, Sequence
from copyreg import __newobj__ as new_object  # type: ignore[attr-defined]
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.catalog import BYTES, MEMORY_FORMATS, Catalog, Ints, Properties, Tails
from dcp_mem.format.locations import LayoutItems, distinct_shapes, extents_in_tails
from dcp_mem.format.names import DCP_VERSION, segment_file

Matrix = npt.NDArray[np.uint8]
"""Bytes of each of some records."""
_PROTOCOL = pickle.PROTO + b"\x03"
"""The last one without frames, so that one pickle can be part of another."""
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ
"""Make an object of the class on the stack, without calling its `__init__`."""
_STATE, _BUILD = pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS + pickle.BUILD
"""Stand around the attributes of an object that has just been made."""
_LONG8 = pickle.LONG1 + b"\x08"
"""An integer of eight bytes, whatever its value."""
_ID_LENGTH = 8
_PLACEHOLDER = "0" * _ID_LENGTH
_OFFSET, _LENGTH = -5, -2
"""Index of offset and length among the pieces of a record of storage data."""
_ID_OF_FILE = rb"(?<=-)%b(?=\.distcp)" % _PLACEHOLDER.encode()

# -- torch's names --------------------------------------------------------------------------------


class _Call:
    """Stands for what torch has under a name. An instance is pickled as a call of that."""

    def __init__(self, argument: Any) -> None:
        self.argument = argument

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument,)


class _Instance(_Call):
    """Stands for a class. An instance is pickled as one of that, with this state."""

    def __reduce__(self) -> tuple[Any, ...]:
        return new_object, (type(self),), self.argument


def _named(name: str, kind: type[_Call] = _Call) -> Any:
    module, _, name = name.rpartition(".")
    return type(name, (kind,), {"__module__": module})


_DCP = "torch.distributed.checkpoint."
_METADATA, _TENSOR, _BYTES, _CHUNK, _INDEX, _META, _MEMORY_FORMAT = (
    _named(f"{_DCP}metadata.{name}")
    for name in (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    )
)
_PROPERTIES = _named(f"{_DCP}metadata.TensorProperties", _Instance)
_STORAGE = _named(f"{_DCP}filesystem._StorageInfo")
_SIZE, _LAYOUT = _named("torch.Size"), _named("torch.serialization._get_layout")
_STAND_INS = (
    *(_METADATA, _TENSOR, _BYTES, _CHUNK, _INDEX, _META, _MEMORY_FORMAT),
    *(_PROPERTIES, _STORAGE, _SIZE, _LAYOUT),
)
_KEYS = (
    *("state_dict_metadata", "storage_data", "storage_meta", "version", "planner_data"),
    *("properties", "size", "chunks", "offsets", "sizes"),
    *("fqn", "index", "offset", "relative_path", "length"),
    *("save_id", "load_id", "modules", "checkpoint_id"),
)


class _Shared:
    """The beginning of a pickle: values that are written once, and then referred to by number.

    They leave nothing on the unpickler's stack. `of`: the opcodes that refer to torch's names, to
    keys, and to None, which a pickler doesn't number.
    """

    def __init__(self, dtypes: Sequence[Any]) -> None:
        named = (*_STAND_INS, *dtypes)
        codes = [pickle.GLOBAL + f"{one.__module__}\n{one.__name__}\n".encode() for one in named]
        stand_ins = dict(zip((None, *named), (pickle.NONE, *codes), strict=True))
        self._stream = io.BytesIO()
        self._stream.write(_PROTOCOL)
        for number, code in enumerate(stand_ins.values()):
            put = pickle.LONG_BINPUT + struct.pack("<I", number) + pickle.POP
            self._stream.write(code + put)
        self._pickler = pickle.Pickler(self._stream, 3)
        self._pickler.memo = {id(one): (at, one) for at, one in enumerate(stand_ins)}
        numbers = [*range(len(stand_ins)), *self.keep(_KEYS).tolist()]
        self.of = dict(zip((*stand_ins, *_KEYS), map(_reference, numbers), strict=True))

    def keep(self, values: Sequence[Any]) -> Ints:
        """Write values, none of which is a number, and return their numbers."""
        self._pickler.dump(list(values))
        self._stream.seek(-1, io.SEEK_END)  # in place of the end: take the list away again
        self._stream.write(pickle.POP)
        known = self._pickler.memo.copy()
        return np.fromiter((known[id(one)][0] for one in values), np.int64, len(values))

    def keep_files(self, ranks: Sequence[int]) -> tuple[Ints, list[int]]:
        """Write the names of all ranks' segments; return them and where their save ids begin."""
        start = self._stream.tell()
        numbers = self.keep([segment_file(rank, _PLACEHOLDER) for rank in ranks])
        return numbers, [
            one.start() for one in re.compile(_ID_OF_FILE).finditer(self.data(), start)
        ]

    def data(self) -> bytearray:
        """Return all that has been written."""
        return bytearray(self._stream.getbuffer())


def _reference(number: int) -> bytes:
    if number <= 0xFF:
        return pickle.BINGET + bytes([number])
    return pickle.LONG_BINGET + struct.pack("<I", number)


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


# -- the template ---------------------------------------------------------------------------------


@value_class(eq=False, kw_only=True)
class MetadataTemplate:
    """A pickled `Metadata` with gaps for what differs from save to save."""

    data: bytes
    ids: Ints
    extents: Ints  # where offset and length of each tail item begin, of eight bytes: [2, items]
    checkpoint_id: int  # where the checkpoint's name goes, behind all other gaps
    tail: tuple[Ints, Ints]  # of each tail item: its rank, and its number in that rank's tail

    def render(self, save_id: str, tails: Tails, checkpoint_id: str | None = None) -> bytes:
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
        extents = extents_in_tails(*self.tail, tails)
        data[self.extents[..., None] + np.arange(8)] = _eight_bytes(extents)
        filled = data.tobytes()
        name = pickle.NONE if checkpoint_id is None else _string(checkpoint_id)
        return filled[: self.checkpoint_id] + name + filled[self.checkpoint_id :]


def template_of(catalog: Catalog) -> MetadataTemplate:
    """Return the pickle of a catalog's metadata.

    1. Write what occurs more than once.
    2. Write the entries with their chunks, and where each item lies: in a layout, or in a gap.
    3. Put the pickle together, noting where the gaps lie.

    Raises ManifestInvalid.
    """
    dtypes = {one.dtype: _named(one.dtype) for one in catalog.table}
    shared, shapes = _Shared(list(dtypes.values())), distinct_shapes(catalog)
    files, ids = shared.keep_files(catalog.ranks.tolist())
    names, sizes = shared.keep(catalog.names), shared.keep(list(map(_SIZE, shapes.values)))
    table = shared.keep([_properties(one, dtypes[one.dtype]) for one in catalog.table])
    planner_data = _planner_data(catalog, shared)
    name, of, of_row = names[catalog.name], shared.of, catalog.entry_of_row()
    offset = np.where(catalog.has_offset()[of_row], sizes[shapes.offset], 0)  # 0: of None
    known = _known(catalog, of, name, table, sizes[shapes.size], offset, sizes[shapes.extent])

    items, rows = LayoutItems(catalog), np.flatnonzero(catalog.writer >= 0)
    # As in DCP: of items with the same index, the last one counts.
    is_tail = items.beyond(catalog.writer[rows], catalog.number[rows]) >= 0
    rows = rows[np.argsort(is_tail, kind="stable")]
    writer, number = catalog.writer[rows], catalog.number[rows]
    extents = items.columns[:2, items.find(writer, number)]
    stored = (
        *(of[_INDEX], _NEW, _STATE, of["fqn"], *_references(name[of_row[rows]])),
        *(of["index"], pickle.NONE, of["offset"], *_references(offset[rows]), _BUILD),
        *(of[_STORAGE], _NEW, _STATE, of["relative_path"], *_references(files[writer])),
        *(of["offset"], _LONG8, _eight_bytes(extents[0])),
        *(of["length"], _LONG8, _eight_bytes(extents[1]), _BUILD),
    )

    data = shared.data()  # nothing is added to it any more
    data += of[_METADATA] + _NEW + _STATE + of["state_dict_metadata"] + known
    data += of["storage_data"] + _STATE
    tail = np.arange(len(rows))[len(rows) - np.count_nonzero(is_tail) :]
    gaps = np.array([[_width(stored[:at])] for at in (_OFFSET, _LENGTH)])
    gaps = gaps + len(data) + tail * _width(stored)
    data += _records(len(rows), *stored).tobytes() + pickle.SETITEMS
    data += of["storage_meta"] + of[_META] + _NEW + _STATE
    ids.append(len(data) + len(of["save_id"]) + len(_string("")))
    data += of["save_id"] + _string(_PLACEHOLDER) + of["load_id"] + pickle.NONE
    data += of["modules"] + pickle.EMPTY_LIST + of["checkpoint_id"]
    checkpoint_id = len(data)
    # Torch 2.6 has no field for the version, and ignores it. Planner data of another planner than
    # torch's come last, since their numbers begin at 0: nothing is referred to any more.
    data += _BUILD + of["version"] + _string(DCP_VERSION) + of["planner_data"] + planner_data
    data += _BUILD + pickle.STOP
    return MetadataTemplate(
        data=bytes(data),
        ids=np.array(ids, np.int64),
        extents=gaps,
        checkpoint_id=checkpoint_id,
        tail=(catalog.ranks[writer[tail]], items.beyond(writer[tail], number[tail])),
    )


def _properties(one: Properties, dtype: Any) -> Any:
    memory_format = _MEMORY_FORMAT(MEMORY_FORMATS[one.memory_format])
    layout = _LAYOUT(one.layout)
    return _PROPERTIES((dtype, layout, one.requires_grad, memory_format, one.pin_memory))


def _planner_data(catalog: Catalog, shared: _Shared) -> bytes:
    """Return the opcodes of planner data: of a pickle, or of those names that have a path."""
    if catalog.planner_pickle:
        if not catalog.planner_pickle.startswith(_PROTOCOL) or catalog.planner_pickle[-1:] != b".":
            raise ManifestInvalid("a catalog's planner data is no pickle of protocol 3")
        return catalog.planner_pickle[len(_PROTOCOL) : -1]
    if catalog.paths is None:
        return pickle.NONE
    same: dict[Any, Any] = {name: name for name in catalog.names}  # what is the same is one object
    paths = {
        name: tuple([same.setdefault(part, part) for part in path])
        for name, path in zip(catalog.names, catalog.paths, strict=True)
        if path is not None
    }
    return _reference(int(shared.keep([paths])[0]))


def _known(
    catalog: Catalog,
    of: Mapping[Any, bytes],
    name: Ints,
    table: Ints,
    size: Ints,
    offset: Ints,
    extent: Ints,
) -> bytes:
    """Return the opcodes of `state_dict_metadata`.

    The numbers are those of each entry's name and size, each of the catalog's properties, and each
    row's offset and extent.
    """
    is_tensor, is_bytes = catalog.properties >= 0, catalog.properties == BYTES
    tensors = _records(
        int(is_tensor.sum()),
        *(*_references(name[is_tensor]), of[_TENSOR], _NEW, _STATE),
        *(of["properties"], *_references(table[catalog.properties[is_tensor]])),
        *(of["size"], *_references(size[is_tensor])),
        *(of["chunks"], pickle.EMPTY_LIST, pickle.MARK),
    )
    others = _records(int(is_bytes.sum()), *_references(name[is_bytes]), of[_BYTES], _NEW)
    chunks = _records(
        len(offset),
        *(of[_CHUNK], _NEW, _STATE),
        *(of["offsets"], *_references(offset), of["sizes"], *_references(extent), _BUILD),
    )
    written, bounds = chunks.tobytes(), (catalog.first * chunks.shape[1]).tolist()
    tensor, other, end = iter(_slices(tensors)), iter(_slices(others)), pickle.APPENDS + _BUILD
    items = [
        next(tensor) + written[start:stop] + end if kind >= 0 else next(other)
        for kind, (start, stop) in zip(catalog.properties.tolist(), pairwise(bounds), strict=True)
        if kind >= BYTES
    ]
    return _STATE + b"".join(items) + pickle.SETITEMS


# -- records --------------------------------------------------------------------------------------


def _references(numbers: Ints) -> tuple[bytes, Matrix]:
    """Return the pieces of records that refer to these numbers."""
    operands = np.ascontiguousarray(numbers, "<u4").view(np.uint8)
    return pickle.LONG_BINGET, operands.reshape(len(numbers), 4)


def _eight_bytes(integers: Ints) -> Matrix:
    return np.ascontiguousarray(integers, "<i8").view(np.uint8).reshape(*integers.shape, 8)


def _records(rows: int, *pieces: bytes | Matrix) -> Matrix:
    """Return records of these pieces: bytes that all have, and bytes of each."""
    matrix, start = np.empty((rows, _width(pieces)), np.uint8), 0
    for piece in pieces:
        stop = start + _width([piece])
        matrix[:, start:stop] = (
            np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece
        )
        start = stop
    return matrix


def _width(pieces: Sequence[bytes | Matrix]) -> int:
    return sum(len(piece) if isinstance(piece, bytes) else piece.shape[1] for piece in pieces)


def _slices(matrix: Matrix) -> list[bytes]:
    data, step = matrix.tobytes(), matrix.shape[1]
    return [data[start : start + step] for start in range(0, len(data), step)]
