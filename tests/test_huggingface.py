"""Trainer and Accelerate with dcp_mem: trainings that are killed, and what people ask of resume_from_checkpoint."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.huggingface_jobs import STEPS, Killed, Outcome, Spec, running_launcher
from tests.training import needs_fsdp_on_cpu

pytestmark = pytest.mark.filterwarnings("default")

Launch = Callable[[Spec], list[Outcome]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with running_launcher(tmp_path_factory.mktemp("launcher") / "log") as launch:
        yield launch


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", pytest.param("fsdp2", marks=needs_fsdp_on_cpu)])
@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_a_training_that_is_killed_goes_on_as_if_nothing_had_been(
    loop: str, sharding: str, launch: Launch, memory_root: Path, tmp_path: Path
) -> None:
    alone = launch(Spec(str(tmp_path / "alone"), str(memory_root / "alone"), str(tmp_path / "other"), loop, sharding))
    assert [len(rank.losses) for rank in alone] == [STEPS, STEPS]
    url = tmp_path / "storage"
    job = Spec(str(tmp_path), str(memory_root / "job"), str(url), loop, sharding)
    with pytest.raises(Killed, match="SIGKILL"):
        launch(replace(job, persist=False, killed_at=7))
    assert not url.exists() or not list(url.glob("step-*"))

    _goes_on(launch(job), alone, "memory")

    shutil.rmtree(memory_root / "job")
    newest = max(url.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    shutil.rmtree(newest)
    _goes_on(launch(job), alone, "storage")


def _goes_on(resumed: list[Outcome], alone: list[Outcome], source: str) -> None:
    for one, whole in zip(resumed, alone, strict=True):
        assert one.source == source
        assert one.resumed is not None
        assert 0 < one.resumed < STEPS
        assert one.batches == whole.batches[one.resumed :]
        assert one.losses == whole.losses[one.resumed :]
        assert one.digest == whole.digest
