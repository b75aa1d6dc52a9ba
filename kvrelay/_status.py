"""The table between `engine.errors` and gRPC status, in both directions. The only place that knows it.

A status carries, beside code and message, a `google.rpc.ErrorInfo` whose reason is the class name, so that a client
gets the very class back; a `BadRequest` that names the field of a `RequestError`; a `RetryInfo` where the error is
retryable.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, NoReturn, Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from engine import errors
from engine.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineError,
    InternalError,
    ModelError,
    PermissionDenied,
    RequestCancelled,
    RequestError,
    TransferError,
    Unauthenticated,
    UnavailableError,
)

ERROR_DOMAIN = "kvrelay"
DETAILS_KEY = "grpc-status-details-bin"
DEFAULT_RETRY_S = 1.0

MAX_MESSAGE_BYTES = 1024
"""Status and details travel in the trailers, which gRPC limits to 8 KiB; the message is in them up to three times."""

_CODES: dict[type[EngineError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    TransferError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    InternalError: grpc.StatusCode.INTERNAL,
}

# For a status that names no class of ours, made by gRPC itself, a proxy or a newer peer. The rest: InternalError.
_CLASSES_OF_FOREIGN: dict[grpc.StatusCode, type[EngineError]] = {
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
}

# How gRPC refuses a message before the server sees it. To try again would not help.
_TOO_LARGE = re.compile(r"^(?:SERVER: )?Received message larger than max \((?P<size>\d+) vs\. (?P<limit>\d+)\)")

# What the one who sees it can do about it.
_ADVICE: dict[grpc.StatusCode, str] = {
    grpc.StatusCode.UNAVAILABLE: "is a router running there? `kvrelay up` starts a local cluster",
    grpc.StatusCode.UNIMPLEMENTED: "a kvrelay router of this version would know the call",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout_s sets how long a call may take",
}

_CLASSES: dict[str, type[EngineError]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, EngineError)
}

_DO_NOT_SEND_AGAIN = ("grpc-retry-pushback-ms", "-1")
"""gRPC's own word to a client that would send a call again by itself: this answer is final."""

AbortArguments = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


class _Status(Protocol):
    """What `grpc.RpcError` has wherever gRPC raises it, sync or async; the stubs do not say so."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def status_of(error: EngineError) -> grpc.StatusCode:
    """The code of the nearest class in the tree; `EngineError` itself is INTERNAL."""
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return grpc.StatusCode.INTERNAL


def to_rich_status(error: EngineError, retry_after_s: float = DEFAULT_RETRY_S) -> status_pb2.Status:
    """A `google.rpc.Status`. `retry_after_s` is sent if the error is retryable and knows no better.

    Messages are cut at `MAX_MESSAGE_BYTES`.
    """
    status = status_pb2.Status(code=status_of(error).value[0], message=_cut(str(error)))
    _add_detail(status, error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=ERROR_DOMAIN))
    if isinstance(error, RequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field), description=_cut(error.description)
        )
        _add_detail(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retryable:
        retry = error_details_pb2.RetryInfo()
        hint_s = retry_after_s if error.retry_after_s is None else error.retry_after_s
        retry.retry_delay.FromMilliseconds(math.ceil(hint_s * 1000))
        _add_detail(status, retry)
    return status


def abort_arguments(error: EngineError, retry_after_s: float = DEFAULT_RETRY_S) -> AbortArguments:
    """What `abort` gives to gRPC.

    Clients send calls again that a router did not take because it stops (`kvrelay._channel`), and no others.
    """
    status = to_rich_status(error, retry_after_s)
    final = () if isinstance(error, Draining) else (_DO_NOT_SEND_AGAIN,)
    return status_of(error), status.message, ((DETAILS_KEY, status.SerializeToString()), *final)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: EngineError, retry_after_s: float = DEFAULT_RETRY_S
) -> NoReturn:
    """End a call with the status of `error`. Always raises: what gRPC wants to see.

    That is `CancelledError` if the call is over already, as its deadline has passed or its client has gone: there is
    nobody to tell, and gRPC would log the attempt as a fault.
    """
    try:
        await context.abort(*abort_arguments(error, retry_after_s))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")


def from_rpc_error(error: grpc.RpcError, peer: str = "") -> EngineError:
    """The error that the server raised; or, if the status is not of our making, the nearest class with the code in
    its text. `peer` (HOST:PORT) goes into the texts of the latter."""
    call = cast(_Status, error)
    code, text = call.code(), call.details() or ""
    status = _rich_status_in(call)
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN and info.reason in _CLASSES:
            return _restore(_CLASSES[info.reason], status)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(text)):
        return RequestError("request", f"at most {sizes['limit']} bytes in one message, got {sizes['size']}")
    cls = _CLASSES_OF_FOREIGN.get(code, InternalError)
    return cls(_foreign_text(code, text, peer))


def error_from_name(name: str, message: str) -> EngineError:
    """The error that a worker reported in `Ended` by class name and text. An unknown name gives `InternalError`."""
    cls = _CLASSES.get(name)
    if cls is None:
        return InternalError(f"{name}: {message}")
    if issubclass(cls, RequestError):
        field, _, description = message.partition(": ")
        return cls(field, description)
    return cls(message)


def retry_after(error: grpc.RpcError) -> float | None:
    """Seconds after which the server advises to try again, if it does."""
    return _retry_after(_rich_status_in(cast(_Status, error)))


def _retry_after(status: status_pb2.Status) -> float | None:
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToMilliseconds()) / 1000
    return None


def _restore(cls: type[EngineError], status: status_pb2.Status) -> EngineError:
    if not issubclass(cls, RequestError):
        error = cls(status.message)
        error.retry_after_s = _retry_after(status)
        return error
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return cls(violation.field, violation.description)
    return error_from_name(cls.__name__, status.message)


def _rich_status_in(call: _Status) -> status_pb2.Status:
    """The details that came with the status; empty if there are none, or if they are no `google.rpc.Status`."""
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _foreign_text(code: grpc.StatusCode, text: str, peer: str) -> str:
    said = f"gRPC status {code.name} from {peer}" if peer else f"gRPC status {code.name}"
    said += f": {text}" if text else ""
    return f"{said} ({_ADVICE[code]})" if peer and code in _ADVICE else said


def _add_detail(status: status_pb2.Status, detail: Any) -> None:
    status.details.add().Pack(detail)


def _cut(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")
