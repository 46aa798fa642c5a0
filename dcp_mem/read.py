"""Moving an opened checkpoint's items into the tensors that a load plan names.

What lies in memory is read straight into the destination, all threads at work. What lies on storage is fetched in runs
of neighbouring items, checked against the checksums item by item, and only then handed on.
"""

from __future__ import annotations

import ctypes
import io
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_mem.errors import DcpMemError, SegmentCorrupt, UntrustedMetadata
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.checksums import blocks_of, checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.copying import Move
from dcp_mem.planning.plain import is_plain
from dcp_mem.planning.reads import Reads, Saved, Wanted
from dcp_mem.recover import Opened
from dcp_mem.sources import Failures, MemorySource, Source

_RUN = 32 << 20
_GAP = 1 << 20
_RUNS_AT_ONCE = 4
_BATCH = 2 << 30


@dataclass(frozen=True, slots=True)
class _Payload:
    """Raw contiguous data of an item: where it lies in the segment, and as what."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


def read_items(opened: Opened, plan: LoadPlan | Reads, planner: LoadPlanner, *, verify: bool) -> set[str]:
    """Read every item of the plan, from the nearest source that has it whole; returns the labels of those that were used.

    Raises SegmentCorrupt when no source has an item whole; by then some destinations hold its bytes already.
    """
    if isinstance(plan, LoadPlan):
        return _read_wanted(opened, wanted_of(opened.metadata, plan), planner, verify)
    nearest = opened.sources[0]
    if not isinstance(nearest, MemorySource):
        return _read_wanted(opened, plan.everything(), planner, verify)
    try:
        for file, payloads in plan.straight():
            nearest.read_many(file, payloads)
        return {nearest.label} | _read_wanted(opened, plan.rest(), planner, verify)
    except Failures as error:
        if len(opened.sources) == 1:
            raise
        log.warning("%s; going on with %s", error, opened.sources[1].label)
        return _read_wanted(opened, plan.everything(), planner, verify)


def _read_wanted(opened: Opened, wanted: Iterable[Wanted], planner: LoadPlanner, verify: bool) -> set[str]:
    used: set[str] = set()
    for file, of_file in _by_file(wanted).items():
        for position, source in enumerate(opened.sources):
            try:
                _read_file(source, file, of_file, opened.choice.name, planner, verify)
                used.add(source.label)
                break
            except Failures as error:
                if position + 1 == len(opened.sources):
                    raise
                log.warning("%s; going on with %s", error, opened.sources[position + 1].label)
    return used


def wanted_of(metadata: Metadata, plan: LoadPlan) -> Iterator[Wanted]:
    """What a plan of torch's needs, by DCP's metadata. Raises UntrustedMetadata where that names other files."""
    for request in plan.items:
        info = metadata.storage_data[request.storage_index]
        if "/" in info.relative_path or info.relative_path in ("", "..", "."):
            raise UntrustedMetadata(f"metadata that names a file outside of the checkpoint: {info.relative_path}")
        transforms = getattr(info, "transform_descriptors", None) or ()
        yield Wanted(request, info.relative_path, info.offset, info.length, _saved(metadata, request), transforms)


def _saved(metadata: Metadata, request: ReadItem) -> Saved | None:
    """Dtype and shape of the chunk that is asked for, as it was saved."""
    known = metadata.state_dict_metadata.get(request.storage_index.fqn)
    if not isinstance(known, TensorStorageMetadata):
        return None
    chunks, hint, place = known.chunks, request.storage_index.index, request.storage_index.offset
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == place:
        return known.properties.dtype, chunks[hint].sizes
    return next(((known.properties.dtype, chunk.sizes) for chunk in chunks if chunk.offsets == place), None)


def _by_file(wanted: Iterable[Wanted]) -> dict[str, list[Wanted]]:
    files: dict[str, list[Wanted]] = {}
    for item in wanted:
        files.setdefault(item.file, []).append(item)
    for of_file in files.values():
        of_file.sort(key=lambda item: item.offset)
    return files


def _read_file(
    source: Source, file: str, wanted: Sequence[Wanted], name: str, planner: LoadPlanner, verify: bool
) -> None:
    table = source.table(file)
    index = _TableIndex(table) if table is not None else None
    if isinstance(source, MemorySource):
        wanted = _read_straight(source, file, wanted, planner, index)
    _read_runs(source, file, wanted, name, planner, index, verify)


class _TableIndex:
    """Finds an item's row by its offset."""

    def __init__(self, table: ItemTable) -> None:
        self.offsets = table.offsets.tolist()
        self.payload_offsets = table.payload_offsets.tolist()
        self.payload_nbytes = table.payload_nbytes.tolist()
        self.crcs = table.crc32c.tolist()
        self.blocks = blocks_of(table.offsets, table.lengths)

    def row(self, offset: int) -> int | None:
        row = bisect_left(self.offsets, offset)
        return row if row < len(self.offsets) and self.offsets[row] == offset else None


