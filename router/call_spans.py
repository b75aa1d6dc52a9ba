"""The waterfall of an output as spans: names, times, attributes. Pure; knows no exporter.

Names are those of `kvrelay explain`. Attributes are OpenTelemetry's for generative AI where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.v1 import router_pb2
from router.telemetry import CallRecord

Attribute = str | int | float | bool | Sequence[str]
CLIENTS_FAULT = {"RequestError", "RequestCancelled", "Unauthenticated", "PermissionDenied", "RateLimited"}
"""Errors that leave a span's status unset: the router did what it should."""
_DECODE_PARTS = {
    "reserve_wait",
    "reserve_rpc",
    "decode_prefill",
    "transfer",
    "first_decode_step",
    "decode",
    "kv_transfer",
}
_PREFILL_PARTS = {"prefill_queue", "prefill_compute", "prefill_rpc", "prefill_failed"}
_SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Microseconds since the call was received."""

    name: str
    begin_us: int
    end_us: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


def spans_of(finished: router_pb2.Finished) -> list[CallSpan]:
    """Of one output. Those up to "emit" meet, and end with the first token; "transfer" and "first_decode_step" end with
    the second, "decode" with the last. "kv_transfer" lies beside them: the whole transfer, hidden or not."""
    waterfall, route, at = finished.waterfall, finished.route, 0
    spans = []
    for part in (*waterfall.parts, *waterfall.after_first):
        spans.append(CallSpan(part.name, at, at + part.duration_us, _of_worker(part.name, route)))
        at += part.duration_us
    if waterfall.decode_tokens_per_s > 0:
        decoding_us = (finished.usage.completion_tokens - 1) / waterfall.decode_tokens_per_s * 1e6
        end_us = max(at, waterfall.ttft_us + round(decoding_us))
        rate: dict[str, Attribute] = {"kvrelay.tokens_per_s": waterfall.decode_tokens_per_s}
        spans.append(CallSpan("decode", at, end_us, _of_worker("decode", route) | rate))
    if waterfall.handed_over_us and route.blocks_sent:
        begin_us = max(0, waterfall.handed_over_us - route.transfer_us)
        spans.append(CallSpan("kv_transfer", begin_us, waterfall.handed_over_us, _of_transfer(route)))
    return spans


def request_attributes(message: router_pb2.GenerateRequest, model: str) -> dict[str, Attribute]:
    """What is known when the call begins. Stop strings and prompts are the client's and stay away."""
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation_of(message),
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": model,
    }
    for name, attribute in _SAMPLING.items():
        if message.sampling.HasField(name):  # type: ignore[arg-type]  # names of optional fields
            value = getattr(message.sampling, name)
            attributes[attribute] = value if value < 1 << 63 else str(value)
    if message.n > 1:
        attributes["gen_ai.request.choice.count"] = message.n
    return attributes


def result_attributes(record: CallRecord, model: str) -> dict[str, Attribute]:
    """What came of it."""
    attributes: dict[str, Attribute] = {"gen_ai.response.id": record.request_id, "gen_ai.response.model": model}
    attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
    attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
    if record.finished:
        first = record.finished[0]
        attributes["gen_ai.response.finish_reasons"] = record.reasons
        attributes["gen_ai.usage.cache_read.input_tokens"] = first.usage.cached_tokens
        attributes["gen_ai.server.time_to_first_token"] = first.waterfall.ttft_us / 1e6
        attributes["kvrelay.attempts"] = first.route.attempts
    if record.error:
        attributes["error.type"] = record.error
    return attributes


def operation_of(message: router_pb2.GenerateRequest) -> str:
    return "chat" if message.WhichOneof("input") == "chat" else "text_completion"


def _of_worker(part: str, route: router_pb2.Route) -> dict[str, Attribute]:
    if part in _PREFILL_PARTS and route.prefill_worker:
        return {"kvrelay.worker.id": route.prefill_worker, "kvrelay.worker.role": "prefill"}
    if part in _DECODE_PARTS and route.decode_worker:
        return {"kvrelay.worker.id": route.decode_worker, "kvrelay.worker.role": "decode"}
    return {}


def _of_transfer(route: router_pb2.Route) -> dict[str, Attribute]:
    attributes = _of_worker("kv_transfer", route) | {
        "kvrelay.kv.from": route.prefill_worker,
        "kvrelay.kv.transport": route.transport,
        "kvrelay.kv.bytes": route.bytes_sent,
        "kvrelay.kv.blocks": route.blocks_adopted,
    }
    if route.transfer_error:
        attributes["error.type"] = route.transfer_error.partition(":")[0]
    return attributes
