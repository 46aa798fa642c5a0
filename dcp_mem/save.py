"""The stages of a save, in order: agree, stage, complete. Each takes the previous one's result.

Nothing is decided by one rank alone, and no rank fails alone: what goes wrong locally travels with the next exchange,
so that all ranks raise together and none is left waiting.
"""

from __future__ import annotations

import io
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_mem import faults
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointExists, ConfigError, DcpMemError, MemoryBudgetExceeded, RankFailed
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.checksums import checksum
from dcp_mem.format.frames import Spec
from dcp_mem.format.layout import align
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata import MetadataTemplate, RankItems, make_template
from dcp_mem.memory import pinning
from dcp_mem.memory.copying import Move, copy
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import is_leased
from dcp_mem.memory.slots import Slot, capacity_for
from dcp_mem.policy.admission import Kept, NodeMemory, Verdict, admit, retire
from dcp_mem.ranks import Ranks
from dcp_mem.session import PlanLayout, SavedPlan, Session, Topology
from dcp_mem.values import Segment

T = TypeVar("T")
_EXPECTED = operator.attrgetter("tensor_data.properties.dtype", "tensor_data.chunk.sizes")
_FQN, _OFFSET = operator.attrgetter("index.fqn"), operator.attrgetter("index.offset")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_BATCH = 256 << 20
_TAIL_ROOM = 1 << 20
_COMPLAIN_EVERY = 10.0


@dataclass(frozen=True, slots=True)
class Caller:
    """One rank's part in one save. scope: "" or the rank that saves alone."""

    settings: Settings
    session: Session
    ranks: Ranks
    rank: int
    scope: str
    name: str

    @property
    def plan_key(self) -> tuple[str, str]:
        """Saves with the same key follow each other with the same plan, as a rule."""
        return self.scope, self.ranks.key


@dataclass(frozen=True, slots=True)
class Attempt:
    """What all ranks agreed on for this save."""

    save_id: str
    created: float
    persist: bool
    topology: Topology
    started: float


@dataclass(frozen=True, slots=True)
class Staged:
    """This rank's sealed segment, and where its items lie in it, in the order of `items`."""

    segment: Segment
    items: Sequence[WriteItem]
    offsets: Sequence[int]
    lengths: Sequence[int]
    slot: Slot
    layout: PlanLayout


# -- agree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """This rank's plan, taken apart. nbytes: what its segment will take, as far as plan and last save can tell."""

    tensors: Sequence[WriteItem]
    objects: Sequence[WriteItem]
    layout: PlanLayout
    nbytes: int


def plan_segment(caller: Caller, plan: SavePlan) -> Planned:
    """Find (or make) the layout of this rank's plan."""
    tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
    objects = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
    layout = caller.session.plan_layout(expected_specs(tensors))
    saved = caller.session.saved.get(caller.plan_key)
    tail = sum(align(nbytes) for _, nbytes in saved.tail) if saved is not None else 0
    return Planned(tensors, objects, layout, layout.layout.nbytes + tail)


def expected_specs(tensors: Sequence[WriteItem]) -> list[Spec]:
    """Dtypes and shapes as the plan has them."""
    return list(map(_EXPECTED, tensors))


@dataclass(frozen=True, slots=True)
class _Survey:
    """What a rank brings to the agreement; what concerns its node comes from the node's leader.

    save_id, persist, now: what this rank would choose as the coordinator. exists, newest: of its node's checkpoints.
    """

    name: str
    save_id: str = ""
    persist: bool = False
    now: float = 0.0
    needed: int = 0
    spare: int = 0
    node: NodeMemory | None = None
    exists: bool = False
    newest: float = 0.0
    error: str = ""


