"""A worker with OpenAI's HTTP API that computes nothing: what other systems' routers get in `bench.gateway`.

One step a turn of the event loop, an event for each live stream whose router reads, as engines do. Answers whatever
else routers ask with 200. `python -m bench.gateway_http_worker` prints its address.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = {
    "id": "cmpl-bench",
    "object": "text_completion",
    "created": 1,
    "model": "bench",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
}
_ANSWER = json.dumps(_EVENT | {"object": "model", "model_path": "bench", "is_generation": True, "data": []}).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_TOKEN = _chunk(b"data: %b\n\n" % json.dumps(_EVENT).encode())
_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Engine:
    """Invariant: `_live` holds the connections that decode, with the tokens that each is still to get."""

    def __init__(self) -> None:
        self._live: dict[_Connection, int] = {}
        self._work = asyncio.Event()

    def add(self, connection: _Connection, num_tokens: int) -> None:
        self._live[connection] = num_tokens
        self._work.set()

    def forget(self, connection: _Connection) -> None:
        self._live.pop(connection, None)

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        while True:
            ready = [connection for connection in self._live if connection.reads]
            for connection in ready:
                connection.write(_TOKEN)
                self._live[connection] -= 1
                if not self._live[connection]:
                    del self._live[connection]
                    connection.end()
            if ready:
                await asyncio.sleep(0)
            else:
                self._work.clear()
                await self._work.wait()


class _Connection(asyncio.Protocol):
    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._unread = b""
        self._closes = False
        self.reads = True
        """Whether the router takes what is written."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.forget(self)

    def pause_writing(self) -> None:
        self.reads = False

    def resume_writing(self) -> None:
        self.reads = True
        self._engine.wake()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def end(self) -> None:
        self.write(_END)
        if self._closes:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            head = self._unread[:end].lower()
            _, _, length = head.partition(b"content-length:")
            total = end + 4 + int(length.split(b"\r\n", 1)[0] or b"0")
            if len(self._unread) < total:
                return
            body, self._unread = self._unread[end + 4 : total], self._unread[total:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post /v1/completions "):
            self._closes = b"\r\nconnection: close" in head
            self.write(_HEAD)
            self._engine.add(self, json.loads(body)["max_tokens"])
        else:
            self.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_ANSWER)
            )
            self.write(_ANSWER)


async def serve(port: int = 0) -> None:
    engine = _Engine()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), "127.0.0.1", port)
    print(json.dumps({"address": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await engine.run()


if __name__ == "__main__":
    uvloop.run(serve())
