"""Asks a member whether it still serves. Knows no Ray, and decides nothing."""

from __future__ import annotations

import asyncio
import ssl

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def answers(address: str, timeout_s: float) -> bool:
    """Whether the standard health service at `address` said anything within `timeout_s`.

    A refusal is an answer: the process handles calls. So is the end of a connection: it is no sign of a process that
    hangs, and a dead one is noticed elsewhere.
    """
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    return True


async def answers_tls(http_address: str, timeout_s: float) -> bool:
    """The same of a router that serves over TLS, by a handshake with its HTTP port.

    The router's event loop answers it, which is what could hang. Nobody is verified: nothing is said and nothing asked.
    """
    host, _, port = http_address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except TimeoutError:
        return False
    except OSError:  # refused or reset: by a process that is gone, or one that answers
        return True
    writer.close()
    return True
