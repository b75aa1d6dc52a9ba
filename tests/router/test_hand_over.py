"""One router takes over from another on the same ports, while clients of both protocols call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from http_front import HttpFront
from router_fleet import CONFIG

from engine.errors import EngineError
from kvrelay import AsyncClient
from router import server as server_module
from router.http import server as http_module
from router.served_model import ServedModel
from router.server import RouterServer
from router.shared_port import prefer_newest

PROMPT = {"prompt": "hello", "max_tokens": 3}


@pytest.fixture
async def front(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpFront]:
    """Its router shares its ports."""
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(http_module, "QUIET_S", 0.05)
    front = HttpFront(model)
    await front.start(shares_ports=True)
    yield front
    await front.close()


async def successor(front: HttpFront, model: ServedModel) -> RouterServer:
    """Of `front`'s router; it listens."""
    port, http_port = (int(each.rpartition(":")[2]) for each in (front.grpc_address, front.server.http_address))
    workers = tuple(worker.address for worker in front.workers)
    config = replace(CONFIG, workers=workers, shares_ports=True, port=port, http_port=http_port, router_id="next")
    router = RouterServer(config, model)
    await router.prepare()
    async with asyncio.timeout(5):
        while not router.registry.is_ready():
            await router.registry.changed()
    await router.listen()
    return router


class Load:
    """Calls without a pause, over connections that are kept and over new ones."""

    def __init__(self, front: HttpFront) -> None:
        self.errors: list[str] = []
        self.done = 0
        self._over = False
        kinds = (self._http_kept, self._http_new, self._grpc)
        self._tasks = [asyncio.create_task(kind(front)) for kind in kinds for _ in range(2)]

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def after(self, count: int) -> None:
        """Wait for so many more calls."""
        wanted = self.done + count
        async with asyncio.timeout(10):
            while self.done < wanted:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0)

    async def _http_kept(self, front: HttpFront) -> None:
        async with aiohttp.ClientSession() as session:
            while not self._over:
                await self._post(session, front.url)

    async def _http_new(self, front: HttpFront) -> None:
        while not self._over:
            async with aiohttp.ClientSession() as session:
                await self._post(session, front.url)

    async def _post(self, session: aiohttp.ClientSession, url: str) -> None:
        try:
            async with session.post(f"{url}/v1/completions", json=PROMPT) as response:
                body = await response.text()
                self.errors += [body] if response.status != 200 else []
        except aiohttp.ClientError as error:
            self.errors.append(repr(error))
        self.done += 1

    async def _grpc(self, front: HttpFront) -> None:
        async with AsyncClient(front.grpc_address, timeout_s=5.0) as client:
            while not self._over:
                try:
                    await client.generate("hello", max_tokens=3)
                except EngineError as error:
                    self.errors.append(repr(error))
                self.done += 1


async def test_no_call_of_either_protocol_fails_while_routers_take_over_from_each_other(
    front: HttpFront, model: ServedModel
) -> None:
    load = Load(front)
    await load.after(20)
    for _ in range(2):
        new = await successor(front, model)
        await front.server.retire(5.0)
        front.server.dispatcher.admission.check_idle()
        front.server = new
        await load.after(20)
    await load.end()
    assert load.errors == []


async def test_what_runs_on_a_router_that_retires_may_finish_there(front: HttpFront, model: ServedModel) -> None:
    front.decode.hold("handed_over")
    async with front.open_stream("/v1/completions", **PROMPT) as response:
        await front.decode.reached("handed_over")
        old, front.server = front.server, await successor(front, model)
        retiring = asyncio.create_task(old.retire(5.0))
        assert (await front.get("/ready"))[0] == 200
        front.decode.release("handed_over")
        assert "[DONE]" in await response.text()
    async with asyncio.timeout(5):
        await retiring


async def test_a_stop_hurries_a_router_that_retires(front: HttpFront, model: ServedModel) -> None:
    front.decode.hold("handed_over")
    async with front.open_stream("/v1/completions", **PROMPT) as response:
        await front.decode.reached("handed_over")
        old, front.server = front.server, await successor(front, model)
        retiring = asyncio.create_task(old.retire(60.0))
        async with asyncio.timeout(5):
            while old._server is not None:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0)
            await old.stop(0.0)
            await retiring
        assert "the router is stopping" in await response.text()
    front.decode.release("handed_over")


def listener(port: int = 0) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    listener.setblocking(False)
    return listener


def accepted(listener: socket.socket, port: int) -> bool:
    """Whether 20 new connections all came to `listener`."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for client in clients:
        client.close()
    count = 0
    try:
        while True:
            listener.accept()[0].close()
            count += 1
    except BlockingIOError:
        return count == 20


def test_new_connections_go_to_the_socket_that_listens_last_however_often_that_changes() -> None:
    old = listener()
    port = old.getsockname()[1]
    assert prefer_newest(port)
    assert accepted(old, port)
    for _ in range(3):
        new = listener(port)
        assert prefer_newest(port)
        assert accepted(new, port)
        old.close()
        assert accepted(new, port)
        old = new
    old.close()
    assert not prefer_newest(port)
