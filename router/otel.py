"""Traces to a collector, by OpenTelemetry's own SDK and exporter: the extra `otel`. Imported only where an endpoint is
configured."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay.v1 import router_pb2
from router.call_spans import CLIENTS_FAULT, CallSpan, operation_of, request_attributes, result_attributes, spans_of
from router.telemetry import CallRecord, Span, TraceHeaders

MAX_WAITING = 8192
"""Spans that wait for the collector, some 1 KiB each. A call whose spans find no room is dropped whole."""
MAX_BATCH = 512
EVERY_S = 1.0
"""Between two batches that are not full."""
EXPORT_TIMEOUT_S = 5.0
"""For one batch, its retries included."""
CLOSE_S = 2.0
"""For what waits when the router stops."""
_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class OpenSpan:
    span: trace.Span
    began_ns: int
    """Unix time."""
    traceparent: str
    trace_id: str


class Outbox(SpanExporter):
    """Counts what waits and what became of it, in front of the exporter. From any thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        self._counts = Counter({"exported": 0, "failed": 0, "dropped": 0})
        self._waiting = 0
        self._over = False

    def admit(self, number: int) -> bool:
        """Whether there is room for so many; if not, they count as dropped."""
        with self._lock:
            if self._waiting + number > MAX_WAITING:
                self._counts["dropped"] += number
                return False
            self._waiting += number
            return True

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """On the exporter's thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
            return result
        finally:
            with self._lock:
                self._waiting -= len(spans)
                self._counts["exported" if result is SpanExportResult.SUCCESS else "failed"] += len(spans)

    def shutdown(self) -> None:
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class OtelTracer:
    """A `Tracer`. A call that brings a trace context is traced if its caller traces it; of the others, `ratio`."""

    def __init__(
        self, endpoint: str, ratio: float, router_id: str, model: str, exporter: SpanExporter | None = None
    ) -> None:
        """`endpoint`: http:// or https:// and HOST:PORT of OTLP over gRPC. `exporter` stands in for it."""
        self._model = model
        if exporter is None:
            insecure = endpoint.startswith("http://")
            exporter = OTLPSpanExporter(endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
        self._outbox = Outbox(exporter)
        resource = Resource.create({"service.name": "kvrelay", "service.instance.id": router_id})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._outbox,
                max_queue_size=MAX_WAITING,
                max_export_batch_size=MAX_BATCH,
                schedule_delay_millis=EVERY_S * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("kvrelay.router")

    def begin(self, message: router_pb2.GenerateRequest, headers: TraceHeaders) -> OpenSpan:
        carrier = {"traceparent": headers.traceparent, "tracestate": headers.tracestate}
        began_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{operation_of(message)} {self._model}",
            context=_PROPAGATOR.extract({name: value for name, value in carrier.items() if value}),
            kind=trace.SpanKind.SERVER,
            attributes=request_attributes(message, self._model),
            start_time=began_ns,
        )
        onward: dict[str, str] = {}
        _PROPAGATOR.inject(onward, trace.set_span_in_context(span))
        trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        return OpenSpan(span, began_ns, onward.get("traceparent", ""), trace_id)

    def end(self, span: Span, record: CallRecord) -> None:
        assert isinstance(span, OpenSpan), "it was begun here"
        root = span.span
        if not root.is_recording():
            return
        outputs = [(finished.choice, spans_of(finished)) for finished in record.finished]
        if not self._outbox.admit(1 + sum(len(parts) for _, parts in outputs)):
            return
        for choice, parts in outputs:
            for part in parts:
                self._add(span, part, choice if len(outputs) > 1 else None)
        for name, value in result_attributes(record, self._model).items():
            root.set_attribute(name, value)
        if record.error and record.error not in CLIENTS_FAULT:
            root.set_status(trace.StatusCode.ERROR)
        root.end(span.began_ns + round(record.seconds * 1e9))

    def counts(self) -> Mapping[str, int]:
        return self._outbox.counts()

    def close(self) -> None:
        timer = threading.Timer(CLOSE_S, self._outbox.shutdown)  # ends an export that still waits or tries again
        timer.start()
        self._provider.shutdown()
        timer.cancel()

    def _add(self, parent: OpenSpan, part: CallSpan, choice: int | None) -> None:
        attributes = dict(part.attributes)
        if choice is not None:
            attributes["kvrelay.choice"] = choice
        child = self._tracer.start_span(
            part.name,
            context=trace.set_span_in_context(parent.span),
            attributes=attributes,
            start_time=parent.began_ns + part.begin_us * 1000,
        )
        child.end(parent.began_ns + part.end_us * 1000)
