"""Stands between a router and a worker, passes every message on, and notes how far each request is and when it ended.

A worker's Ended is its last word on a request: nothing of it is left there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Any, cast

import grpc

from engine.block_hash import unpack_tokens
from kvrelay.v1 import worker_pb2, worker_pb2_grpc


class Stage(IntEnum):
    QUEUED = 0
    """At the router only."""
    RESERVATION = 1
    PREFILL = 2
    TRANSFER = 3
    """The first token is drawn, and the decode worker has not said that it has all blocks."""
    DECODE = 4


class Seen:
    """One request, on all workers together."""

    def __init__(self) -> None:
        self.stage = Stage.QUEUED
        self.num_live = 0
        """Workers that were given it and have not said that it ended."""
        self.ended_at = 0.0
        """When a worker said so last; 0 if none ever did."""
        self.token_at = 0.0
        """When its last token of a decode worker passed."""
        self.told_at: dict[str, float] = {}
        """When each worker that held it was told to end it, by role."""
        self.freed_at: dict[str, float] = {}
        """When each worker said that it ended."""
        self._moved = asyncio.Event()

    @property
    def last_role(self) -> str:
        """Of the worker that had it longest; empty if none said that it ended."""
        return max(self.freed_at, key=self.freed_at.__getitem__, default="")

    def heard_last(self, role: str) -> bool:
        """Whether this worker was told to end it, and did then."""
        return role in self.told_at and self.freed_at.get(role, 0.0) >= self.told_at[role]

    def move(self, stage: Stage) -> None:
        if stage > self.stage:
            self.stage = stage
            self._moved.set()

    async def reach(self, stage: Stage) -> None:
        while self.stage < stage:
            self._moved.clear()
            await self._moved.wait()


class RequestLog:
    """What passed through all taps, by request."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}
        self._lanes: dict[int, str] = {}
        """Of the one decode worker, and what its router calls them."""
        self.step_ms: list[float] = []
        """Between two tokens of one request from a decode worker: each is a step, with whatever else was in it."""

    def of(self, request_id: str) -> Seen:
        return self._seen.setdefault(request_id, Seen())

    @property
    def num_live(self) -> int:
        return sum(seen.num_live for seen in self._seen.values())

    def asked(self, role: str, message: worker_pb2.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "reserve":
            self._lanes[message.reserve.lane] = message.reserve.request_id
            seen = self._of_attempt(message.reserve.request_id)
            seen.num_live += 1
            seen.move(Stage.RESERVATION)
        elif kind == "prefill":
            seen = self._of_attempt(message.prefill.request_id)
            seen.num_live += 1
            seen.move(Stage.PREFILL)
        elif kind == "cancel":
            self._of_attempt(message.cancel.request_id).told_at[role] = time.perf_counter()

    def answered(self, role: str, message: worker_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "prefilled":
            self._of_attempt(message.prefilled.request_id).move(Stage.TRANSFER)
        elif kind == "handed_over":
            self._of_attempt(message.handed_over.request_id).move(Stage.DECODE)
        elif kind == "step":
            now = time.perf_counter()
            step = message.step
            lanes = [self._lanes[number] for number in unpack_tokens(step.columns.lanes)]
            for wire_id in (*lanes, *(entry.request_id for entry in step.outputs)):
                seen = self._of_attempt(wire_id)
                seen.move(Stage.DECODE)
                if seen.token_at:
                    self.step_ms.append((now - seen.token_at) * 1000)
                seen.token_at = now
        elif kind == "reserved" and not message.reserved.ticket.ordinals:
            self._of_attempt(message.reserved.request_id).move(Stage.PREFILL)  # computed where it is decoded
        elif kind == "ended":
            seen = self._of_attempt(message.ended.request_id)
            seen.num_live -= 1
            seen.ended_at = seen.freed_at[role] = time.perf_counter()

    def _of_attempt(self, wire_id: str) -> Seen:
        """Routers number attempts: REQUEST.NUMBER."""
        return self.of(wire_id.rpartition(".")[0])


class SessionTap(worker_pb2_grpc.WorkerServicer):
    """Takes a router's session for one worker."""

    def __init__(self, worker_address: str, role: str, log: RequestLog) -> None:
        self._role = role
        self._log = log
        self._channel = grpc.aio.insecure_channel(worker_address)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)

    async def start(self) -> str:
        """Returns HOST:PORT for the router."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    async def Session(  # type: ignore[override]  # the generated type knows only generators
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        call = worker_pb2_grpc.WorkerStub(self._channel).Session()

        async def pass_on() -> None:
            async for message in request_iterator:
                self._log.asked(self._role, message)
                await call.write(message)
            await call.done_writing()

        asking = asyncio.create_task(pass_on())
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                message = cast(worker_pb2.SessionResponse, answer)
                self._log.answered(self._role, message)
                await context.write(message)
        finally:
            call.cancel()
            asking.cancel()
            await asyncio.wait({asking})
