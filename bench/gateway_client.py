"""A client that asks for one event stream and throws it away, with the prompts of `bench.gateway`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

from engine.errors import InternalError

STREAM_TIMEOUT_S = 120.0
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "from", "home")


def prompt_of(number: int) -> str:
    """About 100 tokens, no two alike from the first block on."""
    return f"{number} " + " ".join(_WORDS[(number + i * 7) % len(_WORDS)] for i in range(100))


class Reader(asyncio.Protocol):
    """Sends one HTTP request, notes when the first event came, counts events, and is done at the end."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.first = 0.0
        self.num_events = 0
        self.tail = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = time.perf_counter()
        self.num_events += data.count(b"\n\n")
        self.tail = (self.tail + data)[-200:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def stream(address: str, prompt: str, max_tokens: int, model: str | None = None) -> tuple[float, Reader]:
    """One completion as events, to its end. Returns when it began. Raises `InternalError` if it ends otherwise."""
    fields = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "model": model}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = address.split(":")
    began = time.perf_counter()
    _, reader = await asyncio.get_running_loop().create_connection(
        lambda: Reader(head.encode() + body), host, int(port)
    )
    async with asyncio.timeout(STREAM_TIMEOUT_S):
        await reader.done
    if b"data: [DONE]" not in reader.tail:
        raise InternalError(f"a stream ended with {reader.tail!r}")
    return began, reader
