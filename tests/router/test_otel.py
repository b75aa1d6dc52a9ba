"""Traces as a collector gets them: a real OTLP server on loopback, scripted workers behind the router."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from http_front import HttpFront

from router.served_model import ServedModel

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed: `make tools` does")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="its exporter is not installed")

import itertools

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvrelay.v1 import router_pb2, router_pb2_grpc
from router import otel
from router.otel import OtelTracer
from router.telemetry import CallRecord, TraceHeaders

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a secret prompt"}]
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BOUND_S = 10.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []
        self.resources: list[dict[str, str]] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._arrived:
            for each in request.resource_spans:
                self.resources.append({pair.key: pair.value.string_value for pair in each.resource.attributes})
                for scope in each.scope_spans:
                    self.spans.extend(scope.spans)
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def roots(self, count: int) -> list[trace_pb2.Span]:
        """Wait until `count` calls have come."""

        def wait() -> list[trace_pb2.Span]:
            with self._arrived:
                assert self._arrived.wait_for(lambda: len(self._roots()) >= count, BOUND_S)
                return self._roots()

        return await asyncio.to_thread(wait)

    def _roots(self) -> list[trace_pb2.Span]:
        return [span for span in self.spans if span.kind == trace_pb2.Span.SPAN_KIND_SERVER]

    def children(self, root: trace_pb2.Span) -> dict[str, trace_pb2.Span]:
        return {span.name: span for span in self.spans if span.parent_span_id == root.span_id}

    def stop(self) -> None:
        self._server.stop(0).wait(BOUND_S)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "EVERY_S", 0.02)


@pytest.fixture
async def front(model: ServedModel) -> AsyncIterator[HttpFront]:
    front = HttpFront(model)
    yield front
    await front.close()


def told(span: trace_pb2.Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "") for pair in span.attributes}


async def test_a_call_is_one_trace_below_its_caller_and_its_parts_add_up_to_the_time_to_first_token(
    front: HttpFront, collector: Collector
) -> None:
    await front.start(otlp_endpoint=collector.endpoint, router_id="router-7")
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    status, answer = await front.post(CHAT, headers, messages=MESSAGES, max_tokens=4, temperature=0.5)
    assert status == 200
    (root,) = await collector.roots(1)
    assert (root.name, root.trace_id.hex(), root.parent_span_id.hex()) == ("chat fake", TRACE_ID, PARENT_ID)
    attributes = told(root)
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert collector.resources[0]["service.instance.id"] == "router-7"
    children = collector.children(root)
    parts = sorted(
        (span for name, span in children.items() if name not in ("transfer", "first_decode_step", "decode")),
        key=lambda span: span.start_time_unix_nano,
    )
    parts = [span for span in parts if span.name != "kv_transfer"]
    assert [span.name for span in parts][0::7] == ["admit", "emit"]
    for before, after in itertools.pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    ttft_ns = parts[-1].end_time_unix_nano - root.start_time_unix_nano
    assert ttft_ns == round(attributes["gen_ai.server.time_to_first_token"] * 1e6) * 1000
    assert told(children["prefill_compute"])["kvrelay.worker.id"] == "p0"
    assert told(children["decode"])["kvrelay.worker.id"] == "d0"
    assert told(children["kv_transfer"])["kvrelay.kv.bytes"] > 0
    assert "secret" not in str(collector.spans)


async def test_over_gRPC_the_context_comes_as_metadata(front: HttpFront, collector: Collector) -> None:
    await front.start(otlp_endpoint=collector.endpoint)
    request = router_pb2.GenerateRequest(prompt=b"x", n=2)
    request.sampling.max_tokens = 3
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
        metadata = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
        [_ async for _ in stub.Generate(request, timeout=BOUND_S, metadata=metadata)]
    (root,) = await collector.roots(1)
    assert (root.name, root.trace_id.hex(), root.parent_span_id.hex()) == ("text_completion fake", TRACE_ID, PARENT_ID)
    assert told(root)["gen_ai.usage.output_tokens"] == 6
    decodes = [told(span)["kvrelay.choice"] for span in collector.spans if span.name == "decode"]
    assert sorted(decodes) == [0, 1]


async def test_workers_get_the_trace_of_the_call(front: HttpFront, collector: Collector) -> None:
    await front.start(otlp_endpoint=collector.endpoint)
    await front.post(CHAT, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}, messages=MESSAGES, max_tokens=2)
    (root,) = await collector.roots(1)
    asked = [message.prefill.traceparent for message in front.prefill.received if message.HasField("prefill")]
    asked += [message.reserve.traceparent for message in front.decode.received if message.HasField("reserve")]
    assert asked == [f"00-{TRACE_ID}-{root.span_id.hex()}-01"] * 2


async def test_what_a_caller_does_not_sample_is_not_traced_and_the_ratio_holds_for_the_others(
    front: HttpFront, collector: Collector
) -> None:
    await front.start(otlp_endpoint=collector.endpoint, trace_ratio=0.0)
    assert (await front.post(CHAT, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}, messages=MESSAGES))[0] == 200
    assert (await front.post(CHAT, {"traceparent": "nonsense"}, messages=MESSAGES))[0] == 200
    await front.post(CHAT, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}, messages=MESSAGES, max_tokens=1)
    (root,) = await collector.roots(1)
    assert told(root)["gen_ai.usage.output_tokens"] == 1


async def test_a_call_that_fails_is_a_trace_with_the_class_of_its_error(front: HttpFront, collector: Collector) -> None:
    await front.start(otlp_endpoint=collector.endpoint, cold_wait_s=0.05, no_worker_wait_s=0.05)
    front.server.set_workers({})
    assert (await front.post(CHAT, messages=MESSAGES))[0] == 503
    (root,) = await collector.roots(1)
    assert told(root)["error.type"] == "NoWorkers"
    assert root.status.code == trace_pb2.Status.STATUS_CODE_ERROR


async def test_a_collector_that_is_not_there_costs_no_call_anything(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", 0.05)
    await front.start(otlp_endpoint="http://127.0.0.1:1")
    answer = await front.ok(CHAT, messages=MESSAGES, max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


class Stuck(SpanExporter):
    """A collector that takes nothing until it is let."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        assert self.free.wait(BOUND_S)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_calls_that_find_no_room_are_dropped_whole_and_every_span_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = 64
    monkeypatch.setattr(otel, "MAX_WAITING", room)
    monkeypatch.setattr(otel, "MAX_BATCH", 16)
    stuck = Stuck()
    tracer = OtelTracer("http://127.0.0.1:1", 1.0, "r", "m", exporter=stuck)
    message = router_pb2.GenerateRequest(prompt=b"x")
    finished = router_pb2.Finished()
    finished.waterfall.parts.add(name="admit", duration_us=5)
    for _ in range(room):  # two spans each: twice the room
        record = CallRecord(message, "t", finished=[finished])
        tracer.end(tracer.begin(message, TraceHeaders()), record)
    dropped = tracer.counts()["dropped"]
    stuck.free.set()
    tracer.close()
    assert dropped == room
    assert tracer.counts() == {"exported": room, "failed": 0, "dropped": room}
