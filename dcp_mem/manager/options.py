"""The options of `CheckpointManager`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch.optim import Optimizer

from dcp_mem.manager.tracker import Tracker
from dcp_mem.options import DEFAULTS as WRITER_DEFAULTS
from dcp_mem.options import FrozenOptions, GroupOptions, SaveOptions
from dcp_mem.policy.frequency import Auto
from dcp_mem.saving.overlap import Overlap

OnError = Literal["warn", "raise"]
OnCrashLoop = Literal["ignore", "warn", "fall_back"]


class LoopOptions(SaveOptions, GroupOptions, total=False):
    """Options of whatever saves in a training loop.

    Attributes:
        save_interval_steps: Training steps from one save to the next, so that `save` may be called
            at every step (default 1); `auto(mtbf="12h")` finds the number from what steps and saves
            take.
        async_save: Return from `save` as soon as the state has been copied, and complete the
            checkpoint behind training. The next save waits for it, and so do `wait`, `restore`,
            `delete` and `close`. Default False.
        overlap: Optimizers (or an `Overlap`) whose next steps wait for the copies of parameters and
            optimizer state, so that `save` doesn't, as in `dcp_mem.async_save`; implies
            async_save.
        on_error: "warn" (the default) logs what fails, in saves and behind training, and training
            goes on; "raise" raises it from the next `save`, on all ranks alike. Arguments that are
            wrong on all ranks always raise, and so does a state that is no dict.
        preemption: Names of signals ("SIGTERM", "SIGUSR1") at which the newest checkpoint is
            flushed before the signal takes its usual effect; none by default.
        preemption_deadline: Seconds that this flush may take at most; default 25.
        on_crash_loop: What `restore` does where the job has resumed from the newest checkpoint
            three times in a row, and died each time within crash_loop_steps: "fall_back" rejects
            that checkpoint and takes the one before, "warn" says so, "ignore" (the default) keeps
            no count.
        crash_loop_steps: A job that comes so many steps beyond its checkpoint (`save` is called at
            each step, due or not) has resumed successfully; so has one that is closed. Default 100.
        compare_replicas: At every so many saves, compare what several ranks hold (all of DDP's
            state, HSDP's replicas) by checksum, an eighth of it each time. Tensors that differ are
            logged and in the next save's `troubles`, with their ranks. Each rank copies that
            eighth into its private memory meanwhile; None, the default, compares nothing.
        trackers: Are told on rank 0 what becomes of checkpoints, behind training; see
            `dcp_mem.integrations.trackers`.
    """

    save_interval_steps: int | Auto
    async_save: bool
    overlap: Overlap | Optimizer | Sequence[Optimizer] | None
    on_error: OnError
    preemption: str | Sequence[str]
    preemption_deadline: float
    on_crash_loop: OnCrashLoop
    crash_loop_steps: int
    compare_replicas: int | None
    trackers: Sequence[Tracker]


class ManagerOptions(LoopOptions, FrozenOptions, total=False):
    """Options of `CheckpointManager`, beside those of `WriterOptions`."""


DEFAULTS: LoopOptions = {
    **WRITER_DEFAULTS,  # type: ignore[typeddict-item]
    "save_interval_steps": 1,
    "async_save": False,
    "on_error": "warn",
    "preemption": (),
    "preemption_deadline": 25.0,
    "on_crash_loop": "ignore",
    "crash_loop_steps": 100,
    "compare_replicas": None,
    "trackers": (),
}
