"""A prefill and a decode worker in one process that compute nothing: they answer at once, and decode as fast as the
router reads. For `bench.gateway`; `python -m bench.gateway_worker MODEL_FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from engine.block_hash import TOKEN_BYTES, pack_tokens
from engine.model_config import load_model_config, model_fingerprint
from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import common_pb2, worker_pb2, worker_pb2_grpc

TOKEN_ID = 504
"""A word of the vocabulary: every token of every output."""
HEARTBEAT_S = 0.5
BLOCK_SIZE = 16


class _Session:
    """Invariant: `live` holds the requests that decode, each with the index of its next token."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._writing = asyncio.Lock()
        self._limits: dict[str, int] = {}
        self._lanes: dict[str, int] = {}
        self._live: dict[str, int] = {}
        self._work = asyncio.Event()

    async def send(self, **message: Any) -> None:
        async with self._writing:
            await self._context.write(worker_pb2.SessionResponse(**message))

    async def heartbeats(self) -> None:
        while True:
            await self.send(load=worker_pb2.Load(blocks_free=100_000, prefill_tokens_per_s=1e6, decode_step_ms=1.0))
            await asyncio.sleep(HEARTBEAT_S)

    async def handle(self, message: worker_pb2.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "reserve":
            self._limits[message.reserve.request_id] = message.reserve.sampling.max_tokens
            self._lanes[message.reserve.request_id] = message.reserve.lane
            ticket = worker_pb2.Ticket(ticket_id=message.reserve.request_id, lease_ms=5000)
            await self.send(reserved=worker_pb2.Reserved(request_id=message.reserve.request_id, ticket=ticket))
            if message.reserve.compute_here:
                self._decode_from(message.reserve.request_id, 0)
        elif kind == "prefill":
            prefill = message.prefill
            output = worker_pb2.Output(index=0, token_id=TOKEN_ID)
            if prefill.sampling.max_tokens == 1:
                output.finish_reason = common_pb2.FINISH_REASON_LENGTH
            await self.send(prefilled=worker_pb2.Prefilled(request_id=prefill.request_id, output=output))
            await self.send(ended=worker_pb2.Ended(request_id=prefill.request_id))
        elif kind == "start":
            await self.send(handed_over=worker_pb2.HandedOver(request_id=message.start.request_id, transport="shm"))
            self._decode_from(message.start.request_id, len(message.start.token_ids) // TOKEN_BYTES)
        elif kind == "cancel":
            self._live.pop(message.cancel.request_id, None)
            self._limits.pop(message.cancel.request_id, None)
            self._lanes.pop(message.cancel.request_id, None)

    def _decode_from(self, request_id: str, index: int) -> None:
        self._live[request_id] = index
        self._work.set()

    async def decode(self) -> None:
        """One step a message, a token for each live request, as an engine does."""
        while True:
            await self._work.wait()
            lanes, indexes, reasons, ended = [], [], bytearray(), []
            for request_id, index in self._live.items():
                last = index + 1 >= self._limits[request_id]
                lanes.append(self._lanes[request_id])
                indexes.append(index)
                reasons.append(common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED)
                if last:
                    ended.append(request_id)
                self._live[request_id] = index + 1
            columns = worker_pb2.OutputColumns(
                lanes=pack_tokens(lanes),
                indexes=pack_tokens(indexes),
                token_ids=pack_tokens([TOKEN_ID] * len(lanes)),
                finish_reasons=bytes(reasons),
            )
            await self.send(step=worker_pb2.Step(columns=columns))
            for request_id in ended:
                self._live.pop(request_id, None)
                await self.send(ended=worker_pb2.Ended(request_id=request_id))
            if not self._live:
                self._work.clear()


class _Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, role: str, folder: Path) -> None:
        self._welcome = worker_pb2.Welcome(
            protocol=PROTOCOL_VERSION,
            worker_id=f"{role}-0",
            incarnation=f"{role}-1",
            role=role,
            model="bench",
            fingerprint=model_fingerprint(folder),
            block_size=BLOCK_SIZE,
            num_blocks=100_000,
            max_model_len=load_model_config(folder).max_model_len,
            pid=1,
        )

    async def Session(  # type: ignore[override]  # the generated type knows only generators
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await anext(request_iterator)
        await context.write(worker_pb2.SessionResponse(welcome=self._welcome))
        session = _Session(context)
        tasks = [asyncio.create_task(session.heartbeats()), asyncio.create_task(session.decode())]
        try:
            async for message in request_iterator:
                await session.handle(message)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def serve(folder: Path) -> None:
    servers: list[grpc.aio.Server] = []
    addresses = {}
    for role in ("prefill", "decode"):
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(role, folder), server)
        addresses[role] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)  # one that nobody holds is taken down
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
