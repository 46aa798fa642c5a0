"""Planning a load: each rank finds what it needs by itself, without any exchange.

Where a catalog describes the checkpoint, the rank's columns are joined with the catalog's. Unusual
loads go through torch's `DefaultLoadPlanner` and DCP's metadata, so that results and errors are
torch's.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint._traverse import get_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from dcp_mem.errors import UntrustedObject
from dcp_mem.format.catalog import Catalog, Extent, Path
from dcp_mem.format.saved_streams import why_refused
from dcp_mem.planning import torch_rules
from dcp_mem.planning.find_reads import find_reads
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

    Args:
        weights_only: Unpickle byte items as `torch.load(weights_only=True)` does; otherwise freely,
            as torch's planner does.
        allow_partial_load: As of torch's planner.
        optional: Tells which flattened names the checkpoint, or the state dict, may lack. Their
            paths must not lead through lists.
        skip: Tensors that stay as they are, whatever the checkpoint has; None: none. A wrong one is
            told by the first plan, where all ranks hear of it.

    Attributes:
        weights_only: As given.
        lacking_names: Optional entries of the state dict that the checkpoint lacks.
    """

    def __init__(
        self,
        *,
        weights_only: bool,
        allow_partial_load: bool = False,
        optional: Callable[[str], bool] | None = None,
        skip: TensorChoice | None = None,
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self.weights_only = weights_only
        self._optional = optional
        self._skip = repeatable(skip)
        self._lacking: list[Path] = []
        self.lacking_names: Collection[str] = ()
        self._is_by_catalog = False

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

        Args:
            state: The state dict to load into.
            catalog: What the checkpoint consists of.
            save_id: The save attempt.
            tails: By rank, offset and length of each item of its tail.
            into_devices: Whether direct reads may go into the memory of CUDA devices.

        Returns:
            What to read; None for what torch has to plan.
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
        self._lacking = [wanted.paths[wanted.names.index(name)] for name in lacking]
        self.original_state_dict = state
        self.mappings = dict(zip(plan.names, plan.paths, strict=True))
        self.state_dict = dict(zip(plan.names, described.leaves, strict=True))
        return found

    def create_local_plan(self) -> LoadPlan:
        """Plan by DCP's metadata, as torch does, without optional entries that it lacks."""
        metadata = self.metadata
        assert metadata is not None
        skipped = chosen_names(self._rule(), self.state_dict, self.state_dict.values())
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

    def _rule(self) -> TensorRule | None:
        return tensor_rule("skip", self._skip)

    def take_out_lacking(self) -> None:
        """Remove the optional entries from the state dict that the last loaded checkpoint lacks."""
        for *path, last in self._lacking:
            entries: Any = get_element(self.original_state_dict, tuple(path))
            del entries[last]

    def _find_lacking(
        self, wanted: Iterable[str], known: Callable[[], Collection[str]]
    ) -> Collection[str]:
        """Return the optional ones of these names that aren't known.

        `known` is called only if any is optional.
        """
        optional = list(filter(self._optional, wanted)) if self._optional is not None else []
        return set(optional).difference(known()) if optional else ()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor to read into: the whole local one where that is what the item fills.

        Args:
            read_item: Of a tensor of the state dict.
        """
        if self._is_by_catalog:
            leaf = self.state_dict[read_item.dest_index.fqn]
            local: torch.Tensor = leaf._local_tensor if type(leaf) is DTensor else leaf
            if local.shape == read_item.lengths:
                return local
        return super().resolve_tensor(read_item)  # type: ignore[no-any-return]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a byte item into the state dict.

        Args:
            read_item: Names the entry of the state dict.
            value: The pickle.

        Raises:
            UntrustedObject: It holds more than `weights_only` admits.
        """
        fqn = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=self.weights_only)
        except Exception as error:
            if not self.weights_only:
                raise
            raise UntrustedObject(fqn, why_refused(error)) from None
        set_element(self.original_state_dict, self.mappings[fqn], loaded)
