"""A checkpoint's entries beside those of a state dict: what either lacks, and who makes room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_mem.common.sharded_tensor import ShardedTensor
from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import BYTES, Catalog, Ints, Path
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, widened

Bools = npt.NDArray[np.bool_]


@value_class
class SavedEntry:
    """An entry of a checkpoint: a tensor's whole size and dtype; both None for any other value."""

    path: Path
    size: torch.Size | None = None
    dtype: torch.dtype | None = None


Casts = Mapping[str, tuple[str, str]]
"""By name, the dtypes in which a tensor was saved and is loaded, where they differ."""

RoomFor = Callable[[SavedEntry], Any]
"""Returns what to load an entry into that the state dict lacks or has otherwise: a tensor, or
anything for a value that is no tensor; None for an entry that is another rank's to load, and
NotImplemented for one that nobody wants."""


class SavedEntries:
    """The entries of a checkpoint by flattened name, in the checkpoint's order."""

    def __init__(self, names: Sequence[str], entry: Callable[[int], SavedEntry]) -> None:
        self.names, self._entry = names, entry

    @staticmethod
    def of_catalog(catalog: Catalog) -> SavedEntries:
        numbers = np.flatnonzero(catalog.properties >= BYTES).tolist()

        def entry(index: int) -> SavedEntry:
            number = numbers[index]
            named, properties = int(catalog.name[number]), int(catalog.properties[number])
            path = catalog.paths[named] if catalog.paths is not None else None
            path = path or (catalog.names[named],)
            if properties < 0:
                return SavedEntry(path)
            size = catalog.size[number, : catalog.dimensions[number]].tolist()
            return SavedEntry(path, torch.Size(size), dtype_named(catalog.table[properties].dtype))

        return SavedEntries(catalog.entry_names(), entry)

    @staticmethod
    def of_metadata(metadata: Metadata) -> SavedEntries:
        known = metadata.state_dict_metadata
        names = list(known)
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}

        def entry(index: int) -> SavedEntry:
            name = names[index]
            path, found = paths.get(name, (name,)), known[name]
            if isinstance(found, TensorStorageMetadata):
                return SavedEntry(path, found.size, found.properties.dtype)
            return SavedEntry(path)

        return SavedEntries(names, entry)

    def make_room(
        self, state: dict[str, Any], names: Collection[str], room_for: RoomFor
    ) -> tuple[set[str], set[str]]:
        """Give a state dict room for these names; return those that have it, and other ranks'."""
        made, others = set(), set()
        for index, name in enumerate(self.names):
            if name not in names:
                continue
            entry = self._entry(index)
            room = room_for(entry)
            if room is None:
                others.add(name)
            elif room is not NotImplemented:
                set_entry(state, entry.path, room)
                made.add(name)
        return made, others

    def left_out(
        self, containers: Collection[str], loaded: Collection[str], others: Collection[str]
    ) -> bytes:
        """Return a bit for each entry below these keys that nothing loads; "" stands for all."""
        below = tuple(f"{key}." if key else "" for key in containers)
        return self.bits(
            name.startswith(below) and name not in loaded and name not in others
            for name in self.names
        )

    @staticmethod
    def bits(flags: Iterable[bool]) -> bytes:
        """Return a bit for each entry."""
        return np.packbits(list(flags)).tobytes()

    def of_bits(self, bits: bytes) -> list[str]:
        """Return the names whose bits are set."""
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.names))
        return [self.names[index] for index in np.flatnonzero(flags).tolist()]


NO_ENTRIES = SavedEntries((), lambda _: SavedEntry(()))


def numbers_of(names: Sequence[str], catalog: Catalog) -> Ints:
    """Return the number of each one's entry in a catalog; -1 where there is none."""
    numbers, known = np.flatnonzero(catalog.properties >= BYTES), catalog.entry_names()
    if known == list(names):  # as where the same model was saved
        return numbers
    number_of = dict(zip(known, numbers.tolist(), strict=True))
    return np.fromiter(map(number_of.get, names, repeat(-1)), np.int64, len(names))


