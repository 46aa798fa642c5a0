"""Reading a whole plan: each segment from the nearest source that has it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.tensor import DTensor

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid, SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.loading.device_reads import read_payloads
from dcp_mem.loading.fetch import Fetcher, fetch_all
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.peers import LoadGroup
from dcp_mem.loading.pending import (
    PendingItem,
    PendingItems,
    PendingPayloads,
    TableIndex,
    table_index,
)
from dcp_mem.loading.shared_fetch import fetch_together
from dcp_mem.loading.sources.base import PEERS, SOURCE_ERRORS, RemoteSource, Source
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.memory.device_copies import current_stream, on_stream_of
from dcp_mem.planning.plain_tensors import HOST, PLAIN
from dcp_mem.planning.reads import DirectRead, ItemRead, Reads

_MOST_NAMES = 8
_MOST_BUFFERED = 256 << 20
"""Bytes of buffers for values that can't be read into their tensors; more, where one item needs."""
_START = operator.attrgetter("start")


@value_class(kw_only=True)
class Reading:
    """An opened checkpoint, the plan to read from it, and the way to read it."""

    opened: OpenCheckpoint
    plan: Reads
    planner: LoadPlanner  # resolves tensors, and is given the bytes
    verify: bool  # hold bytes against checksums
    weights_only: bool
    # is given what was wrong with a source, where another one had the bytes whole
    troubles: list[str]

    def go_on(self, error: Exception, further: Source) -> None:
        """Note that a source is of no use, and go on with a further one."""
        log.warning("%s; going on with %s", error, further.label)
        self.troubles.append(str(error))

    def by_file(self) -> dict[str, _OfFile]:
        """Return all that is read, segment by segment."""
        return _by_file(self.plan.items_beside_host(), self.plan.direct_reads(on_host=True))

    def names(self, file: str, start: int, stop: int) -> str:
        """Return the names of the first few items that lie in these bytes, for people."""
        named = [
            one
            for one in self.plan.everything()
            if one.file == file and one.offset < stop and start < one.stop
        ]
        named.sort(key=lambda one: one.offset)
        return ", ".join(one.request.storage_index.fqn for one in named[:_MOST_NAMES])


def read_items(reading: Reading, group: LoadGroup) -> Counter[str]:
    """Read every item of the plan, from the nearest source that has it whole.

    Where some node lacks the checkpoint in memory, all ranks call this together: what several of
    them need is fetched once. Where it fails, some tensors hold new bytes already. Returns bytes
    that this rank took, by the label of the source. Raises SegmentCorrupt, UntrustedObject.
    """
    opened = reading.opened
    if opened.choice.holders:
        return _read_from_all_nodes(reading, group)
    if not opened.choice.memory:
        return _read_from_storage(reading, group)
    nearest, *further = opened.sources
    if isinstance(nearest, MemorySource) and len(reading.plan.payloads.offset):
        try:
            return Counter({nearest.label: _read_local(nearest, reading, lambda file: True)})
        except SOURCE_ERRORS as error:
            if not further:
                raise
            reading.go_on(error, further[0])  # each segment from the nearest source after all
    return _read_by_file(reading)


@dataclass(slots=True)
class _OfFile:
    """What is read of one segment: items, and payloads that go straight into tensors."""

    items: list[ItemRead] = field(default_factory=list)
    payloads: DirectRead | None = None


def _by_file(
    items: Iterable[ItemRead], payloads: Iterable[tuple[str, DirectRead]] = ()
) -> dict[str, _OfFile]:
    found = {file: _OfFile(payloads=of_file) for file, of_file in payloads}
    for item in items:
        found.setdefault(item.file, _OfFile()).items.append(item)
    return found


# -- from this node's memory, and other sources alone ----------------------------------------------


def _note_writes(reading: Reading) -> None:
    """Raise torch's counters of writes of tensors on devices, which are written to by address.

    A later save may tell by them whether a frozen tensor has changed.
    """
    if (reading.plan.payloads.device == HOST).all():
        return
    assert isinstance(reading.planner, DefaultLoadPlanner)
    leaves = reading.planner.state_dict.values()
    tensors = [one._local_tensor if type(one) is DTensor else one for one in leaves]
    increment_version(
        [one for one in tensors if type(one) in PLAIN and one.is_cuda and not one.is_inference()]
    )


