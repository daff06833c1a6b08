"""The OpenTelemetry SDK with our own ids. It is imported only if traces are enabled."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

log = structlog.get_logger()

QUEUE_MAX = 2048
_PATH = "/v1/traces"


class _Ids(IdGenerator):
    """Gives the next span the ids that were set for it."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Counted(SpanExporter):
    """Reports how many spans each export had, and whether it succeeded."""

    def __init__(self, inner: SpanExporter, exported: Callable[[int, bool], None]) -> None:
        self._inner = inner
        self._exported = exported

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self._exported(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class Exporting:
    """A bounded queue and a thread that exports from it. Only one thread may call `add`."""

    def __init__(self, endpoint: str, service: str, instance: str, on_dropped: Callable[[int], object]) -> None:
        self._on_dropped = on_dropped
        self._max = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "") or QUEUE_MAX)
        self._waiting = 0  # in the queue, or with the exporter
        self._lock = threading.Lock()
        self._failing = False
        self._endpoint = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint)
        self._ids = _Ids()
        ours = {"service.name": service, "service.namespace": "rollout", "service.instance.id": instance}
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({**ours, **OTELResourceDetector().detect().attributes}),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Counted(self._exporter, self._exported), self._max))
        self._tracer = self._provider.get_tracer("rollout")

    def add(
        self,
        name: str,
        ids: tuple[int, int, int],
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, str | int],
        error: str,
    ) -> None:
        """Queue a span. `ids` are those of the trace, the span and its parent, 0 for none."""
        with self._lock:
            full = self._waiting >= self._max
            self._waiting += not full
        if full:
            self._on_dropped(1)
            return
        self._ids.trace_id, self._ids.span_id, parent = ids
        above = SpanContext(ids[0], parent, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        context = set_span_in_context(NonRecordingSpan(above))  # an invalid one, without a parent, makes a root
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_ns)

    def _exported(self, count: int, arrived: bool) -> None:
        with self._lock:
            self._waiting -= count
        if not arrived:
            self._on_dropped(count)
        if arrived == self._failing:
            self._failing = not arrived
            if arrived:
                log.info("traces_exported_again", endpoint=self._endpoint)
            else:
                log.warning("traces_not_exported", endpoint=self._endpoint, action="spans are dropped; work goes on")

    def close(self) -> None:
        self._provider.shutdown()

    def give_up(self) -> None:
        """Interrupt a `close` that waits for the collector."""
        self._exporter.shutdown()
