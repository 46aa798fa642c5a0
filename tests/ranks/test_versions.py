"""What docs/versions.md promises of checkpoints that another version of dcp_mem wrote."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from dcp_mem import MemoryStorageReader
from dcp_mem.format.records import VERSION
from tests.support.checkpoints.roundtrip import Places, assert_same


def test_an_unknown_version_on_storage_is_passed_over_and_torch_reads_it(places: Places) -> None:
    states = {f"step-{step}": {"w": torch.full((9,), float(step))} for step in (1, 2)}
    with places.writer() as writer:
        for name, state in states.items():
            places.save(writer, state, name)
    later = places.directory("storage", "step-2")
    _raise_version(later)

    into = {"w": torch.zeros(9)}
    with MemoryStorageReader(places.url, memory_root=f"{places.memory}/none") as reader:
        dcp.load(into, storage_reader=reader)
        assert reader.report().checkpoint_id == "step-1"
        assert any(
            "step-2" in reason and f"version {VERSION + 1}" in reason
            for reason in reader.report().passed_over
        )
    assert_same(states["step-1"], into)
    dcp.load(into, checkpoint_id=str(later))
    assert_same(states["step-2"], into)


def _raise_version(checkpoint: Path) -> None:
    """Have our own files say that a later version wrote them."""
    found = 0
    for path in (checkpoint / ".dcp_mem").glob("*.json"):
        written = path.read_text()
        path.write_text(written.replace(f'"version": {VERSION}', f'"version": {VERSION + 1}'))
        found += path.read_text() != written
    assert found