def agree(caller: Caller, planned: Planned | Exception) -> Attempt | None:
    """Settle save id, persistence, eviction and admission for all ranks; None where the save is to be skipped.

    planned: an exception where this rank couldn't plan. Raises on all ranks alike: MemoryBudgetExceeded,
    CheckpointExists, ConfigError, RankFailed.
    """
    started = complained = time.monotonic()
    session = caller.session
    topology = session.topology(caller.ranks)
    while True:
        surveys = caller.ranks.exchange(_survey_or_error(caller, topology, planned))
        if isinstance(planned, Exception):
            raise planned
        verdict = _verdict(caller, topology, surveys)
        if topology.is_leader:
            _evict(session.memory, verdict.evict, "to make room for a newer checkpoint")
        if verdict.evict:
            caller.ranks.exchange(None)  # nobody stages before the room that is counted on is there
        if verdict.action == "stage":
            break
        if caller.settings.on_full == "raise" or (caller.settings.on_full == "wait" and verdict.lasting):
            raise MemoryBudgetExceeded(verdict.needed, verdict.limit, f"{caller.name}: {verdict.why}")
        if caller.settings.on_full == "skip":
            log.warning("%s is skipped: %s", caller.name, verdict.why)
            return None
        complained = _complain(caller, verdict, started, complained)
        session.wake_agent(caller.settings)
        time.sleep(0.02)
    faults.point("save.agreed")
    proposal = surveys[0]  # the coordinator's
    created = max(proposal.now, max(survey.newest for survey in surveys) + 1e-3)
    return Attempt(proposal.save_id, created, proposal.persist, topology, started)


def _survey_or_error(caller: Caller, topology: Topology, planned: Planned | Exception) -> _Survey:
    try:
        if isinstance(planned, Exception):
            raise planned
        caller.session.stop_prefaulting()
        caller.session.slots.take_back(caller.session.memory.lists)  # if the last save failed, perhaps elsewhere
        if topology.is_leader and not caller.session.swept:
            caller.session.memory.sweep()
        caller.session.swept = True
        return _survey(caller, topology, planned.nbytes)
    except Exception as error:
        return _Survey(caller.name, error=f"{type(error).__name__}: {error}")


def _survey(caller: Caller, topology: Topology, nbytes: int) -> _Survey:
    session = caller.session
    mine = _Survey(
        name=caller.name,
        save_id=names.new_save_id(),
        persist=caller.settings.persist.wants(session.persisted.saves, session.persisted.seconds()),
        now=time.time(),
        needed=capacity_for(nbytes + _TAIL_ROOM),
        spare=min(session.slots.spare_bytes(), capacity_for(nbytes + _TAIL_ROOM)),
    )
    if not topology.is_leader:
        return mine
    memory = caller.session.memory
    kept = _kept(memory, caller.scope)
    node = NodeMemory(
        kept=kept,
        used=memory.allocated_bytes(),
        spare=0,
        free=memory.free_bytes(),
        limit=caller.settings.memory_limit,
        needed=0,
    )
    exists = not caller.settings.overwrite and any(
        held.manifest.scope == caller.scope for held in memory.find(caller.name)
    )
    return replace(mine, node=node, exists=exists, newest=max((one.created for one in kept), default=0.0))


def keep_no_more(memory: JobMemory, scope: str, keep: int) -> None:
    """Evict what a newer checkpoint has superseded, but for what is being read or flushed at this moment."""
    _evict(memory, retire(_kept(memory, scope), keep), "superseded by a newer checkpoint")


def _kept(memory: JobMemory, scope: str) -> tuple[Kept, ...]:
    result = []
    for held in memory.held():
        if held.manifest.scope != scope:
            continue
        try:
            busy = is_leased(held.manifest_path)
        except FileNotFoundError:
            continue
        nbytes = sum(segment.nbytes for segment in held.manifest.of_node(memory.node))
        result.append(
            Kept(held.manifest.save_id, held.manifest.created, nbytes, held.manifest.persist, held.pending, busy)
        )
    return tuple(result)


def _verdict(caller: Caller, topology: Topology, surveys: Sequence[_Survey]) -> Verdict:
    """The same on every rank, from what every rank brought."""
    failures = [(rank, survey.error) for rank, survey in enumerate(surveys) if survey.error]
    if failures:
        raise RankFailed(f"preparing {caller.name}", failures)
    named = sorted({survey.name for survey in surveys})
    if len(named) > 1:
        raise ConfigError(f"the ranks save under different checkpoint ids: {', '.join(named)}")
    if any(survey.exists for survey in surveys):
        raise CheckpointExists(caller.name, "memory")
    nodes = []
    for leader, survey in enumerate(surveys):
        if survey.node is not None:
            neighbours = topology.neighbours(topology.nodes[leader])
            nodes.append(
                replace(
                    survey.node,
                    needed=sum(surveys[rank].needed for rank in neighbours),
                    spare=sum(surveys[rank].spare for rank in neighbours),
                )
            )
    return admit(nodes, caller.settings.keep)


