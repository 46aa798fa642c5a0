"""What a node's memory holds, by its files (docs/formats.md)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from dcp_mem.runtime import session

_OWN, _FROZEN = ".dcp_mem", 1 << 24


def manifest_in(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint, as its file has it."""
    found: dict[str, Any] = json.loads((checkpoint / _OWN / "manifest.json").read_text())["body"]
    return found


def segments_in(checkpoint: Path) -> list[Path]:
    """The segments, and the parity, of a complete checkpoint."""
    return sorted(checkpoint.glob(f"*-{manifest_in(checkpoint)['save_id']}.distcp"))


def sizes_in(checkpoint: Path) -> dict[str, int]:
    """The bytes of all ranks' segments of a complete checkpoint, by file, wherever these lie."""
    manifest = manifest_in(checkpoint)
    numbers, sizes = (manifest["segments"][column] for column in ("rank", "nbytes"))
    return {
        f"__{number % _FROZEN}_{number // _FROZEN}-{manifest['save_id']}.distcp": nbytes
        for number, nbytes in zip(numbers, sizes, strict=True)
    }


def names_in(job: Path) -> list[str]:
    """The names of the complete checkpoints of a job, newest first."""
    found = {path.parent.parent for path in job.glob(f"*/{_OWN}/manifest.json")}
    order = {path.name: manifest_in(path) for path in found}
    return sorted(order, key=lambda name: (order[name]["generation"], order[name]["count"]))[::-1]


def rejected_in(job: Path) -> set[str]:
    """The names of the checkpoints of a job that are marked as rejected."""
    return {path.parent.parent.name for path in job.glob(f"*/{_OWN}/rejected-*.json")}


@contextmanager
def unlucky_samples() -> Iterator[None]:
    """Have all samples of frozen memory be of the first value of each tensor."""
    with patch.object(np.random, "default_rng", lambda: SimpleNamespace(random=np.zeros)):
        yield


def wait_for_comparisons() -> None:
    """Wait until this process compares no frozen tensors with their segment any more."""
    for one in list(session._sessions.values()):
        one.frozen.wait()