def _read_by_file(reading: Reading) -> Counter[str]:
    """Read each segment from the nearest source that has what is needed of it whole."""
    sources, used = reading.opened.sources, Counter[str]()
    for file, of_file in reading.by_file().items():
        for source, further in zip(sources, [*sources[1:], None], strict=True):
            try:
                used[source.label] += _read_from(source, reading, {file: of_file})
                break
            except SOURCE_ERRORS as error:
                if further is None:
                    raise
                reading.go_on(error, further)
    return used


# -- together with other ranks ---------------------------------------------------------------------


def _read_from_storage(reading: Reading, group: LoadGroup) -> Counter[str]:
    """Read what storage alone has, all ranks together."""
    stored = reading.opened.sources[0]
    used = Counter({stored.label: 0})

    def prepare() -> tuple[Fetcher, PendingItems]:
        fetcher, pending = _prepared(stored, reading, reading.by_file(), verify=reading.verify)
        used[stored.label] += pending.nbytes
        return fetcher, pending

    fetch_together(prepare, group)
    return used


def _read_from_all_nodes(reading: Reading, group: LoadGroup) -> Counter[str]:
    """Read what lies on several nodes.

    Each rank reads by itself what its node has in memory. Meanwhile all ranks together fetch what
    other nodes have, and what storage alone has.
    """
    opened = reading.opened
    memory = next((source for source in opened.sources if isinstance(source, MemorySource)), None)
    stored = next(
        (source for source in opened.sources if not isinstance(source, MemorySource)), None
    )
    used: Counter[str] = Counter()

    def label_of(file: str) -> str:
        return PEERS if opened.is_in_memory(file) or stored is None else stored.label

    def prepare() -> tuple[Fetcher, PendingItems]:
        _raise_if_left(opened, memory, group.ranks.rank)
        by_file = _not_in(memory, reading)
        used.update(dict.fromkeys(map(label_of, by_file), 0))
        source = RemoteSource(opened.description, stored, opened.is_in_memory)
        fetcher, pending = _prepared(source, reading, by_file, verify=reading.verify)
        for file, extents in pending.extents().items():
            used[label_of(file)] += sum(stop - start for start, stop in extents)
        return fetcher, pending

    launching = current_stream()

    def read_local() -> None:
        if memory is not None:
            with on_stream_of(launching):
                used[memory.label] += _read_local(memory, reading, memory.has)

    group = replace(
        group,
        is_held=opened.choice.memory,
        memory=memory,
        holders=opened.choice.holders or {},
    )
    fetch_together(prepare, group, alongside=read_local)
    return used


def _raise_if_left(opened: OpenCheckpoint, memory: MemorySource | None, rank: int) -> None:
    """Raise SegmentCorrupt where this node lacks what it said it has: other nodes wait for it."""
    present = () if memory is None else memory.present
    for number, ranks in (opened.choice.holders or {}).items():
        if rank in ranks and number not in present:
            detail = "it has left this node's memory since the load began"
            raise SegmentCorrupt(opened.choice.name, number, MemorySource.label, detail)


def _not_in(memory: MemorySource | None, reading: Reading) -> dict[str, _OfFile]:
    """Return what doesn't lie in this node's memory."""
    if memory is None:
        return reading.by_file()
    # Thousands of items for devices are made only where some segments don't lie here.
    files = {file for file, _ in reading.plan.direct_reads()}
    files |= {item.file for item in reading.plan.rest()}
    if all(map(memory.has, files)):
        return {}
    return {file: found for file, found in reading.by_file().items() if not memory.has(file)}


def _read_local(memory: MemorySource, reading: Reading, is_wanted: Callable[[str], bool]) -> int:
    """Read these segments from this node's memory; return the bytes."""
    _note_writes(reading)
    items = [item for item in reading.plan.rest() if is_wanted(item.file)]
    payloads = [one for one in reading.plan.direct_reads() if is_wanted(one[0])]
    return _read_from_memory(memory, reading, _by_file(items, payloads))


