"""Decide which checkpoints are exported. The rules are those of `persistence`:

1. The first one is.
2. So is each that has reached one of the policy's limits, counted from the last that was chosen.
"""

from __future__ import annotations

from dcp_mem.errors import ConfigError
from dcp_mem.policy.persistence import Persist, Since, every_n_saves


def export_policy(every: int | Persist) -> Persist:
    """Return the policy that the argument `every` stands for.

    `every`: a number n, for each n-th checkpoint; a policy is returned as it is. Raises
    ConfigError.
    """
    if isinstance(every, Persist) and not every.is_never:
        return every
    if type(every) is int and every >= 1:
        return every_n_saves(every)
    raise ConfigError(
        f"every={every!r}: give a number of checkpoints, at least 1, every_n_steps(n) or "
        f"every_seconds(s)"
    )


def why_undecided(policy: Persist, step: int | None) -> str:
    """Return why nobody can tell whether a checkpoint is to be exported; "" where it is known."""
    if policy.steps is None or step is not None:
        return ""
    return (
        f"every=every_n_steps({policy.steps}) counts training steps, and this save told none: call "
        f"writer.annotate_next_save(step=...) before it, or save through CheckpointManager"
    )


def is_exported(
    policy: Persist,
    *,
    step: int | None,
    created: float,
    last: tuple[int | None, float] | None,
    passed: int,
) -> bool:
    """Tell whether a checkpoint is exported.

    `created`: when it was saved, in seconds since the epoch. `last`: step and time of the last one
    that was chosen; None where there was none.
    """
    if last is None:
        return policy.wants(None, step)
    last_step, last_created = last
    steps = None if step is None or last_step is None else step - last_step
    return policy.wants(Since(passed + 1, created - last_created, steps), step)
