"""The planner of a rank that takes no part in `dcp.save` or `dcp.load`: DCP tells all ranks why."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner


class RefusingPlanner(SavePlanner, LoadPlanner):
    """Raises in the place of a plan."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        return

    def _raise(self, *_: Any) -> NoReturn:
        raise self._error

    _refuse: Any = _raise
    create_local_plan = create_global_plan = finish_plan = _refuse
    resolve_data = load_bytes = resolve_tensor = commit_tensor = _refuse