def _evict(memory: JobMemory, save_ids: frozenset[str], why: str) -> None:
    for held in memory.held() if save_ids else ():
        if held.manifest.save_id in save_ids:
            try:
                memory.evict(held, why)
            except OSError as error:  # the others go on to the next exchange, and so must this rank
                log.warning("%s could not be evicted: %s", held.name, error)


def _complain(caller: Caller, verdict: Verdict, started: float, complained: float) -> float:
    if time.monotonic() - complained < _COMPLAIN_EVERY:
        return complained
    log.warning(
        "%s has waited %.0f s for room in memory: %s (on_full='skip' would go on without it)",
        caller.name,
        time.monotonic() - started,
        verdict.why,
    )
    return time.monotonic()


# -- stage ---------------------------------------------------------------------------------------------------------


class _OtherThanPlanned(Exception):
    """A tensor isn't what the layout expects: the plan changed under a planner that transforms tensors."""


def stage(caller: Caller, attempt: Attempt, planned: Planned, planner: SavePlanner) -> Staged:
    """Copy this rank's items into a slot and seal it as a segment. Raises MemoryBudgetExceeded, or what the planner raises."""
    try:
        return _stage_into_slot(caller, attempt, planned, planner)
    except _OtherThanPlanned:
        dense = [_spec(_resolve(planner, item)) for item in planned.tensors]
        learnt = caller.session.learn_layout(planned.layout.expected, dense)
        return _stage_into_slot(caller, attempt, replace(planned, layout=learnt), planner)


def _stage_into_slot(caller: Caller, attempt: Attempt, planned: Planned, planner: SavePlanner) -> Staged:
    session, layout = caller.session, planned.layout.layout
    slot = session.slots.claim(max(planned.nbytes, layout.nbytes) + _TAIL_ROOM, planned.layout.frames)
    try:
        faults.point("stage.claimed")
        session.put_frames(slot, planned.layout)
        slow = _copy_tensors(slot, planned.layout, planned.tensors, planner)
        faults.point("stage.copied")
        tail = tuple(_append(slot, layout.nbytes, _streams(planner, slow, planned.objects)))
        segment = _seal(caller, attempt, slot, planned.layout, tail)
        faults.point("stage.sealed")
    except BaseException:
        session.slots.abandon(slot)
        raise
    slow_ids = set(map(id, slow))
    dense = [item for item in planned.tensors if id(item) not in slow_ids] if slow else planned.tensors
    return Staged(
        segment,
        [*dense, *slow, *planned.objects],
        [*layout.offsets.tolist(), *(offset for offset, _ in tail)],
        [*layout.lengths.tolist(), *(nbytes for _, nbytes in tail)],
        slot,
        planned.layout,
    )


def _spec(tensor: torch.Tensor) -> Spec | None:
    """Dtype and shape of a tensor with a plain dense payload, None for one that takes the slow road."""
    if not _is_dense(tensor):
        return None
    return tensor.dtype, tensor.shape


