"""`MLflow`: figures as metrics of an MLflow run, the report and histories as its artifacts.

Needs the extra `mlflow`.
"""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("mlflow-skinny")

import json
from importlib.util import find_spec
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, RunTag

from dcp_mem.errors import ConfigError
from dcp_mem.manager.tracker import Event, Story

_LONGEST_TAG = 4000
_TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow's page finds tables


class MLflow:
    """Log figures as metrics of a run, by step (`checkpoint/save_seconds`, …).

    Its artifacts get `checkpoint/report.html`, the histories, `totals.json`, the table
    `checkpoints.json`, and the figure `checkpoints.png` where matplotlib is installed: once a
    minute at most, and at the end. The run is never ended here.

    Args:
        run_id: By default the run that is active in the thread that makes the tracker.
        tracking_uri: By default MLflow's own.
        prefix: First part of the metrics' names, and the artifacts' folder.
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
        run_id, client = self._run()
        milliseconds, step = int(event.time * 1000), event.step or 0
        metrics = [
            Metric(f"{self._prefix}/{name}", value, milliseconds, step)
            for name, value in event.scalars().items()
        ]
        tags = [RunTag(f"{self._prefix}.last_{event.kind}", event.summary[:_LONGEST_TAG])]
        client.log_batch(run_id, metrics=metrics, tags=tags)

    def publish(self, story: Story) -> None:
        run_id, client = self._run()
        for name, text in {"report.html": story.page, **story.files}.items():
            client.log_text(run_id, text, f"{self._prefix}/{name}")
        client.log_dict(run_id, dict(story.totals), f"{self._prefix}/totals.json")
        self._log_table(run_id, client, story)
        if find_spec("matplotlib") is not None and story.checkpoints:
            client.log_figure(run_id, _figure(story), f"{self._prefix}/checkpoints.png")

    def close(self) -> None:
        return

    def _log_table(self, run_id: str, client: MlflowClient, story: Story) -> None:
        """Put the table as MLflow's own `log_table` lays it, which would add to the last one."""
        file, columns = f"{self._prefix}/checkpoints.json", list((story.checkpoints or [{}])[0])
        rows = [[one[column] for column in columns] for one in story.checkpoints]
        client.log_dict(run_id, {"columns": columns, "data": rows}, file)
        tables = [{"path": file, "type": "table"}]
        known = client.get_run(run_id).data.tags.get(_TABLES)
        others = [one for one in json.loads(known or "[]") if one not in tables]
        client.set_tag(run_id, _TABLES, json.dumps(others + tables))

    def _run(self) -> tuple[str, MlflowClient]:
        if self._run_id is None:  # Raised only now, since other ranks need no run.
            raise ConfigError(
                "MLflow: no run was active when this tracker was made: make it inside of one, "
                "or give run_id="
            )
        if self._client is None:
            self._client = MlflowClient(self._tracking_uri)
        return self._run_id, self._client


def _figure(story: Story) -> Any:
    """Draw what saves blocked, and how fast flushes were, over the checkpoints."""
    from matplotlib.figure import Figure  # only where it is installed

    figure = Figure(figsize=(8, 5), layout="constrained")
    names = [str(one["checkpoint"]) for one in story.checkpoints]
    for axes, column, scale, label in zip(
        figure.subplots(2, sharex=True),
        ("save_seconds", "flush_bytes_per_second"),
        (1e3, 1e-6),
        ("save (ms)", "flush (MB/s)"),
        strict=True,
    ):
        axes.plot(
            range(len(names)), [float(one[column]) * scale for one in story.checkpoints], ".-"
        )
        axes.set_ylabel(label)
    axes.set_xticks(range(len(names))[:: len(names) // 8 + 1], names[:: len(names) // 8 + 1])
    return figure
