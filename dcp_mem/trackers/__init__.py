"""Where figures of checkpoints go: JSON lines, OpenMetrics, TensorBoard, MLflow, or whatever is a `Tracker`."""

from dcp_mem.trackers.base import Event, Tracker
from dcp_mem.trackers.jsonlines import JsonLines

__all__ = ["Event", "JsonLines", "Tracker"]
