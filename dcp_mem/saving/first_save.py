"""At the first save of a structure, name the byte items that no load would restore.

1. As the ranks plan: values that differ from rank to rank, of which one rank's is saved.
2. Behind training: what a load refuses by default, as it isn't made of harmless kinds.
"""

from __future__ import annotations

import io
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import attempt
from dcp_mem.common.log import log_once
from dcp_mem.common.parallel import daemon
from dcp_mem.format.byte_items import is_plain_value
from dcp_mem.format.saved_streams import read_stream, why_refused
from dcp_mem.planning.entries import first_of
from dcp_mem.planning.plan_columns import ItemKind
from dcp_mem.planning.state_structure import Structure
from dcp_mem.saving.own_plan import RowItems
from dcp_mem.saving.values import Staged

_MOST_NBYTES = 64 << 20
"""Of byte items that are read back, all together."""
_looked_at: WeakSet[Structure] = WeakSet()


def name_refused(staged: Staged) -> None:
    """Name, once per structure, byte items of a rank's segment that a load refuses by default."""
    items = staged.items
    if not isinstance(items, RowItems) or items.structure in _looked_at:
        return
    if staged.slot.descriptor < 0:  # another process has it
        return
    _looked_at.add(items.structure)
    streams, left = [], _MOST_NBYTES
    for item, (offset, nbytes) in zip(staged.order, staged.places, strict=True):
        if items.is_object(item) and nbytes <= left:
            left -= nbytes
            data = os.pread(staged.slot.descriptor, nbytes, offset)
            streams.append((items.index(item).fqn, data))
    if streams:
        daemon(partial(_read_back, streams), "dcp_mem-first-save")


def _read_back(streams: Sequence[tuple[str, bytes]]) -> None:
    refused = {}
    for name, data in streams:
        read = attempt(
            partial(read_stream, io.BytesIO(data), weights_only=True, map_location="cpu")
        )
        if read.error is not None:
            refused[name] = why_refused(read.error)
    if refused:
        name, why = next(iter(refused.items()))
        log_once(
            f"dcp_mem.load will refuse {first_of(refused)} of these checkpoints unless it is given "
            f"weights_only=False: {name} holds more than numbers, texts, containers and tensors "
            f"({why}). Save what it is made of instead",
            logging.WARNING,
        )


def name_differing(ranks: Ranks, structure: Structure, state: Mapping[str, Any]) -> None:
    """Name, on rank 0, plain values that aren't the same on all ranks; one exchange, by all."""
    if ranks.size == 1:
        return
    seen = attempt(lambda: _digests(structure, state))
    joined = ranks.reduce(seen.value if seen.error is None else {}, _joined)
    differing = [name for name, digest in (joined or {}).items() if digest is None]
    if differing:
        log_once(
            f"{first_of(differing)} differ from rank to rank, and one rank's values are saved for "
            'all: give each rank\'s an entry of its own, such as f"rank-{rank}"',
            logging.WARNING,
        )


def _digests(structure: Structure, state: Mapping[str, Any]) -> dict[str, int | None]:
    plan, leaves = structure.plan, structure.recognise(state)
    if leaves is None:
        return {}
    values = structure.item_values(leaves)
    found: dict[str, int | None] = {}
    for row in (plan.kind == ItemKind.OBJECT).nonzero()[0].tolist():
        if is_plain_value(values[row]):
            found[plan.names[plan.name[row]]] = zlib.crc32(repr(values[row]).encode())
    return found


def _joined(parts: Sequence[dict[str, int | None]]) -> dict[str, int | None]:
    joined: dict[str, int | None] = {}
    for part in parts:
        for name, digest in part.items():
            joined[name] = digest if joined.get(name, digest) == digest else None
    return joined
