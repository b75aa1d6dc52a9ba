"""Reads what a router asks of a worker into the engine's terms, and refuses what cannot be meant."""

from __future__ import annotations

import re

from engine.block_hash import unpack_tokens
from engine.errors import ConfigError, RequestError
from engine.kv_layout import KvLayout
from engine.request import Request, RequestKind
from kvrelay._wire import sampling_from_proto
from kvrelay.v1 import worker_pb2

MAX_SCOPE_BYTES = 256
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def read_request(
    message: worker_pb2.Reserve | worker_pb2.Prefill, key: str, kind: RequestKind, arrival: float
) -> Request:
    """The engine's request, known there by `key`. Raises `RequestError` naming the field."""
    if len(message.scope) > MAX_SCOPE_BYTES:
        raise RequestError("scope", f"at most {MAX_SCOPE_BYTES} bytes, got {len(message.scope)}")
    return Request(
        request_id=key,
        token_ids=unpack_tokens(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        params=sampling_from_proto(message.sampling),
        scope=message.scope,
        arrival=arrival,
        kind=kind,
        priority=message.priority,
        num_public_tokens=message.num_public_tokens,
    )


def read_traceparent(message: worker_pb2.Reserve | worker_pb2.Prefill) -> str:
    """Empty where the request is not traced, or what came is no trace context: a log line is worth no refusal."""
    return message.traceparent if _TRACEPARENT.fullmatch(message.traceparent) else ""


def read_layout(ticket: worker_pb2.Ticket | worker_pb2.Prewarm) -> KvLayout | None:
    """Of the decode worker's blocks; None if it did not say. Raises `RequestError` (field `ticket`)."""
    if not ticket.HasField("layout"):
        return None
    try:
        return KvLayout.from_message(ticket.layout)
    except ConfigError as error:
        raise RequestError("ticket", str(error)) from error


def read_timeout_s(message: worker_pb2.Reserve | worker_pb2.Prefill, max_timeout_s: float) -> float:
    """What is left of the request's deadline, at most `max_timeout_s`. Raises `RequestError` if nothing is."""
    if message.timeout_ms == 0:
        raise RequestError("timeout_ms", "must be at least 1: every request has a deadline")
    return min(message.timeout_ms / 1000, max_timeout_s)