def _is_dense(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
    if plain and tensor.device.type == "meta":
        raise DcpMemError("a tensor on the meta device has no data to save: materialise the module first")
    return plain


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise DcpMemError(f"the planner resolved {item.index.fqn} to a {type(tensor).__name__}, not to a tensor")
    return tensor.detach()


def _hands_out_as_is(planner: SavePlanner) -> bool:
    """Whether the planner is known to resolve a plain tensor to the one in its state dict."""
    kind, default = type(planner), DefaultSavePlanner
    hooks = ("resolve_data", "lookup_object", "transform_object")
    return all(getattr(kind, hook, None) is getattr(default, hook) for hook in hooks)


def _copy_tensors(
    slot: Slot, plan_layout: PlanLayout, tensors: Sequence[WriteItem], planner: SavePlanner
) -> list[WriteItem]:
    """Copy every dense tensor to its place; returns the items that have none. Raises _OtherThanPlanned."""
    layout = plan_layout.layout
    places = list(zip((slot.address + layout.payload_offsets).tolist(), layout.payload_nbytes.tolist(), strict=True))
    moves = _plain_moves(places, plan_layout, tensors, planner)
    if moves is None:
        return _copy_one_by_one(slot, places, plan_layout, tensors, planner)
    _copy_batch(moves, _Others(slot))
    return []


def _plain_moves(
    places: Sequence[tuple[int, int]], plan_layout: PlanLayout, tensors: Sequence[WriteItem], planner: SavePlanner
) -> list[Move] | None:
    """The moves of a plan that is all plain contiguous CPU tensors, handed out as they are; None for any other.

    Twenty thousand tensors one by one, through the planner, take longer than the copy of their gigabyte.
    """
    if not _hands_out_as_is(planner) or not all(item.type is WriteItemType.TENSOR for item in tensors):
        return None
    state, tensor_type = planner.state_dict, torch.Tensor  # type: ignore[attr-defined]
    found = [state.get(fqn) for fqn in map(_FQN, tensors)]
    if not _PLAIN.issuperset(map(type, found)) or [(one.dtype, one.shape) for one in found] != plan_layout.dense:
        return None
    usual = all(one.is_cpu and one.layout is torch.strided for one in found) and all(
        map(tensor_type.is_contiguous, found)
    )
    if not usual or any(map(tensor_type.is_neg, found)) or any(map(tensor_type.is_conj, found)):
        return None
    pointers = map(tensor_type.data_ptr, found)
    return [(address, pointer, nbytes) for (address, nbytes), pointer in zip(places, pointers, strict=True) if nbytes]


def _copy_one_by_one(
    slot: Slot,
    places: Sequence[tuple[int, int]],
    plan_layout: PlanLayout,
    tensors: Sequence[WriteItem],
    planner: SavePlanner,
) -> list[WriteItem]:
    """Copy tensors of any kind, as the planner resolves them, in batches: it may make them just for us."""
    others, slow, place = _Others(slot), [], iter(places)
    moves: list[Move] = []
    alive: list[torch.Tensor] = []
    waiting = 0
    for item, spec in zip(tensors, plan_layout.dense, strict=True):
        tensor = _resolve(planner, item)
        if _spec(tensor) != spec:
            raise _OtherThanPlanned
        if spec is None:
            slow.append(item)
            continue
        address, nbytes = next(place)
        if not nbytes:
            continue
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            moves.append((address, tensor.data_ptr(), nbytes))
        else:
            others.copy(tensor, address, nbytes)
        alive.append(tensor)
        waiting += nbytes
        if waiting >= _BATCH:
            _copy_batch(moves, others)
            moves, alive, waiting = [], [], 0
    _copy_batch(moves, others)
    return slow


def _copy_batch(moves: Sequence[Move], others: _Others) -> None:
    if faults.is_armed("stage.copying"):
        middle = len(moves) // 2
        copy(moves[:middle])
        faults.point("stage.copying")
        moves = moves[middle:]
    others.start()
    copy(moves)
    others.finish()


class _Others:
    """Copies of tensors that aren't plain CPU memory: strided ones, and those on devices, on a side stream each."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._waiting: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._streams: list[torch.cuda.Stream] = []

    def copy(self, tensor: torch.Tensor, address: int, nbytes: int) -> None:
        assert self._slot.mapping is not None
        place = torch.frombuffer(
            self._slot.mapping, dtype=torch.uint8, count=nbytes, offset=address - self._slot.address
        )
        target = place.view(tensor.dtype).view(tensor.shape)
        if tensor.device.type != "cuda":
            target.copy_(tensor.detach())
            return
        self._waiting.setdefault(tensor.device, []).append((target, tensor.detach()))

    def start(self) -> None:
        """Send off the copies from devices, behind whatever makes their sources: a planner may have launched it just now."""
        for device, copies in self._waiting.items():
            stream = pinning.side_stream(device)
            self._streams.append(stream)
            with torch.cuda.stream(stream):
                for target, source in copies:
                    # Resolved here: torch would conjugate or negate the target while the copy is still under way.
                    target.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
        self._waiting.clear()


def _streams(planner: SavePlanner, slow: Sequence[WriteItem], objects: Sequence[WriteItem]) -> Iterator[memoryview]:
    """The bytes of what goes to the tail, one item at a time."""
    for item in slow:
        stream = io.BytesIO()
        tensor = _resolve(planner, item).cpu()
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save would write all of the storage that it is a view of
        torch.save(tensor, stream)
        yield stream.getbuffer()
    for item in objects:
        data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise DcpMemError(f"the planner resolved {item.index.fqn} to a {type(data).__name__}, not to io.BytesIO")
        yield data.getbuffer()


def _append(slot: Slot, offset: int, streams: Iterator[memoryview]) -> Iterator[tuple[int, int]]:
    """Write streams behind each other from `offset` on; yields where each lies."""
    for data in streams:
        slot.reserve(offset + len(data))
        slot.write_at(offset, data)
        yield offset, len(data)
        offset = align(offset + max(len(data), 1))  # an empty item has a place of its own, by which it is found


def _seal(
    caller: Caller, attempt: Attempt, slot: Slot, plan_layout: PlanLayout, tail: tuple[tuple[int, int], ...]
) -> Segment:
    memory, layout = caller.session.memory, plan_layout.layout
    directory = memory.make_checkpoint_directory(caller.name)
    caller.session.link_layout(plan_layout, directory)
    file = names.segment_file(caller.rank, attempt.save_id)
    nbytes = tail[-1][0] + tail[-1][1] if tail else layout.nbytes
    caller.session.slots.seal(slot, os.path.join(directory, file))
    return Segment(caller.rank, memory.node, file, nbytes, layout.key, tail)


# -- complete ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A value, or the reason why there is none, on its way to the other ranks."""

    value: T | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Receipt:
    segment: Segment
    changed: bool


def complete(
    caller: Caller,
    attempt: Attempt,
    staged: Staged | Exception,
    metadata: Callable[[], Metadata],
    structure_changed: bool,
) -> tuple[Manifest, Staged]:
    """Exchange receipts and mark the checkpoint COMPLETE on every node; on return this node can restore it.

    staged: this rank's segment, or why it has none. metadata: makes the global metadata; asked of the
    coordinator, and only when the plan changed. Raises on all ranks where any of them failed.
    """
    try:
        return _complete(caller, attempt, staged, metadata, structure_changed)
    except BaseException:
        caller.session.swept = False
        raise
    finally:
        if isinstance(staged, Staged):
            caller.session.slots.share(staged.slot)


def _complete(
    caller: Caller,
    attempt: Attempt,
    staged: Staged | Exception,
    metadata: Callable[[], Metadata],
    structure_changed: bool,
) -> tuple[Manifest, Staged]:
    receipts = _exchange_receipts(caller, staged, structure_changed)
    assert isinstance(staged, Staged)
    faults.point("complete.receipts")
    saved = caller.session.saved.get(caller.plan_key)
    if saved is None or any(receipt.changed for receipt in receipts):
        saved = _new_saved_plan(caller, staged, metadata)
        caller.session.heap_grew = True
    manifest = _manifest(caller, attempt, [receipt.segment for receipt in receipts])
    manifest = _publish_on_all_nodes(caller, attempt, manifest, saved.template)
    if attempt.topology.is_leader:
        keep_no_more(caller.session.memory, caller.scope, caller.settings.keep)
        faults.point("complete.evicted")
    caller.session.saved[caller.plan_key] = saved
    caller.session.persisted.note(attempt.persist)
    return manifest, staged


def _exchange_receipts(caller: Caller, staged: Staged | Exception, structure_changed: bool) -> list[_Receipt]:
    if isinstance(staged, Staged):
        changed = structure_changed or _differs(caller.session.saved.get(caller.plan_key), staged)
        mine = Outcome(_Receipt(staged.segment, changed))
    else:
        mine = Outcome(error=f"{type(staged).__name__}: {staged}")
    outcomes = caller.ranks.exchange(mine)
    failures = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error]
    if failures:
        caller.session.swept = False
        if not isinstance(staged, Staged):
            raise staged
        caller.session.slots.abandon(staged.slot)
        raise RankFailed(f"saving {caller.name}", failures)
    return [outcome.value for outcome in outcomes if outcome.value is not None]


