"""One answer as server-sent events. Owns the response: whether it has begun, and how it ends."""

from __future__ import annotations

import asyncio

from aiohttp import web

from engine.errors import RequestCancelled
from router.http.shapes import Json, json_text

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that buffer would hold the first token back
}


class EventStream:
    """Status and headers go out with the first event, so that whatever fails before has a status of its own.

    A write waits while the client does not read. Several tasks may write.
    """

    def __init__(self, request: web.Request, last_word_s: float) -> None:
        """`last_word_s` is for the client to take the end of the stream; then its connection is cut."""
        self._request = request
        self._last_word_s = last_word_s
        self.response = web.StreamResponse(headers=HEADERS)
        self._beginning = asyncio.Lock()

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, *chunks: Json | str | None) -> None:
        """Those that are something, as one write. A text is JSON already."""
        texts = [chunk if isinstance(chunk, str) else json_text(chunk) for chunk in chunks if chunk is not None]
        data = "".join([f"data: {text}\n\n" for text in texts])
        if data:
            await self._write(data.encode())

    async def done(self) -> None:
        """The answer is complete."""
        await self._end(DONE)

    async def fail(self, body: Json) -> None:
        """The answer ends here, incomplete: an error event, and no `[DONE]`."""
        await self._end(f"event: error\ndata: {json_text(body)}\n\n".encode())

    async def _end(self, data: bytes) -> None:
        """The request is over, and its deadline with it: a client that does not read is not waited for."""
        try:
            async with asyncio.timeout(self._last_word_s):
                await self._write(data)
                await self.response.write_eof()
        except RequestCancelled:
            return
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            async with self._beginning:
                if not self.response.prepared:
                    await self.response.prepare(self._request)
        try:
            await self.response.write(data)
        except ConnectionResetError:  # between two writes; where it waits, the handler is cancelled
            raise RequestCancelled("the client went away") from None
