"""What docs/versions.md promises of checkpoints that another version of dcp_mem wrote."""

import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from dcp_mem import MemoryStorageReader
from tests.support.checkpoints.roundtrip import Places, assert_same


def test_an_unknown_version_on_storage_is_passed_over_and_torch_reads_it(places: Places) -> None:
    states = {f"step-{step}": {"w": torch.full((9,), float(step))} for step in (1, 2)}
    with places.writer() as writer:
        for name, state in states.items():
            places.save(writer, state, name)
    later = places.directory("storage", "step-2")
    version = _raised_version(later)

    into = {"w": torch.zeros(9)}
    with MemoryStorageReader(places.url, memory_root=f"{places.memory}/none") as reader:
        dcp.load(into, storage_reader=reader)
        assert reader.report().checkpoint_id == "step-1"
        assert any(
            "step-2" in reason and f"version {version}" in reason
            for reason in reader.report().passed_over
        )
    assert_same(states["step-1"], into)
    dcp.load(into, checkpoint_id=str(later))
    assert_same(states["step-2"], into)


def _raised_version(checkpoint: Path) -> int:
    """Have our own files say that a later version wrote them; return which."""
    later = set[int]()

    def raised(match: re.Match[str]) -> str:
        later.add(int(match[1]) + 1)
        return f'"version": {int(match[1]) + 1}'

    for path in (checkpoint / ".dcp_mem").glob("*.json"):
        path.write_text(re.sub(r'"version": (\d+)', raised, path.read_text(), count=1))
    (version,) = later
    return version
