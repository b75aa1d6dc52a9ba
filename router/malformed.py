"""Refuses requests that protobuf cannot read, with a status that says which field is at fault.

Without this, gRPC answers a text field that is not UTF-8 with INTERNAL and no reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from engine.errors import RequestError
from kvrelay._status import abort

_LENGTH_DELIMITED = 2
"""Protobuf's wire type of text, bytes and messages."""
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Applies to the calls of `services`."""

    def __init__(self, services: Iterable[ServiceDescriptor]) -> None:
        self._requests = {
            f"/{service.full_name}/{method.name}": method.input_type
            for service in services
            for method in service.methods
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        descriptor = self._requests.get(handler_call_details.method)
        if handler is None or descriptor is None:
            return handler
        return _checked(handler, descriptor)


def _checked(handler: Any, descriptor: Descriptor) -> _Handler:
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    read, serve = handler.request_deserializer, getattr(handler, kind)

    def read_or_refuse(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return malformed(data, descriptor)

    async def serve_or_refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, RequestError):
            await abort(context, request)
        return await serve(request, context)

    checked: _Handler = handler._replace(request_deserializer=read_or_refuse, **{kind: serve_or_refuse})
    return checked


def malformed(data: bytes, descriptor: Descriptor) -> RequestError:
    """What is wrong with `data`, which could not be read as a message of type `descriptor`."""
    try:
        field = _field_with_bad_text(data, descriptor)
    except DecodeError:
        field = None
    if field is None:
        return RequestError("request", f"is not a {descriptor.name} message")
    return RequestError(field.removeprefix("chat."), "must be UTF-8")


def _field_with_bad_text(data: bytes, descriptor: Descriptor) -> str | None:
    """Path of the first text field that is not UTF-8. Raises `DecodeError` if `data` is no message at all."""
    raw = Empty()
    raw.ParseFromString(data)
    seen: Counter[int] = Counter()
    for entry in cast(Iterable[Any], UnknownFieldSet(raw)):
        field = descriptor.fields_by_number.get(entry.field_number)
        if field is None or entry.wire_type != _LENGTH_DELIMITED:
            continue
        name = f"{field.name}[{seen[field.number]}]" if field.is_repeated else field.name
        seen[field.number] += 1
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(entry.data):
            return name
        if field.message_type is not None:
            inner = _field_with_bad_text(entry.data, field.message_type)
            if inner is not None:
                return f"{name}.{inner}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