# -- straight into the destination -----------------------------------------------------------------------------------


def _read_straight(
    source: Source,
    file: str,
    wanted: Sequence[Wanted],
    planner: LoadPlanner,
    index: _TableIndex | None,
) -> list[Wanted]:
    """Read what can go straight from the segment into a tensor's memory; returns the rest."""
    rest: list[Wanted] = []
    moves: list[Move] = []
    targets: list[tuple[ReadItem, torch.Tensor]] = []
    waiting = 0
    for item in wanted:
        payload = _payload(item, index)
        span = _span(payload, item.request) if payload is not None else None
        if payload is None or span is None:
            rest.append(item)
            continue
        target = planner.resolve_tensor(item.request).detach()
        _check_shape(item.request, target)
        if target.dtype is not payload.dtype or not is_plain(target):
            buffer = _buffer(span[1] - span[0])
            source.read(file, [(_address(buffer), payload.offset + span[0], span[1] - span[0])])
            data = torch.frombuffer(buffer, dtype=payload.dtype) if len(buffer) else torch.empty(0, dtype=payload.dtype)
            target.copy_(data.view(item.request.lengths))
            planner.commit_tensor(item.request, target)
            continue
        moves.append((target.data_ptr(), payload.offset + span[0], span[1] - span[0]))
        targets.append((item.request, target))
        waiting += span[1] - span[0]
        if waiting >= _BATCH:
            _finish(source, file, moves, targets, planner)
            moves, targets, waiting = [], [], 0
    _finish(source, file, moves, targets, planner)
    return rest


def _finish(
    source: Source,
    file: str,
    moves: Sequence[Move],
    targets: Sequence[tuple[ReadItem, torch.Tensor]],
    planner: LoadPlanner,
) -> None:
    source.read(file, [move for move in moves if move[2]])
    for request, target in targets:
        planner.commit_tensor(request, target)


def _payload(item: Wanted, index: _TableIndex | None) -> _Payload | None:
    """The item's raw data, where the segment's table and the plan agree that it has such; else None."""
    if index is None or item.transforms or item.saved is None or item.request.type != LoadItemType.TENSOR:
        return None
    row = index.row(item.offset)
    if row is None or index.payload_offsets[row] < 0:
        return None
    (dtype, shape), nbytes = item.saved, index.payload_nbytes[row]
    if nbytes != math.prod(shape) * dtype.itemsize:
        return None
    return _Payload(index.payload_offsets[row], nbytes, dtype, shape)


def _span(payload: _Payload, request: ReadItem) -> tuple[int, int] | None:
    """Bytes [start, stop) of the payload that are the wanted box, where the box is contiguous in it; else None."""
    shape, offsets, lengths = payload.shape, request.storage_offsets, request.lengths
    itemsize = payload.dtype.itemsize
    if lengths == shape:
        return 0, payload.nbytes
    if 0 in lengths:
        return 0, 0
    start, stride, whole = 0, itemsize, True
    for dim in range(len(shape) - 1, -1, -1):
        if not whole and lengths[dim] != 1:
            return None
        whole = whole and lengths[dim] == shape[dim]
        start += offsets[dim] * stride
        stride *= shape[dim]
    return start, start + math.prod(lengths) * itemsize


# -- in runs ---------------------------------------------------------------------------------------------------------


def _read_runs(
    source: Source,
    file: str,
    wanted: Sequence[Wanted],
    name: str,
    planner: LoadPlanner,
    index: _TableIndex | None,
    verify: bool,
) -> None:
    """Read items through buffers, several runs ahead; check each item's checksum before any of it is handed on."""
    with ThreadPoolExecutor(_RUNS_AT_ONCE, thread_name_prefix="dcp_mem-read") as pool:
        for run, buffer in _ahead(pool, source, file, list(_runs(wanted))):
            for item in run:
                data = memoryview(buffer)[item.offset - run[0].offset : item.stop - run[0].offset]
                if verify and index is not None:
                    _verify(source, name, item, data, index)
                _hand_on(item, data, planner, index)


