"""A router with scripted workers behind it, as an HTTP client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from fake_worker import FakeWorker
from router_fleet import CONFIG

from router.served_model import ServedModel
from router.server import RouterServer
from router.service import GiveOrder

BOUND_S = 10.0


@dataclass
class Events:
    """What came over one event stream."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def text(self, index: int = 0) -> str:
        """Of one choice, of either API."""
        choices = [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    def reasons(self, index: int = 0) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


class HttpFront:
    """One pair of workers unless others are given."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.prefill, self.decode = FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")
        self.workers: Sequence[FakeWorker] = (self.prefill, self.decode)
        self.give_order: GiveOrder | None = None

    async def start(self, **settings: Any) -> None:
        addresses = [await worker.start() for worker in self.workers]
        self.server = RouterServer(replace(CONFIG, workers=tuple(addresses), **settings), self._model, self.give_order)
        self.grpc_address = await self.server.start()
        self.url = f"http://{self.server.http_address}"
        self.http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(BOUND_S))
        async with asyncio.timeout(BOUND_S):
            while len(self.server.registry.snapshots()) < len(self.workers):
                await self.server.registry.changed()

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def ok(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer = await self.post(path, **body)
        assert status == 200, answer
        return dict(answer)

    async def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status, and what is in `error`."""
        status, answer = await self.post(path, **body)
        assert status >= 400
        assert list(answer) == ["error"]
        return status, answer["error"]

    async def stream(self, path: str, **body: Any) -> Events:
        async with self.open_stream(path, **body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return read_events(await response.text())

    @asynccontextmanager
    async def open_stream(self, path: str, **body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self.http.post(path, json=body | {"stream": True}) as response:
            yield response

    def connections(self) -> list[asyncio.WriteTransport]:
        """Of HTTP clients, as the server has them."""
        http = self.server._http
        assert http is not None
        assert http._runner.server is not None
        return [c.transport for c in http._runner.server.connections if c.transport is not None]

    async def disconnected(self, connection: asyncio.WriteTransport) -> None:
        """Wait until the server has let go of it."""
        async with asyncio.timeout(BOUND_S):
            while connection in self.connections():  # noqa: ASYNC110  # aiohttp tells nobody
                await asyncio.sleep(0)

    async def idle(self) -> None:
        """Wait until nothing of any request is left."""
        for worker in self.workers:
            await worker.idle()

    async def close(self) -> None:
        await self.http.close()
        await self.server.stop(grace_s=1.0)
        self.server.dispatcher.admission.check_idle()
        for worker in self.workers:
            await worker.stop()


def read_events(text: str) -> Events:
    """Refuses anything after `[DONE]`, and a stream that stops in the middle of an event."""
    events = Events()
    assert text.endswith("\n\n")
    for event in text.removesuffix("\n\n").split("\n\n"):
        assert not events.done, f"{event!r} came after [DONE]"
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        if fields["data"] == "[DONE]":
            events.done = True
        elif fields.get("event") == "error":
            events.errors.append(json.loads(fields["data"])["error"])
        else:
            events.chunks.append(json.loads(fields["data"]))
    return events
