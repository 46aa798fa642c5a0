"""`writer.wait(state=...)` takes a State or its text, and refuses states that never come."""

from pathlib import Path

import pytest
import torch

from dcp_mem import ConfigError, MemoryStorageWriter, State
from tests.support.checkpoints.roundtrip import Places


@pytest.mark.parametrize("state", [State.COMPLETE, State.DURABLE, "complete", "durable"])
def test_a_state_and_its_text_are_waited_for_alike(places: Places, state: State | str) -> None:
    with places.writer() as writer:
        places.save(writer, {"x": torch.arange(10.0)}, "step-1")
        writer.wait("step-1", state, timeout=60)
        found = writer.status()[0].state
    assert found is State.DURABLE or (state == State.COMPLETE and found is State.COMPLETE)


@pytest.mark.parametrize("state", [State.REPLICATED, "replicated"])
def test_copies_that_were_not_asked_for_are_not_waited_for(
    places: Places, state: State | str
) -> None:
    with places.writer() as writer, pytest.raises(ConfigError, match="nothing is replicated"):
        writer.wait(state=state)


@pytest.mark.parametrize(
    ("state", "text"), [(State.FAILED, "failed"), (State.STAGING, "staging"), ("done", "done")]
)
def test_a_state_that_is_not_an_aim_is_refused_by_its_text(
    places: Places, state: State | str, text: str
) -> None:
    expected = f"state='{text}': wait for 'complete', 'replicated' or 'durable'"
    with places.writer() as writer, pytest.raises(ConfigError, match=expected):
        writer.wait(state=state)


def test_what_never_reaches_storage_is_not_waited_for(memory_root: Path) -> None:
    with (
        MemoryStorageWriter(memory_root=str(memory_root), job="job") as writer,
        pytest.raises(ConfigError, match="nothing becomes durable"),
    ):
        writer.wait()
