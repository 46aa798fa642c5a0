"""Planning a load: each rank finds what it needs by itself, without any exchange.

Where a catalog describes the checkpoint, the rank's columns are joined with the catalog's. Unusual
loads go through torch's `DefaultLoadPlanner` and DCP's metadata, so that results and errors are
torch's.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from dcp_mem.errors import UntrustedObject
from dcp_mem.format.catalog import BYTES, Catalog, Extent, Path
from dcp_mem.format.saved_streams import read_stream, why_refused
from dcp_mem.planning import torch_rules
from dcp_mem.planning.entries import (
    NO_ENTRIES,
    RoomFor,
    SavedEntries,
    set_entry,
    unlike_catalog,
    unlike_metadata,
)
from dcp_mem.planning.find_reads import find_reads
from dcp_mem.planning.flatten import is_container
from dcp_mem.planning.plan_columns import NotDescribable
from dcp_mem.planning.reads import Reads
from dcp_mem.planning.state_structure import DescribedState
from dcp_mem.planning.tensor_choice import (
    TensorChoice,
    TensorRule,
    chosen_names,
    repeatable,
    tensor_rule,
)


class LocalLoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, which can also plan by a catalog and unpickles byte items safely.

    `weights_only`: unpickle byte items as `torch.load(weights_only=True)` does; otherwise freely,
    as torch's planner does. `optional`: tells which flattened names the checkpoint, or the state
    dict, may lack. Their paths must not lead through lists. `room_for`: makes room in the state
    dict for what it lacks or has otherwise; None makes none. `objects`: keys of the state dict
    whose values are the states of objects, each with what to do where the checkpoint has more below
    it; "" for nothing in particular. `skip`: tensors that stay as they are, whatever the checkpoint
    has; None: none. A wrong one is told by the first plan, where all ranks hear of it.
    `lacking_names`: optional entries of the state dict that the checkpoint lacks.
    """

    def __init__(
        self,
        *,
        weights_only: bool,
        allow_partial_load: bool = False,
        optional: Callable[[str], bool] | None = None,
        room_for: RoomFor | None = None,
        objects: Mapping[str, str] | None = None,
        skip: TensorChoice | None = None,
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self.weights_only, self.objects = weights_only, objects or {}
        self._optional, self._room_for = optional, room_for
        self._skip = repeatable(skip)
        self._lacking: list[Path] = []
        self.lacking_names: Collection[str] = ()
        self._is_by_catalog = False
        self._known: Collection[str] = ()
        self._begin(lambda: NO_ENTRIES, ())
        self._made: set[str] = set()  # room for entries of this checkpoint, or of one before it

    def plan(
        self,
        state: dict[str, Any],
        catalog: Catalog,
        save_id: str,
        tails: Mapping[int, Sequence[Extent]],
        *,
        into_devices: bool = False,
    ) -> Reads | None:
        """Plan by a catalog.

        `tails`: by rank, offset and length of each item of its tail. `into_devices`: whether direct
        reads may go into the memory of CUDA devices. Returns what to read; None for what torch has
        to plan.
        """
        self._is_by_catalog = False
        try:
            described = DescribedState(state)
            torch_rules.refuse_other_load(described.plan, described.leaves)
        except (NotDescribable, ValueError):
            return None
        if described.has_sharded_tensors:
            return None
        skipped = chosen_names(self._rule(), described.plan.names, described.leaves)
        known = set(described.plan.names) if self._room_for is not None else described.plan.names
        self._begin(partial(SavedEntries.of_catalog, catalog), known)
        if self._has_made_room(state, lambda: unlike_catalog(described.plan, catalog) - skipped):
            described = DescribedState(state)
            self._known = {*known, *described.plan.names}
        if skipped:
            described.leave_out(skipped)
        wanted = described.plan
        lacking = self._find_lacking(wanted.names, catalog.entry_names)
        if lacking:
            described.leave_out(lacking)
        plan = described.plan
        found = find_reads(
            plan,
            described.item_values(described.leaves),
            catalog,
            save_id,
            tails,
            into_devices=into_devices,
        )
        if found is None:
            return None
        self._is_by_catalog, self.lacking_names = True, lacking
        self._loads_all = len(plan.names) == np.count_nonzero(catalog.properties >= BYTES)
        paths = dict(zip(wanted.names, wanted.paths, strict=True)) if lacking else {}
        self._lacking = [paths[name] for name in lacking]
        self.original_state_dict = state
        self.mappings = dict(zip(plan.names, plan.paths, strict=True))
        self.state_dict = dict(zip(plan.names, described.leaves, strict=True))
        return found

    def create_local_plan(self) -> LoadPlan:
        """Plan by DCP's metadata, as torch does, without optional entries that it lacks."""
        metadata, leaves = self.metadata, self.state_dict
        assert metadata is not None
        skipped = chosen_names(self._rule(), leaves, leaves.values())
        self._begin(partial(SavedEntries.of_metadata, metadata), leaves.keys())
        state, unlike = self.original_state_dict, partial(unlike_metadata, leaves, metadata)
        if self._has_made_room(state, lambda: unlike() - skipped):
            self.set_up_planner(state, metadata, self.is_coordinator)
            self._known = {*leaves, *self.state_dict}
        if skipped:  # torch takes what the checkpoint has more for another torch's names
            known = metadata.state_dict_metadata
            left = {name: entry for name, entry in known.items() if name not in skipped}
            metadata = self.metadata = replace(metadata, state_dict_metadata=left)
        lacking = self._find_lacking(
            self.state_dict.keys() - skipped, lambda: metadata.state_dict_metadata
        )
        self.lacking_names = lacking
        self._lacking = [self.mappings[name] for name in lacking]
        self.state_dict = {
            name: leaf
            for name, leaf in self.state_dict.items()
            if name not in lacking and name not in skipped
        }
        return super().create_local_plan()

    def _begin(self, saved: Callable[[], SavedEntries], known: Collection[str]) -> None:
        """Begin with a checkpoint, of which a state dict has the known entries."""
        self._saved, self._known = cache(saved), known
        self._others: set[str] = set()  # entries that are for other ranks
        self._loads_all = False

    def _has_made_room(self, state: dict[str, Any], unlike: Callable[[], set[str]]) -> bool:
        """Make room for entries that the state dict lacks or has otherwise; tell whether any."""
        if self._room_for is None:
            return False
        saved = self._saved()
        wanted = set(saved.names).difference(self._known) | unlike()
        made, self._others = saved.make_room(state, wanted, self._room_for)
        self._made |= made
        return bool(made)

    def left_out(self) -> bytes:
        """Return a bit for each entry of the checkpoint below a loaded one that nothing loads."""
        if self._loads_all:
            return b""
        state = self.original_state_dict
        containers = [key for key, value in state.items() if is_container(value)]
        return self._saved().left_out(containers, set(self._known), self._others)

    def names_of(self, bits: bytes) -> list[str]:
        """Return the entries whose bits are set."""
        return self._saved().of_bits(bits) if any(bits) else []

    def _rule(self) -> TensorRule | None:
        return tensor_rule("skip", self._skip)

    def take_out_lacking(self) -> None:
        """Remove the optional entries from the state dict that the last loaded checkpoint lacks."""
        for *path, last in self._lacking:
            state: Any = self.original_state_dict
            entries = reduce(operator.getitem, path, state)
            del entries[last]

    def _find_lacking(
        self, wanted: Iterable[str], known: Callable[[], Collection[str]]
    ) -> Collection[str]:
        """Return the optional ones of these names that aren't known.

        `known` is called only if any is optional.
        """
        may_lack = self._made.intersection(wanted)
        if self._optional is not None:
            may_lack.update(filter(self._optional, wanted))
        return may_lack.difference(known()) if may_lack else ()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor to read into: the whole local one where that is what the item fills."""
        if self._is_by_catalog:
            leaf = self.state_dict[read_item.dest_index.fqn]
            local: torch.Tensor = leaf._local_tensor if type(leaf) is DTensor else leaf
            if local.shape == read_item.lengths:
                return local
        return super().resolve_tensor(read_item)  # type: ignore[no-any-return]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a byte item into the state dict.

        Raises UntrustedObject.
        """
        fqn = read_item.dest_index.fqn
        try:
            loaded = read_stream(value, weights_only=self.weights_only)
        except Exception as error:
            if not self.weights_only:
                raise
            raise UntrustedObject(fqn, why_refused(error)) from None
        set_entry(self.original_state_dict, self.mappings[fqn], loaded)