def are_unlike(plan: LocalPlan, rows: Ints, catalog: Catalog, entry: Ints) -> Bools:
    """Return, for each of some rows of a plan, whether its entry has another kind or size."""
    width = max(plan.size.shape[1], catalog.size.shape[1])
    sizes = widened(catalog.size, width, 1)[entry], widened(plan.size, width, 1)[rows]
    is_other: Bools = (sizes[0] != sizes[1]).any(axis=1)
    is_other |= (catalog.properties[entry] == BYTES) != (plan.kind[rows] == ItemKind.OBJECT)
    is_other |= catalog.dimensions[entry] != plan.dimensions[rows]
    return is_other


def unlike_catalog(plan: LocalPlan, catalog: Catalog) -> set[str]:
    """Return the plan's names that the catalog has in another kind, size or dtype."""
    named, row = np.unique(plan.name, return_index=True)
    entry = numbers_of(plan.names, catalog)[named]
    named, row, entry = named[entry >= 0], row[entry >= 0], entry[entry >= 0]
    is_other = are_unlike(plan, row, catalog, entry)
    saved, wanted = (
        np.array([*(one.dtype for one in table), ""]) for table in (catalog.table, plan.table)
    )
    saved_as = saved[np.maximum(catalog.properties[entry], -1)]
    is_other |= (plan.kind[row] != ItemKind.OBJECT) & (saved_as != wanted[plan.properties[row]])
    return set(map(plan.names.__getitem__, named[is_other].tolist()))


def unlike_metadata(leaves: Mapping[str, Any], metadata: Metadata) -> set[str]:
    """Return the names of leaves that the metadata has in another kind, size or dtype."""
    found = set()
    for name, leaf in leaves.items():
        known: Any = metadata.state_dict_metadata.get(name)
        if known is not None:
            is_tensor = isinstance(known, TensorStorageMetadata)
            look = (known.size, known.properties.dtype) if is_tensor else None
            if look != _look_of(leaf):
                found.add(name)
    return found


def casts_from_metadata(leaves: Mapping[str, Any], metadata: Metadata) -> Casts:
    """Return the tensors that the metadata has in another dtype than the leaves."""
    found = {}
    for name, leaf in leaves.items():
        known, look = metadata.state_dict_metadata.get(name), _look_of(leaf)
        if look is not None and isinstance(known, TensorStorageMetadata):
            saved, wanted = known.properties.dtype, look[1]
            if saved != wanted:
                found[name] = str(saved), str(wanted)
    return found


def _look_of(leaf: Any) -> tuple[torch.Size, torch.dtype] | None:
    if isinstance(leaf, ShardedTensor):  # FSDP 1; its attributes warn that it is deprecated
        known = leaf._metadata
        return torch.Size(known.size), known.tensor_properties.dtype
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None


def set_entry(state: MutableMapping[str, Any], path: Path, value: Any) -> None:
    """Set a value in nested dicts and lists; what isn't there, or is no container, is made."""
    container: Any = state
    for part, following in pairwise(path):
        container = _child(container, part, dict if isinstance(following, str) else list)
    if isinstance(container, list):
        _grow(container, path[-1])
        container[int(path[-1])] = value
    else:
        container[_own_key(container, path[-1])] = value


def _child(container: Any, part: str | int, kind: type[dict[Any, Any]] | type[list[Any]]) -> Any:
    key: Any = part
    if isinstance(container, list):
        _grow(container, part)
        found = container[part]  # type: ignore[index]
    else:
        key = _own_key(container, part)
        found = container.get(key)
    if not isinstance(found, Mapping if kind is dict else list):
        found = container[key] = kind()
    return found


def _grow(container: list[Any], index: str | int) -> None:
    """Make a list long enough; its entries come one by one, and nearly in order."""
    if not isinstance(index, int) or not 0 <= index <= len(container) + _MOST_GAP:
        raise ValueError(f"a path to {index!r} of a list with {len(container)} values")
    container.extend([None] * (index + 1 - len(container)))


_MOST_GAP = 1 << 12


def _own_key(mapping: Mapping[Any, Any], part: str | int) -> Any:
    """Return the mapping's key with this text: paths have texts for all keys, as 0 for an int."""
    if part in mapping:
        return part
    return next((key for key in mapping if str(key) == part), part)


def first_of(names: Iterable[str], most: int = 5) -> str:
    """Return the first few names, for people."""
    listed = list(names)
    more = f", … ({len(listed)} in all)" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
