"""One rank's task in replicating or rebuilding a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dcp_mem.comm import Ranks
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Outcome
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.manifest import ItemTable, Manifest, items_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.slots import SlotPool
from dcp_mem.replicating.plan import FilePlan

SMALL_CHUNK = 2 << 20
"""Bytes of a chunk that is added up from private memory, of which each sender takes a few."""


def _no_slot(plan: FilePlan) -> Slot | str:
    return "no slot was claimed"


def nothing() -> None:
    """Do nothing, where something else may be called."""


@value_class(kw_only=True)
class ReplicationTask:
    """Files of a checkpoint to assemble, and this rank's part in that."""

    call: str  # what all ranks have agreed to call the task
    manifest: Manifest
    ranks: Ranks
    # the plans that this rank sends or receives for, in an order that all ranks share
    plans: Sequence[FilePlan]
    # for files that this rank receives, the slot, or why there is none
    slots: Mapping[str, Slot | str]
    own_slot: Slot | None  # the slot of this rank's own segment, if this process has staged it
    timeout: float
    transport: str  # what moves the bytes
    # claims a slot for a file that isn't shared after all; or returns why there is none
    claim: Callable[[FilePlan], Slot | str] = _no_slot
    # save ids of checkpoints that turned out to hold stale frozen tensors of this rank
    stale: frozenset[str] = frozenset()
    on_replicated: Callable[[], None] = nothing  # called once other nodes have all copies
    store: object = None  # keeps the store served that the ranks connect through

    @property
    def makes_slots(self) -> bool:
        """Whether slots had to be made for the files that this rank receives."""
        return any(
            not isinstance(slot, str) and slot.mapping is None for slot in self.slots.values()
        )


def slot_for(pool: SlotPool, plan: FilePlan) -> Slot | str:
    """Claim a slot for a file that other ranks will send, and set its memory aside.

    No page of it is populated yet. Returns why there is none, where that is so.
    """
    try:
        slot = pool.take(plan.slot_nbytes, "")
        slot.set_aside(plan.nbytes, plan.slot_nbytes)
        return slot
    except (DcpMemError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def abandon_all(pool: SlotPool, slots: Iterable[Slot | str]) -> None:
    """Give back the slots of a task that isn't begun; texts say why there is none."""
    for slot in slots:
        if isinstance(slot, Slot):
            pool.abandon(slot)


def newest_replicated(memory: JobMemory, manifest: Manifest) -> LocalCheckpoint | None:
    """Return the newest replicated checkpoint that lies here, besides one. No other one is begun
    with: it may be evicted meanwhile, and then its slots are counted on.
    """
    for local in memory.checkpoints():
        is_other = local.manifest.save_id != manifest.save_id
        is_replicated = local.replication.outcome == Outcome.REPLICATED
        if is_other and is_replicated and local.manifest.scope == manifest.scope:
            return local
    return None


class SegmentTables:
    """The item tables of a checkpoint's segments, from its catalog, which is read once."""

    def __init__(self, directory: str, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._catalog: Catalog | None = None

    def __getitem__(self, file: str) -> ItemTable:
        if self._catalog is None:
            self._catalog = read_catalog(self._directory, self._manifest.catalog)
        segment = self._manifest.segments.numbered(names.rank_of(file))
        return items_of(self._catalog.layout(segment.rank), segment.tail)
