"""`OpenTelemetry`: a span for each event. Needs the extra `opentelemetry`."""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("opentelemetry-api")

from collections import OrderedDict

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from dcp_mem.manager.tracker import Event

_MOST_SAVES = 1_000
_NANOSECONDS = 1_000_000_000


class OpenTelemetry:
    """Make a span of each event (`dcp_mem.save`, `dcp_mem.flush`, …), as long as what it tells of.

    The flush and the copies of a checkpoint are children of its save: a trace shows what has become
    of one checkpoint. What isn't good has the status ERROR, with the reason.

    Args:
        tracer_provider: By default the one that your application has set.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._provider = tracer_provider
        self._saves: OrderedDict[str, Context] = OrderedDict()

    def track(self, event: Event) -> None:
        tracer = trace.get_tracer("dcp_mem", tracer_provider=self._provider)
        is_later = event.kind in ("flush", "copies")
        end = round(event.time * _NANOSECONDS)
        span = tracer.start_span(
            f"dcp_mem.{event.kind}",
            # A trace of its own, whatever is current in the thread that tells.
            self._saves.get(event.checkpoint, Context()) if is_later else Context(),
            attributes=_attributes(event),
            start_time=end - round(event.seconds * _NANOSECONDS),
        )
        if event.kind == "save":
            self._remember(event.checkpoint, span)
        if not event.is_good:
            span.set_status(Status(StatusCode.ERROR, event.detail or event.outcome))
        span.end(end)

    def close(self) -> None:
        return

    def _remember(self, checkpoint: str, span: Span) -> None:
        self._saves[checkpoint] = trace.set_span_in_context(span, Context())
        if len(self._saves) > _MOST_SAVES:
            self._saves.popitem(last=False)


def _attributes(event: Event) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "dcp_mem.job": event.job,
        "dcp_mem.checkpoint": event.checkpoint,
        "dcp_mem.outcome": event.outcome,
        "dcp_mem.bytes": event.nbytes,
    }
    if event.step is not None:
        found["dcp_mem.step"] = event.step
    if event.detail:
        found["dcp_mem.detail"] = event.detail
    return found | {f"dcp_mem.{name}": value for name, value in event.figures.items()}
