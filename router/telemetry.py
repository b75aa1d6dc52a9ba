"""What is told of a call once it is over: a line of the log, a trace. Made of the call's own events, after the fact, so
nothing is measured twice. A router where neither is wanted has no `Telemetry`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.errors import EngineError
from kvrelay._logs import log_fields
from kvrelay._wire import finish_reason_from_proto
from kvrelay.v1 import router_pb2

logger = logging.getLogger("kvrelay.calls")


class TraceHeaders(NamedTuple):
    """W3C trace context as a caller sent it; empty, or nonsense, begins a trace of our own."""

    traceparent: str = ""
    tracestate: str = ""


NO_HEADERS = TraceHeaders()


@dataclass(slots=True)
class CallRecord:
    """Holds no prompt, no text and no token."""

    message: router_pb2.GenerateRequest
    """As it came; read for its settings."""
    tenant: str
    traceparent: str = ""
    """For workers; empty if the call is not traced."""
    request_id: str = ""
    prompt_tokens: int = 0
    finished: list[router_pb2.Finished] = field(default_factory=list)
    """One for each choice that is complete, in the order in which they were."""
    error: str = ""
    """Class of what ended the call, if it did not end well."""
    seconds: float = 0.0
    """From receipt to the end."""

    def note(self, event: router_pb2.GenerateResponse) -> None:
        if event.HasField("finished"):
            self.finished.append(event.finished)
        elif event.HasField("accepted"):
            self.request_id, self.prompt_tokens = event.accepted.request_id, event.accepted.prompt_tokens

    @property
    def reasons(self) -> list[str]:
        """By choice."""
        by_choice = sorted(self.finished, key=lambda finished: finished.choice)
        return [finish_reason_from_proto(finished.reason) or "unknown" for finished in by_choice]

    @property
    def completion_tokens(self) -> int:
        return sum(finished.usage.completion_tokens for finished in self.finished)


class Span(Protocol):
    """A span of a call that is not over."""

    @property
    def traceparent(self) -> str: ...
    @property
    def trace_id(self) -> str: ...


class Tracer(Protocol):
    def begin(self, message: router_pb2.GenerateRequest, headers: TraceHeaders) -> Span: ...

    def end(self, span: Span, record: CallRecord) -> None:
        """Never waits and never fails: what cannot be kept is dropped, and counted."""

    def counts(self) -> Mapping[str, int]:
        """Spans by what became of them."""

    def close(self) -> None:
        """Send what is there, within a bound, and stop. Blocks."""


class Telemetry:
    """On the event loop."""

    def __init__(self, tracer: Tracer | None, log_calls: bool, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._log_calls = log_calls
        self._clock = clock

    @contextmanager
    def call(
        self, tenant: str, message: router_pb2.GenerateRequest, headers: TraceHeaders
    ) -> Iterator[CallRecord | None]:
        """The record to be filled while the block runs. However the block is left, what is to be told is told then."""
        began, record, span = self._clock(), CallRecord(message, tenant), None
        record.request_id = message.request_id
        with ExitStack() as stack:
            if self._tracer is not None:
                span = self._tracer.begin(message, headers)
                record.traceparent = span.traceparent
                stack.enter_context(log_fields(trace_id=span.trace_id))
            try:
                yield record
            except EngineError as error:
                record.error = type(error).__name__
                raise
            except asyncio.CancelledError:
                record.error = "RequestCancelled"
                raise
            finally:
                record.seconds = self._clock() - began
                if self._tracer is not None and span is not None:
                    self._tracer.end(span, record)
                if self._log_calls:
                    _log(record)


def _log(record: CallRecord) -> None:
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "outcome": record.error or ",".join(record.reasons) or "unknown",
        "seconds": round(record.seconds, 6),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
    }
    if record.finished:
        first = record.finished[0]
        fields |= {"cached_tokens": first.usage.cached_tokens, "ttft_ms": first.waterfall.ttft_us / 1000}
        fields |= {name: getattr(first.route, name) for name in ("prefill_worker", "decode_worker", "attempts")}
    told = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.info("%s", told, extra={"fields": fields})
