"""Planning a load: each rank finds what it needs by itself, without any exchange.

Where a catalog describes the checkpoint, the rank's columns are joined with the catalog's. Unusual
loads go through torch's `DefaultLoadPlanner` and DCP's metadata, so that results and errors are
torch's.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from dcp_mem.errors import EntriesMissing, UntrustedObject
from dcp_mem.format.catalog import BYTES, Catalog, Path, Tails
from dcp_mem.format.saved_streams import read_stream, why_refused
from dcp_mem.planning import torch_rules
from dcp_mem.planning.entries import (
    NO_ENTRIES,
    Casts,
    RoomFor,
    SavedEntries,
    casts_from_metadata,
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
    `strict`: False leaves all entries as they are that the checkpoint lacks. `lacking_names`:
    optional entries that the checkpoint lacks, and that leave the state dict. `missing`: without
    `strict`, all entries that it lacks. `casts`: tensors that are loaded in another dtype.
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
        strict: bool = True,
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self.weights_only, self.objects = weights_only, objects or {}
        self._optional, self._room_for = optional, room_for
        self._skip = repeatable(skip)
        self._lacking: list[Path] = []
        self.lacking_names: Collection[str] = ()
        self.strict = strict
        self.missing: Collection[str] = ()
        self.casts: Casts = {}
        self._is_by_catalog = False
        self._known: Collection[str] = ()
        self._begin(lambda: NO_ENTRIES, ())
        self._made: set[str] = set()  # room for entries of this checkpoint, or of one before it

    def plan(
        self,
        state: dict[str, Any],
        catalog: Catalog,
        save_id: str,
        tails: Tails,
        *,
        into_devices: bool = False,
    ) -> Reads | None:
        """Plan by a catalog.

        `into_devices`: whether direct reads may go into the memory of CUDA devices. Returns what to
        read; None for what torch has to plan. Raises EntriesMissing.
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
        path_of = dict(zip(wanted.names, wanted.paths, strict=True))
        lacking = self._find_lacking(path_of, catalog.entry_names)
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
            self._refuse_missing(plan.names, catalog.entry_names())
            return None
        self._is_by_catalog, self.casts = True, found.casts
        self._loads_all = len(plan.names) == np.count_nonzero(catalog.properties >= BYTES)
        self.original_state_dict = state
        self.mappings = dict(zip(plan.names, plan.paths, strict=True))
        self.state_dict = dict(zip(plan.names, described.leaves, strict=True))
        return found

    def create_local_plan(self) -> LoadPlan:
        """Plan by DCP's metadata, as torch does, without entries that it may lack.

        Raises EntriesMissing.
        """
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
            {name: self.mappings[name] for name in self.state_dict if name not in skipped},
            lambda: metadata.state_dict_metadata,
        )
        self.state_dict = {
            name: leaf
            for name, leaf in self.state_dict.items()
            if name not in lacking and name not in skipped
        }
        try:
            plan = super().create_local_plan()
        except RuntimeError:
            self._refuse_missing(self.state_dict, metadata.state_dict_metadata)
            raise
        self.casts = casts_from_metadata(self.state_dict, metadata)
        return plan

    def _refuse_missing(self, wanted: Iterable[str], known: Iterable[str]) -> None:
        """Raise EntriesMissing where names are wanted that aren't known, and may not be missing."""
        missing = set(wanted).difference(known)
        if missing and not self.allow_partial_load:
            more = set(self._saved().names).difference(self._known, self._others)
            raise EntriesMissing(sorted(missing), sorted(more))

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
        """Return a bit for each entry of the checkpoint that nothing loads.

        With `strict`, for those below a loaded one.
        """
        if self._loads_all:
            return b""
        state = self.original_state_dict
        containers = [key for key, value in state.items() if is_container(value)]
        containers = containers if self.strict else [""]
        return self._saved().left_out(containers, set(self._known), self._others)

    def cast_bits(self) -> bytes:
        """Return a bit for each entry of the checkpoint that is loaded in another dtype."""
        if not self.casts:
            return b""
        return SavedEntries.bits(name in self.casts for name in self._saved().names)

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
        self, wanted: Mapping[str, Path], known: Callable[[], Collection[str]]
    ) -> Collection[str]:
        """Return the names that aren't known and needn't be; note which leave the state dict.

        `known` is called only if there may be any. Without `strict`, an object keeps its optional
        entries where the checkpoint has nothing of that kind, such as optimizers.
        """
        may_lack = self._made.intersection(wanted)
        if self._optional is not None:
            may_lack.update(filter(self._optional, wanted))
        self.missing, self.lacking_names, self._lacking = (), (), []
        if self.strict and not may_lack:
            return ()
        there = known()
        lacking = may_lack.difference(there)
        leaving, left = lacking, set(lacking)
        if not self.strict:
            left = set(wanted).difference(there)
            kinds = {name: f"{'.'.join(map(str, wanted[name][:3]))}." for name in lacking}
            found = {
                kind for kind in set(kinds.values()) if any(one.startswith(kind) for one in there)
            }
            leaving = {name for name in lacking if name in self._made or kinds[name] in found}
            self.missing = left - self._made
        self.lacking_names, self._lacking = leaving, [wanted[name] for name in leaving]
        return left

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
