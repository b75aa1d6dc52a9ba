from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import trustme
from grpc_health.v1 import health, health_pb2_grpc

from cluster.health import answers, answers_tls

WAIT_S = 30.0


@asynccontextmanager
async def serving(*, with_health: bool) -> AsyncIterator[str]:
    server = grpc.aio.server()
    if with_health:
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


async def test_a_server_that_handles_calls_answers_even_if_it_refuses() -> None:
    for with_health in (True, False):
        async with serving(with_health=with_health) as address:
            assert await answers(address, WAIT_S)


async def test_a_process_whose_kernel_alone_accepts_connections_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not await answers(f"127.0.0.1:{listener.getsockname()[1]}", 0.05)


async def test_nobody_there_is_no_answer_and_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    async with asyncio.timeout(WAIT_S):
        assert not await answers(address, 0.05)


async def test_a_router_with_tls_answers_whoever_it_trusts() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        assert await answers_tls(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", WAIT_S)


async def test_a_process_whose_kernel_alone_accepts_connections_shakes_no_hands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not await answers_tls(f"127.0.0.1:{listener.getsockname()[1]}", 0.05)