def _differs(saved: SavedPlan | None, staged: Staged) -> bool:
    return (
        saved is None
        or saved.layout != staged.segment.layout
        or saved.tail != staged.segment.tail
        or saved.items != _fingerprint(staged.items)
    )


def _fingerprint(items: Sequence[WriteItem]) -> int:
    """The same for the same names and offsets in the same order. (The items themselves would hold megabytes.)"""
    return hash((*map(_FQN, items), *map(_OFFSET, items)))


def _new_saved_plan(caller: Caller, staged: Staged, metadata: Callable[[], Metadata]) -> SavedPlan:
    """The coordinator makes the metadata template from everyone's items; everyone gets it."""
    extents = list(zip(staged.offsets, staged.lengths, strict=True))
    gathered = caller.ranks.gather(RankItems(caller.rank, [item.index for item in staged.items], extents))
    outcome: Outcome[MetadataTemplate] = Outcome()
    if caller.ranks.rank == 0:
        try:
            outcome = Outcome(make_template(metadata(), gathered))
        except Exception as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
    outcome = caller.ranks.broadcast(outcome)
    if outcome.value is None:
        raise RankFailed(f"describing {caller.name}", [(0, outcome.error)])
    return SavedPlan(
        outcome.value,
        _fingerprint(staged.items),
        staged.segment.layout,
        staged.segment.tail,
    )


