"""Connections to the session port that say nothing: none stays, and whoever has a call does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.config import EngineConfig
from worker.config import WorkerConfig
from worker.server import WorkerServer
from worker.session import Role

BOUND_S = 30.0
PREFACE_AND_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


class NoRole:
    async def drain(self, timeout_s: float) -> None:
        pass


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    monkeypatch.setattr(f"kvrelay._server.{request.param}", 0.2)
    config = WorkerConfig(worker_id="w0", model_name="m", engine=EngineConfig(model_path="none"))
    server = WorkerServer(cast(Role, NoRole()), config)
    yield await server.start()
    await server.stop(0.0)


async def read_to_its_end(address: str, said: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(said)
    heard = await reader.read()
    writer.close()
    return heard


@pytest.mark.parametrize(
    ("address", "said", "reason"),
    [
        ("HANDSHAKE_TIMEOUT_S", b"", b"Did not receive HTTP/2 settings"),
        ("HANDSHAKE_TIMEOUT_S", PREFACE_AND_SETTINGS[:20], b"Did not receive HTTP/2 settings"),
        ("IDLE_TIMEOUT_S", PREFACE_AND_SETTINGS, b"connection idle"),
    ],
    indirect=["address"],
)
async def test_a_silent_connection_is_told_why_and_closed(address: str, said: bytes, reason: bytes) -> None:
    async with asyncio.timeout(BOUND_S):
        assert reason in await read_to_its_end(address, said)


@pytest.mark.parametrize("address", ["IDLE_TIMEOUT_S"], indirect=True)
async def test_a_connection_with_a_call_is_not_idle(address: str) -> None:
    async with asyncio.timeout(BOUND_S), grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        await read_to_its_end(address, PREFACE_AND_SETTINGS)

        assert not watch.done()
