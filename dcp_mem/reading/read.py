"""Reading a whole plan: each segment from the nearest source that has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from dcp_mem.errors import UntrustedMetadata
from dcp_mem.events import log
from dcp_mem.planning.reads import Reads, Saved, Wanted
from dcp_mem.reading.arrivals import Arrival, Arrivals
from dcp_mem.reading.fetch import Fetcher, fetch_all
from dcp_mem.reading.together import Company, fetch_together
from dcp_mem.recover import Opened
from dcp_mem.sources.base import Failures, Source
from dcp_mem.sources.elsewhere import PEERS, ElsewhereSource
from dcp_mem.sources.memory import MemorySource


def read_items(
    opened: Opened, plan: LoadPlan | Reads, planner: LoadPlanner, company: Company, *, verify: bool
) -> Counter[str]:
    """Read every item of the plan, from the nearest source that has it whole.

    Returns the bytes that this rank took, by the labels of the sources that were used.

    Where memory has the checkpoint on no rank, all ranks call this together: what several of them need is fetched once.
    Raises SegmentCorrupt when no source has an item whole; by then some destinations hold its bytes already.
    """
    if opened.choice.holders:
        return _read_from_all_nodes(opened, plan, planner, company, verify)
    nearest = opened.sources[0]
    if not opened.choice.memory:
        return _read_from_storage(opened, plan, planner, company, verify)
    if isinstance(plan, LoadPlan) or not isinstance(nearest, MemorySource):
        return _read_by_file(opened, _wanted(opened, plan), planner, verify)
    try:
        used = Counter({nearest.label: 0})
        for file, payloads in plan.straight():
            nearest.read_many(file, payloads, verify=verify)
            used[nearest.label] += int(payloads.nbytes.sum())
        used.update(_read_by_file(opened, plan.rest(), planner, verify))
        return used
    except Failures as error:
        if len(opened.sources) == 1:
            raise
        log.warning("%s; going on with %s", error, opened.sources[1].label)
        return _read_by_file(opened, plan.everything(), planner, verify)


def _read_from_storage(
    opened: Opened, plan: LoadPlan | Reads, planner: LoadPlanner, company: Company, verify: bool
) -> Counter[str]:
    """What storage alone has, all ranks together."""
    stored = opened.sources[0]
    used = Counter({stored.label: 0})

    def prepare() -> tuple[Fetcher, Arrivals]:
        prepared = _prepared(stored, opened.choice.name, _wanted(opened, plan), planner, verify)
        used[stored.label] += prepared[1].nbytes
        return prepared

    fetch_together(prepare, company)
    return used


def _read_from_all_nodes(
    opened: Opened, plan: LoadPlan | Reads, planner: LoadPlanner, company: Company, verify: bool
) -> Counter[str]:
    """What this node has, each rank for itself; then what other nodes have, and what storage alone has, all together."""
    memory = next((source for source in opened.sources if isinstance(source, MemorySource)), None)
    stored = next((source for source in opened.sources if not isinstance(source, MemorySource)), None)
    used: Counter[str] = Counter()

    def label_of(file: str) -> str:
        return PEERS if opened.is_in_memory(file) or stored is None else stored.label

    def prepare() -> tuple[Fetcher, Arrivals]:
        elsewhere = _wanted(opened, plan) if memory is None else _not_here(memory, opened, plan)
        used.update({label_of(item.file): 0 for item in elsewhere})
        source = ElsewhereSource(opened.description, stored, opened.is_in_memory)
        prepared = _prepared(source, opened.choice.name, elsewhere, planner, verify)
        for file, extents in prepared[1].extents().items():
            used[label_of(file)] += sum(stop - start for start, stop in extents)
        return prepared

    def read_what_is_here() -> None:
        if memory is not None:
            used[memory.label] += _read_what_is_here(memory, opened, plan, planner, verify)

    company = replace(company, memory=memory, holders=opened.choice.holders or {})
    fetch_together(prepare, company, alongside=read_what_is_here)
    return used


def _not_here(memory: MemorySource, opened: Opened, plan: LoadPlan | Reads) -> Sequence[Wanted]:
    """What a rank needs that doesn't lie in its node's memory."""
    if isinstance(plan, Reads):
        # Thousands of items are looked at one by one only where some of them don't lie here.
        files = {file for file, _ in plan.straight()} | {item.file for item in plan.rest()}
        if all(map(memory.has, files)):
            return ()
    return [item for item in _wanted(opened, plan) if not memory.has(item.file)]


def _read_what_is_here(
    memory: MemorySource, opened: Opened, plan: LoadPlan | Reads, planner: LoadPlanner, verify: bool
) -> int:
    """Read what lies in this node's memory; returns how many bytes that was."""
    nbytes = 0
    rest = plan.rest() if isinstance(plan, Reads) else _wanted(opened, plan)
    for file, payloads in plan.straight() if isinstance(plan, Reads) else ():
        if memory.has(file):
            memory.read_many(file, payloads, verify=verify)
            nbytes += int(payloads.nbytes.sum())
    here = [item for item in rest if memory.has(item.file)]
    return nbytes + _read_alone(memory, opened.choice.name, here, planner, verify)


def _wanted(opened: Opened, plan: LoadPlan | Reads) -> Sequence[Wanted]:
    return plan.everything() if isinstance(plan, Reads) else list(wanted_of(opened.metadata, plan))


def _read_by_file(opened: Opened, wanted: Iterable[Wanted], planner: LoadPlanner, verify: bool) -> Counter[str]:
    used: Counter[str] = Counter()
    files: dict[str, list[Wanted]] = {}
    for item in wanted:
        files.setdefault(item.file, []).append(item)
    for of_file in files.values():
        for position, source in enumerate(opened.sources):
            try:
                used[source.label] += _read_alone(source, opened.choice.name, of_file, planner, verify)
                break
            except Failures as error:
                if position + 1 == len(opened.sources):
                    raise
                log.warning("%s; going on with %s", error, opened.sources[position + 1].label)
    return used


def _read_alone(source: Source, name: str, wanted: Sequence[Wanted], planner: LoadPlanner, verify: bool) -> int:
    """Read these items; returns how many bytes that was."""
    if not isinstance(source, MemorySource):
        fetcher, arrivals = _prepared(source, name, wanted, planner, verify)
        fetch_all(fetcher, arrivals, arrivals.extents())
        return arrivals.nbytes
    fetcher, arrivals = _prepared(source, name, wanted, planner, False)
    rest: dict[str, list[tuple[int, int]]] = {}
    for file, of_file in arrivals.by_file():
        if verify:
            source.verify(file, [(one.start, one.stop) for one in of_file])
        straight = [one for one in of_file if one.is_straight]
        source.read(file, [one.straight_move() for one in straight])
        for one in straight:
            one.hand_on()
        rest[file] = [(one.start, one.stop) for one in of_file if not one.is_straight]
    fetch_all(fetcher, arrivals.without_straight(), rest)
    return arrivals.nbytes


def _prepared(
    source: Source, name: str, wanted: Sequence[Wanted], planner: LoadPlanner, verify: bool
) -> tuple[Fetcher, Arrivals]:
    fetcher = Fetcher(source, name, {item.file for item in wanted}, verify=verify)
    arrivals = [
        Arrival(item, planner, fetcher.table(item.file), by_blocks=fetcher.checks(item.file)) for item in wanted
    ]
    for one in arrivals:
        if one.is_empty:
            one.hand_on()
    awaited = Arrivals([one for one in arrivals if not one.is_empty])
    fetcher.whose = awaited.names
    return fetcher, awaited


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
