"""Planners of a rank that takes no part in `dcp.save` or `dcp.load`: DCP tells all ranks why."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner


class RefusingSavePlanner(SavePlanner):
    """Raises in the place of a plan."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        return

    def create_local_plan(self) -> SavePlan:
        raise self._error

    def create_global_plan(self, all_plans: list[SavePlan]) -> NoReturn:
        raise self._error

    def finish_plan(self, new_plan: SavePlan) -> NoReturn:
        raise self._error

    def resolve_data(self, write_item: Any) -> NoReturn:
        raise self._error


class RefusingLoadPlanner(LoadPlanner):
    """Raises in the place of a plan."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        return

    def create_local_plan(self) -> LoadPlan:
        raise self._error

    def create_global_plan(self, global_plan: list[LoadPlan]) -> NoReturn:
        raise self._error

    def finish_plan(self, central_plan: LoadPlan) -> NoReturn:
        raise self._error

    def load_bytes(self, read_item: Any, value: Any) -> NoReturn:
        raise self._error

    def resolve_tensor(self, read_item: Any) -> NoReturn:
        raise self._error

    def commit_tensor(self, read_item: Any, tensor: Any) -> NoReturn:
        raise self._error
