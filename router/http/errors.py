"""The table between `engine.errors` and HTTP, in OpenAI's error shape. The only place that knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from engine.errors import (
    CapacityError,
    DeadlineExceeded,
    EngineError,
    PermissionDenied,
    RequestCancelled,
    RequestError,
    TransferError,
    Unauthenticated,
    UnavailableError,
)

MAX_MESSAGE_CHARS = 1024

_STATUS: dict[type[EngineError], tuple[int, str, str | None]] = {
    RequestError: (400, "invalid_request_error", None),
    Unauthenticated: (401, "invalid_request_error", "invalid_api_key"),
    PermissionDenied: (403, "invalid_request_error", "permission_denied"),
    CapacityError: (429, "rate_limit_error", "rate_limit_exceeded"),
    UnavailableError: (503, "server_error", "service_unavailable"),
    TransferError: (503, "server_error", "service_unavailable"),
    DeadlineExceeded: (504, "timeout_error", "timeout"),
    RequestCancelled: (499, "request_cancelled", "request_cancelled"),
}
"""Status, `type` and `code` of the nearest class in the tree; for the rest, 500."""
_FAULT = (500, "server_error", "internal_error")
_UNKNOWN_MODEL = (404, "invalid_request_error", "model_not_found")


def error_body(error: EngineError, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`names` gives the names of fields in the API that was called, where they are not ours."""
    _, kind, code = _entry(error)
    message, param = str(error), None
    if isinstance(error, RequestError):
        param = (names or {}).get(error.field, error.field)
        message = f"{param}: {error.description}"
    return _body(message, kind, param, code)


def error_response(error: EngineError, retry_after_s: float, names: Mapping[str, str] | None = None) -> web.Response:
    """`retry_after_s` is the hint of errors that may pass, unless they bring their own."""
    status, _, _ = _entry(error)
    headers = {}
    if error.retryable:
        hint_s = retry_after_s if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(hint_s)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error_body(error, names), status=status, headers=headers)


def http_error_response(error: web.HTTPException) -> web.Response:
    """What aiohttp refuses by itself: unknown paths, other methods, bodies over the limit."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    param = "body" if isinstance(error, web.HTTPRequestEntityTooLarge) else None
    return web.json_response(_body(error.text or error.reason, kind, param, None), status=error.status, headers=headers)


def fault_response() -> web.Response:
    return web.json_response(_body("a fault of the router; see its log", *_FAULT[1:2], None, _FAULT[2]), status=500)


def _entry(error: EngineError) -> tuple[int, str, str | None]:
    if isinstance(error, RequestError) and error.field == "model":
        return _UNKNOWN_MODEL
    return next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), _FAULT)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message[:MAX_MESSAGE_CHARS], "type": kind, "param": param, "code": code}}
