"""Planners of a rank that takes no part in `dcp.save` or `dcp.load`: DCP tells all ranks why."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner


class _Refusing:
    """Raises in the place of a plan."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        return

    def create_local_plan(self, *_: Any) -> NoReturn:
        raise self._error

    create_global_plan = finish_plan = resolve_data = create_local_plan
    load_bytes = resolve_tensor = commit_tensor = create_local_plan


class RefusingSavePlanner(_Refusing, SavePlanner):
    """Raises in the place of a plan of a save."""


class RefusingLoadPlanner(_Refusing, LoadPlanner):
    """Raises in the place of a plan of a load."""