def _manifest(caller: Caller, attempt: Attempt, segments: Sequence[Segment]) -> Manifest:
    return Manifest(
        name=caller.name,
        save_id=attempt.save_id,
        scope=caller.scope,
        job=caller.settings.job,
        created=attempt.created,
        world_size=caller.ranks.size,
        persist=attempt.persist,
        committer=segments[0].node,
        segments=tuple(segments),
        metadata_crc=0,
        stage_seconds=time.monotonic() - attempt.started,
    )


def _publish_on_all_nodes(caller: Caller, attempt: Attempt, manifest: Manifest, template: MetadataTemplate) -> Manifest:
    """Publish on this node, if this rank leads it; no node gives up an older checkpoint before all have this one."""
    outcome: Outcome[Manifest] = Outcome(manifest)
    failure: Exception | None = None
    if attempt.topology.is_leader:
        try:
            outcome = Outcome(_publish(caller, manifest, template))
        except Exception as error:
            failure, outcome = error, Outcome(error=f"{type(error).__name__}: {error}")
    errors = [outcome.error]
    if len(set(attempt.topology.nodes)) > 1:
        errors = caller.ranks.exchange(outcome.error)
    if failure is not None:
        raise failure
    failures = [(rank, error) for rank, error in enumerate(errors) if error]
    if failures or outcome.value is None:
        raise RankFailed(f"publishing {caller.name}", failures)
    return outcome.value


def _publish(caller: Caller, manifest: Manifest, template: MetadataTemplate) -> Manifest:
    memory = caller.session.memory
    memory.make_checkpoint_directory(caller.name)
    replaced = [held for held in memory.find(caller.name) if held.manifest.scope == caller.scope]
    metadata = template.render(manifest.save_id)
    manifest = replace(manifest, metadata_crc=checksum(metadata))
    memory.publish_metadata(manifest, metadata)
    faults.point("complete.metadata")
    memory.publish(manifest)
    faults.point("complete.manifest")
    memory.show_to_stock_readers(manifest)
    for held in replaced:
        memory.retire_replaced(held)
    return manifest


def write_results(staged: Staged) -> list[WriteResult]:
    """What DCP wants to know of every item."""
    file = staged.segment.file
    return [
        WriteResult(item.index, length, _StorageInfo(file, offset, length))
        for item, offset, length in zip(staged.items, staged.offsets, staged.lengths, strict=True)
    ]
