"""`OpenMetrics`: a file that node_exporter's textfile collector reads. Needs `openmetrics`."""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("prometheus-client")

import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from dcp_mem.manager.tracker import KINDS, Event, Story

_TOTALS = {
    "goodput": "effective training time ratio of the job, earlier runs included",
    "lost_seconds": "seconds lost to saves, work done twice, pauses and loads; earlier runs' too",
}
_PLURALS = {"save": "saves", "flush": "flushes", "copies": "copies", "restore": "restores"}


class OpenMetrics:
    """Replace a file, atomically, with the counters and last figures after each event.

    Once a minute at most, and at the end, the job's effective training time ratio is renewed.
    Counters begin at 0 with each process, as Prometheus expects. Other users may read the file as
    far as the umask allows.

    Args:
        path: The file; for the textfile collector, a name that ends in ".prom" in its directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(os.path.expanduser(path))
        self._metrics = _Metrics()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._metrics)

    def track(self, event: Event) -> None:
        self._metrics.add(event)
        self._write()

    def publish(self, story: Story) -> None:
        self._metrics.totals[story.job] = story.totals
        self._write()

    def close(self) -> None:
        return

    def _write(self) -> None:
        temporary = f"{self._path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with open(temporary, "wb") as stream:
                stream.write(generate_latest(self._registry))  # type: ignore[no-untyped-call]
            os.replace(temporary, self._path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)


class _Metrics(Collector):
    """The figures, as Prometheus names them."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()  # By kind, job, outcome.
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)  # By kind, job.
        self._nbytes: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._last: dict[tuple[str, str], Event] = {}
        self.totals: dict[str, Mapping[str, float]] = {}  # By job, as its last story has them.

    def add(self, event: Event) -> None:
        self._counts[event.kind, event.job, event.outcome] += 1
        self._seconds[event.kind, event.job] += event.seconds
        self._nbytes[event.kind, event.job] += event.nbytes if event.is_good else 0
        if event.is_good:
            self._last[event.kind, event.job] = event

    def collect(self) -> Iterator[Metric]:
        for kind in KINDS:
            yield from self._counters(kind)
            yield from self._gauges(kind)
        for name, text in _TOTALS.items():
            gauge = GaugeMetricFamily(f"dcp_mem_{name}", text, labels=["job"])
            for job, totals in list(self.totals.items()):
                gauge.add_metric([job], totals[name])
            yield gauge

    def _counters(self, kind: str) -> Iterator[Metric]:
        many = CounterMetricFamily(
            f"dcp_mem_{_PLURALS[kind]}", f"{_PLURALS[kind]}, by outcome", labels=["job", "outcome"]
        )
        for (of_kind, job, outcome), count in list(self._counts.items()):
            if of_kind == kind:
                many.add_metric([job, outcome], count)
        yield many
        for name, totals, text in (
            ("seconds", self._seconds, "seconds that they took"),
            ("bytes", self._nbytes, "bytes of those that were good"),
        ):
            total = CounterMetricFamily(
                f"dcp_mem_{kind}_{name}", f"{_PLURALS[kind]}: {text}", labels=["job"]
            )
            for (of_kind, job), value in list(totals.items()):
                if of_kind == kind:
                    total.add_metric([job], value)
            yield total

    def _gauges(self, kind: str) -> Iterator[Metric]:
        figures: dict[str, GaugeMetricFamily] = {}
        for (of_kind, job), event in list(self._last.items()):
            if of_kind != kind:
                continue
            values = {
                "timestamp_seconds": event.time,
                "seconds": event.seconds,
                "bytes": event.nbytes,
            }
            values |= {"bytes_per_second": event.throughput, **event.figures}
            for name, value in (
                values if event.step is None else {"step": event.step, **values}
            ).items():
                gauge = figures.setdefault(
                    name,
                    GaugeMetricFamily(
                        f"dcp_mem_last_{kind}_{name}",
                        f"of the last good one: {name}",
                        None,
                        ["job"],
                    ),
                )
                gauge.add_metric([job], value)
        yield from figures.values()
