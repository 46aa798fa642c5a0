"""What storage has to hold at any time: whole checkpoints only, and what was said to be durable."""

import os
import pickle
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_mem import MemoryStorageWriter, State
from dcp_mem.common import faults
from dcp_mem.policy.order import SaveNumber
from dcp_mem.storage.listing import StoredCheckpoint, checkpoint_names, committed_under
from dcp_mem.storage.routes import open_storage

FLUSHER_POINTS = [point for point in faults.POINTS if point.startswith(("claim.", "flush."))]
"""The fault points of what claims storage and flushes to it."""
_TAKEN = ["a newer run has taken it", "a newer run has dropped it, and has saved under that name"]


def is_taken(error: str) -> bool:
    """Whether a flush failed as a newer run has the storage, or the checkpoint's name."""
    return any(text in error for text in _TAKEN)


@dataclass(frozen=True)
class Claim:
    """A checkpoint that a run has called durable."""

    name: str
    save_id: str
    number: SaveNumber


def claims_of(writer: MemoryStorageWriter) -> list[Claim]:
    """What a run calls durable now."""
    return [
        Claim(one.name, one.save_id, SaveNumber(one.generation, one.count))
        for one in writer.status()
        if one.state is State.DURABLE
    ]


def note(claims: list[Claim], path: Path) -> None:
    """Write claims down, so that they outlive this process; all of them, or none."""
    if claims:
        with path.open("ab", buffering=0) as notes:
            data = pickle.dumps(claims)
            assert os.write(notes.fileno(), data) == len(data)


def noted(path: Path) -> set[Claim]:
    """All claims that were written down there."""
    found: set[Claim] = set()
    if path.exists():
        with path.open("rb") as notes, suppress(EOFError):
            while True:
                found.update(pickle.load(notes))
    return found


def committed(url: str, options: Mapping[str, Any]) -> dict[str, StoredCheckpoint]:
    """What is committed, by name. Fails where any of it isn't whole, by listing and manifests."""
    storage = open_storage(url, options)
    found = [one for name in checkpoint_names(storage) for one in committed_under(storage, name)]
    torn = [f"{one.name}: {one.problem}" for one in found if one.problem]
    assert not torn, torn
    return {one.name: one for one in found}


def assert_kept(
    stored: Mapping[str, StoredCheckpoint], claims: Iterable[Claim], *, has_retention: bool
) -> None:
    """Assert that what was called durable is there.

    A newer checkpoint may have taken its name or, with retention, its place.
    """
    newest = max((_number(one) for one in stored.values()), default=SaveNumber())
    for claim in claims:
        one = stored.get(claim.name)
        is_there = one is not None and (one.save_id == claim.save_id or _number(one) > claim.number)
        assert is_there or (has_retention and newest > claim.number), (
            f"{claim} was durable; there is {one and (one.save_id, _number(one))}, newest {newest}"
        )


def _number(stored: StoredCheckpoint) -> SaveNumber:
    return SaveNumber() if stored.manifest is None else stored.manifest.number
