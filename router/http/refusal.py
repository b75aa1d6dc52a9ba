"""Answers a connection that is one too many, whatever it asks, and closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp import web


class Refusal(asyncio.Protocol):
    """Waits for the first bytes, so that the client reads its answer before its connection breaks; not for long."""

    def __init__(self, answer: web.Response, wait_s: float, over: Callable[[Refusal], None]) -> None:
        """`over` is told once the connection is closed."""
        assert isinstance(answer.body, bytes), "an answer of JSON"
        head = (
            f"HTTP/1.1 {answer.status} {answer.reason}\r\nConnection: close\r\nContent-Length: {len(answer.body)}\r\n"
        )
        head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items() if name != "Content-Length")
        self._answer = head.encode() + b"\r\n" + answer.body
        self._wait_s = wait_s
        self._over = over
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "data of a connection"
        self._transport.write(self._answer)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._over(self)

    def abort(self) -> None:
        """Wait no longer."""
        if self._transport is not None:
            self._transport.abort()
