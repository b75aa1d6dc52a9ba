"""Asks a member whether it still serves, with the standard health service. Knows no Ray, and decides nothing."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def answers(address: str, timeout_s: float) -> bool:
    """Whether anything came back from `address` within `timeout_s`. A refusal is an answer: the process handles calls.

    So is the end of a connection: it is no sign of a process that hangs, and a dead one is noticed elsewhere.
    """
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    return True
