"""`writer.wait(state=...)` takes a State or its text, and refuses states that never come."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_mem import ConfigError, MemoryStorageWriter, State, WaitTimeout
from dcp_mem.common.values import Outcome
from dcp_mem.config import Settings
from dcp_mem.format import names
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.job import JobMemory
from dcp_mem.runtime import states
from tests.support.checkpoints.manifests import make_manifest
from tests.support.checkpoints.roundtrip import Places


@pytest.mark.parametrize("state", [State.COMPLETE, State.DURABLE, "complete", "durable"])
def test_a_state_and_its_text_are_waited_for_alike(places: Places, state: Any) -> None:
    with places.writer() as writer:
        places.save(writer, {"x": torch.arange(10.0)}, "step-1")
        writer.wait("step-1", state, timeout=60)
        found = writer.status()[0].state
    assert found is State.DURABLE or (state == State.COMPLETE and found is State.COMPLETE)


@pytest.mark.parametrize("state", [State.REPLICATED, "replicated"])
def test_copies_that_were_not_asked_for_are_not_waited_for(places: Places, state: Any) -> None:
    with places.writer() as writer, pytest.raises(ConfigError, match="nothing is replicated"):
        writer.wait(state=state)


@pytest.mark.parametrize(
    ("state", "text"), [(State.FAILED, "failed"), (State.STAGING, "staging"), ("done", "done")]
)
def test_a_state_that_is_not_an_aim_is_refused_by_its_text(
    places: Places, state: Any, text: str
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


def test_what_ranks_saved_alone_under_one_name_is_waited_for_on_all_of_them(
    places: Places,
) -> None:
    memory = JobMemory(places.memory, places.job)
    for rank in (0, 1):
        memory.make_checkpoint_directory("step-1")
        memory.publish(
            make_manifest(
                scope=names.rank_scope(rank), save_id=f"a{rank}", generation=1, count=rank + 1
            )
        )

    def wait() -> None:
        states.wait(_settings(places), "step-1", State.DURABLE, timeout=0.05, wake=lambda _: "")

    for durable in ((), (0,), (1,)):
        _record_durable(memory, durable)
        with pytest.raises(WaitTimeout):
            wait()
    _record_durable(memory, (0, 1))
    wait()


def _record_durable(memory: JobMemory, ranks: tuple[int, ...]) -> None:
    for checkpoint in memory.find("step-1"):
        is_durable = checkpoint.manifest.scope in map(names.rank_scope, ranks)
        outcome = Outcome.DURABLE if is_durable else ""
        record = FlushRecord(save_id=checkpoint.manifest.save_id, outcome=outcome, durable=2.0)
        memory.record_flush(checkpoint, record)


def _settings(places: Places) -> Settings:
    with places.writer() as writer:
        return writer.settings