def _runs(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Neighbouring items that are better fetched together."""
    run: list[Wanted] = []
    for item in wanted:
        if run and (item.offset - run[-1].stop > _GAP or item.stop - run[0].offset > _RUN):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _ahead(
    pool: ThreadPoolExecutor, source: Source, file: str, runs: Sequence[list[Wanted]]
) -> Iterator[tuple[list[Wanted], bytearray]]:
    """Each run with its bytes, in order, while the next ones are being read."""
    reading: deque[Future[bytearray]] = deque()
    ahead = waiting = 0
    for run in runs:
        while ahead < len(runs) and (not reading or (len(reading) < _RUNS_AT_ONCE and waiting < _RUNS_AT_ONCE * _RUN)):
            reading.append(pool.submit(_fetch, source, file, runs[ahead]))
            waiting += runs[ahead][-1].stop - runs[ahead][0].offset
            ahead += 1
        waiting -= run[-1].stop - run[0].offset
        yield run, reading.popleft().result()


def _fetch(source: Source, file: str, run: Sequence[Wanted]) -> bytearray:
    start = run[0].offset
    buffer = _buffer(max(item.stop for item in run) - start)
    if buffer:
        source.read(file, [(_address(buffer), start, len(buffer))])
    return buffer


def _verify(source: Source, checkpoint: str, item: Wanted, data: memoryview, index: _TableIndex) -> None:
    if not index.crcs:
        return
    row = index.row(item.offset)
    if row is None:
        raise _corrupt(source, checkpoint, item, "no manifest has a checksum of it")
    for number in range(int(index.blocks.first[row]), int(index.blocks.first[row + 1])):
        start = int(index.blocks.offsets[number]) - item.offset
        found, saved = checksum(data[start : start + int(index.blocks.lengths[number])]), index.crcs[number]
        if found != saved:
            raise _corrupt(source, checkpoint, item, f"CRC32C {found:08x} where {saved:08x} was saved")


def _corrupt(source: Source, checkpoint: str, item: Wanted, detail: str) -> SegmentCorrupt:
    match = names.SEGMENT.fullmatch(item.file)
    rank = int(match[1]) if match else 0
    return SegmentCorrupt(checkpoint, rank, source.label, f"{item.request.storage_index.fqn}: {detail}")


def _hand_on(item: Wanted, data: memoryview, planner: LoadPlanner, index: _TableIndex | None) -> None:
    request = item.request
    if request.type == LoadItemType.BYTE_IO:
        planner.load_bytes(request, io.BytesIO(_plain_stream(item, data).read()))
        return
    payload = _payload(item, index)
    if payload is not None:
        start = payload.offset - item.offset
        raw = data[start : start + payload.nbytes]
        tensor = torch.frombuffer(raw, dtype=payload.dtype) if payload.nbytes else torch.empty(0, dtype=payload.dtype)
        tensor = tensor.view(payload.shape)
    else:
        tensor = torch.load(_plain_stream(item, data), map_location="cpu", weights_only=True)
    tensor = narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)
    target = planner.resolve_tensor(request)
    if target.layout is torch.strided:
        target = target.detach()  # values copied into a detached sparse tensor would stay there
    _check_shape(request, target)
    with torch.no_grad():
        target.copy_(tensor)
    planner.commit_tensor(request, target)


def _plain_stream(item: Wanted, data: memoryview) -> Any:
    stream: Any = io.BytesIO(data)
    if item.transforms:
        transforms = getattr(filesystem, "_StorageReaderTransforms", None)
        if transforms is None:
            raise DcpMemError(f"{item.file} was written with stream extensions, which need torch 2.7 or newer")
        stream = transforms().transform_load_stream(item.request, item.transforms, stream)
        stream = io.BytesIO(stream.read(-1))
    return stream


def _check_shape(request: ReadItem, target: torch.Tensor) -> None:
    if target.size() != request.lengths:
        raise DcpMemError(
            f"{request.dest_index.fqn}: the planner gave a tensor of {target.size()} for {request.lengths}"
        )


def _buffer(nbytes: int) -> bytearray:
    return bytearray(nbytes)


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
