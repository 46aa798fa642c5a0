"""A training that resumes by NeMo 2's AutoResume, for a test that kills it.

    python -m tests.support.frameworks.nemo_job ROOT MEMORY ANSWER [KILLED_AT]

NeMo's `lightning/resume.py` is the real one, of the installed nemo-toolkit 2. Stubbed is what that
file imports of NeMo and this training doesn't use (tokenizers, the model zoo's paths, NeMo's
logger, its strategies): all of it takes dozens of packages. The Trainer is Lightning's own.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from dcp_mem.integrations.lightning import NEWEST, MemoryCheckpoint, MemoryCheckpointIO
from tests.support.frameworks.lightning_job import Model

MEMORY_EVERY, OWN_EVERY, STEPS = 2, 6, 12
_STUBS = ("base", "io", "pytorch", "pytorch.strategies", "pytorch.strategies.utils")
_STUBBED_UTILS = ("utils", "utils.app_state", "utils.model_utils", "utils.msc_utils")


def _auto_resume() -> Any:
    """Return NeMo's AutoResume, out of its own file."""
    spec = importlib.util.find_spec("nemo")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = spec.submodule_search_locations[0]
    for name in ("nemo", "nemo.lightning"):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
    stubs = [f"nemo.lightning.{one}" for one in _STUBS] + [f"nemo.{one}" for one in _STUBBED_UTILS]
    for name in stubs:
        sys.modules[name] = MagicMock()
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, sys.modules[name])
    from nemo.lightning.resume import AutoResume

    return AutoResume


def main(root: str, memory: str, answer: str, killed_at: str = "") -> None:
    class MemoryAutoResume(_auto_resume()):  # type: ignore[misc]
        def get_trainer_ckpt_path(self, model: Any = None) -> str:
            return NEWEST

    plugin = MemoryCheckpointIO(root, memory_root=memory, keep_memory=8)
    callbacks: list[pl.Callback] = [
        MemoryCheckpoint(filename="memory-{step}", every_n_train_steps=MEMORY_EVERY, save_top_k=-1),
        ModelCheckpoint(root, "own-{step}", every_n_train_steps=OWN_EVERY, save_top_k=-1),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        max_epochs=None,
        logger=False,
        plugins=[plugin],
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(killed_at=int(killed_at) if killed_at else None)
    MemoryAutoResume(resume_if_exists=True).setup(trainer, model)
    trainer.fit(model)  # as nemo.collections.llm.train calls it
    report = plugin._report
    found = [model.first, trainer.global_step, report and report.source]
    Path(answer).write_text(json.dumps([*found, report and report.checkpoint_id]))


if __name__ == "__main__":
    main(*sys.argv[1:])
