"""`MLflow`: figures as metrics of an MLflow run. Needs the extra `mlflow`."""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("mlflow-skinny")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, RunTag

from dcp_mem.errors import ConfigError
from dcp_mem.manager.tracker import Event

_LONGEST_TAG = 4000


class MLflow:
    """Log figures as metrics of a run, by step (`checkpoint/save_seconds`, …).

    The run is never ended here.

    Args:
        run_id: By default the run that is active in the thread that makes the tracker.
        tracking_uri: By default MLflow's own.
        prefix: First part of the metrics' names.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        prefix: str = "checkpoint",
    ) -> None:
        active = mlflow.active_run() if run_id is None else None
        self._run_id = run_id if active is None else active.info.run_id
        self._tracking_uri = tracking_uri or mlflow.get_tracking_uri()
        self._client: MlflowClient | None = None
        self._prefix = prefix

    def track(self, event: Event) -> None:
        if self._run_id is None:  # Raised only now, since other ranks need no run.
            raise ConfigError(
                "MLflow: no run was active when this tracker was made: make it inside of one, "
                "or give run_id="
            )
        if self._client is None:
            self._client = MlflowClient(self._tracking_uri)
        milliseconds, step = int(event.time * 1000), event.step or 0
        metrics = [
            Metric(f"{self._prefix}/{name}", value, milliseconds, step)
            for name, value in event.scalars().items()
        ]
        tags = [RunTag(f"{self._prefix}.last_{event.kind}", event.summary[:_LONGEST_TAG])]
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def close(self) -> None:
        return