# -- from one source -------------------------------------------------------------------------------


def _read_from(source: Source, reading: Reading, by_file: Mapping[str, _OfFile]) -> int:
    """Read this from one source; return its bytes."""
    if isinstance(source, MemorySource):
        return _read_from_memory(source, reading, by_file)
    fetcher, pending = _prepared(source, reading, by_file, verify=reading.verify)
    fetch_all(fetcher, pending, pending.extents())
    return pending.nbytes


def _read_from_memory(
    memory: MemorySource, reading: Reading, by_file: Mapping[str, _OfFile]
) -> int:
    """Read straight into tensors where that will do, the rest into buffers; return the bytes.

    One pass over each segment, unless the buffers would take too much memory.
    """
    nbytes = 0
    for file, of_file in by_file.items():
        payloads, items = of_file.payloads, list[PendingItem]()
        if of_file.items:
            index = table_index(memory.tables([file])[file])
            items = _pending(memory, reading, file, of_file.items, index)
        for some in list(_few_buffers(items)) or [[]]:
            columns = _columns(some, payloads)
            nbytes += int(columns.nbytes.sum())
            read_payloads(memory, file, columns, verify=reading.verify)
            for item in some:
                item.deliver()
            payloads = None
    return nbytes


def _few_buffers(items: Sequence[PendingItem]) -> Iterator[list[PendingItem]]:
    """Yield items together whose buffers take some memory at most, in the order of their bytes."""
    some, nbytes = list[PendingItem](), 0
    for item in sorted(items, key=_START):
        of_item = 0 if item.is_direct else item.stop - item.start
        if some and nbytes + of_item > _MOST_BUFFERED:
            yield some
            some, nbytes = [], 0
        some.append(item)
        nbytes += of_item
    if some:
        yield some


def _columns(items: Sequence[PendingItem], payloads: DirectRead | None) -> DirectRead:
    """Return payloads, and what items read into their tensors or buffers, by ascending offsets."""
    if payloads is not None and not items:
        return payloads
    address, offset, nbytes = np.array([one.read() for one in items], np.int64).reshape(-1, 3).T
    nowhere = np.zeros(len(items), np.int64)
    reads = DirectRead(
        file=nowhere, address=address, offset=offset, nbytes=nbytes, device=nowhere + HOST
    )
    return reads if payloads is None else payloads.joined(reads)


def _pending(
    source: Source,
    reading: Reading,
    file: str,
    items: Iterable[ItemRead],
    index: TableIndex | None,
    *,
    by_blocks: bool = False,
) -> list[PendingItem]:
    """Return the items of a segment that wait for bytes; those without any are delivered."""
    name = reading.opened.choice.name
    found = [
        PendingItem(
            item,
            reading.planner,
            index,
            by_blocks=by_blocks,
            weights_only=reading.weights_only,
            corrupt=partial(SegmentCorrupt, name, names.rank_of(file), source.label),
        )
        for item in items
    ]
    for empty in [one for one in found if one.start == one.stop]:
        empty.deliver()
    return [one for one in found if one.start < one.stop]


def _prepared(
    source: Source, reading: Reading, by_file: Mapping[str, _OfFile], *, verify: bool
) -> tuple[Fetcher, PendingItems]:
    """Return what fetches from a source, and what waits for bytes."""
    name = reading.opened.choice.name
    fetcher = Fetcher(source, name, by_file.keys(), verify=verify)
    fetcher.names_of = reading.names
    pending, payloads = list[PendingItem](), dict[str, PendingPayloads]()
    for file, of_file in by_file.items():
        index, by_blocks = fetcher.table(file), fetcher.checks(file)
        if of_file.payloads is not None and index is not None:
            try:
                found = PendingPayloads(of_file.payloads, index, by_blocks=by_blocks)
            except ManifestInvalid as error:
                why = f"{file}: {error}"
                raise SegmentCorrupt(name, names.rank_of(file), source.label, why) from None
            payloads[file] = found
        pending += _pending(source, reading, file, of_file.items, index, by_blocks=by_blocks)
    return fetcher, PendingItems(pending, payloads)
