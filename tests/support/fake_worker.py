"""A worker of either role without engine and without link, on a real loopback port, that a test can script.

It tells when it reaches a point, can be held there, can fail or die there. Its tokens are a pure function of all tokens
before them, so a stream that was resumed anywhere must be the stream of `expected_output`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.block_hash import pack_tokens, unpack_tokens
from engine.errors import EngineError
from kvrelay._wire import SAMPLING_FIELDS
from kvrelay.v1 import common_pb2, worker_pb2, worker_pb2_grpc

FINGERPRINT = b"\x17" * 32
BLOCK_SIZE = 4
QUEUE_US, COMPUTE_US, WAIT_US = 11, 22, 33


def next_token(tokens: Sequence[int]) -> int:
    """A lower-case letter, as its byte."""
    return ord("a") + zlib.crc32(pack_tokens(tokens)) % 26


def expected_output(prompt: Sequence[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class _Over(Exception):
    """The session ends."""


@dataclass(eq=False)
class _Session:
    tasks: asyncio.TaskGroup
    outbox: asyncio.Queue[worker_pb2.SessionResponse | None] = field(default_factory=asyncio.Queue)
    """None: the worker dies here."""

    def send(self, **message: Any) -> None:
        self.outbox.put_nowait(worker_pb2.SessionResponse(**message))


@dataclass(eq=False)
class _Live:
    session: _Session
    request: worker_pb2.Reserve | worker_pb2.Prefill
    tokens: list[int]
    task: asyncio.Task[None] | None = None

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Points, in the order of a request: "reserve", "prefill", "held", "start", "handed_over", ("output", index).

    Invariant: `live` holds exactly the requests that this worker has begun and neither ended nor seen cancelled.
    """

    def __init__(self, role: str, worker_id: str, /, **welcome: Any) -> None:
        self.role, self.worker_id = role, worker_id
        fields: dict[str, Any] = {
            "protocol": 1,
            "worker_id": worker_id,
            "incarnation": f"{worker_id}-1",
            "role": role,
            "model": "fake",
            "fingerprint": FINGERPRINT,
            "block_size": BLOCK_SIZE,
            "num_blocks": 64,
            "max_model_len": 200,
            "pid": 4711,
            "sampling_fields": SAMPLING_FIELDS,
        }
        self.welcome = worker_pb2.Welcome(**fields | welcome)
        self.load = worker_pb2.Load(blocks_free=64)
        self.heartbeat_s = 0.05
        self.silent = False
        """Reads, answers nothing, sends no load."""
        self.greets = True
        self.live: dict[str, _Live] = {}
        self.received: list[worker_pb2.SessionRequest] = []
        self.num_sessions = 0
        """Begun so far."""
        self._open_sessions = 0
        self._num_loads = 0
        self.fail_at: dict[object, EngineError] = {}
        """Errors that end the request at a point."""
        self.die_at: object = None
        """The point at which the worker dies, with all its sessions; it refuses new ones until `revive`."""
        self.stop_token_at: int | None = None
        """Output index that is a stop token."""
        self.wrong_index_at: int | None = None
        """Output index at which it sends the index before once more."""
        self.cached_tokens = 0
        self.address = ""
        self._dead = False
        self._holds: dict[object, asyncio.Event] = {}
        self._reached: set[object] = set()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self.address

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    def revive(self) -> None:
        """As a new process at the same address."""
        self._dead, self.die_at = False, None
        self.welcome.incarnation += "'"

    def hold(self, point: object) -> None:
        self._holds[point] = asyncio.Event()

    def release(self, point: object) -> None:
        self._holds.pop(point).set()

    async def reached(self, point: object) -> None:
        """Wait until a request got there."""
        async with self._changed, asyncio.timeout(5):
            await self._changed.wait_for(lambda: point in self._reached)

    async def got(self, kind: str, count: int = 1) -> worker_pb2.SessionRequest:
        """Wait for the `count`-th message of `kind`."""
        async with self._changed, asyncio.timeout(5):
            await self._changed.wait_for(lambda: len(self.all(kind)) >= count)
        return self.all(kind)[count - 1]

    async def idle(self) -> None:
        """Wait until nothing is live here."""
        async with self._changed, asyncio.timeout(5):
            await self._changed.wait_for(lambda: not self.live)

    async def no_sessions(self) -> None:
        """Wait until no router is connected."""
        async with self._changed, asyncio.timeout(5):
            await self._changed.wait_for(lambda: self._open_sessions == 0)

    async def heartbeats(self, count: int) -> None:
        """Wait for `count` more."""
        last = self._num_loads + count
        async with self._changed, asyncio.timeout(5):
            await self._changed.wait_for(lambda: self._num_loads >= last)

    def all(self, kind: str) -> list[worker_pb2.SessionRequest]:
        return [message for message in self.received if message.WhichOneof("message") == kind]

    async def Session(  # type: ignore[override]  # the generated type knows only generators
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        if self._dead:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is dead")
        await anext(request_iterator)
        if not self.greets:
            await asyncio.Event().wait()
        await context.write(worker_pb2.SessionResponse(welcome=self.welcome))
        self.num_sessions += 1
        self._open_sessions += 1
        session: _Session | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                session = _Session(tasks)
                tasks.create_task(self._write(session, context))
                async for message in request_iterator:
                    await self._handle(session, message)
                raise _Over
        except* _Over:
            pass
        finally:
            for request_id in [key for key, live in self.live.items() if live.session is session]:
                del self.live[request_id]
            self._open_sessions -= 1
            await self._notify()
        if self._dead:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker died")

    async def _write(self, session: _Session, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            message: worker_pb2.SessionResponse | None = worker_pb2.SessionResponse(load=self.load)
            try:
                async with asyncio.timeout(self.heartbeat_s):
                    message = await session.outbox.get()
            except TimeoutError:
                self._num_loads += 1
                await self._notify()
            if message is None:
                raise _Over
            if not self.silent:
                await context.write(message)

    async def _handle(self, session: _Session, message: worker_pb2.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        body: Any = getattr(message, kind)
        self.received.append(message)
        if kind == "cancel":
            live = self.live.pop(body.request_id, None)
            if live is not None and live.task is not None:
                live.task.cancel()
        elif kind in ("reserve", "prefill"):
            assert body.request_id not in self.live, "a request id came twice"
            live = self.live[body.request_id] = _Live(session, body, unpack_tokens(body.token_ids))
            run = self._reserve(live) if kind == "reserve" else self._prefill(live)
            live.task = session.tasks.create_task(run)
        elif kind == "prewarm":
            assert self.role == "prefill"
        elif body.request_id in self.live:
            live = self.live[body.request_id]
            if live.task is not None:  # a second Start says that the blocks which the first one waits for do not come
                live.task.cancel()
            live.task = session.tasks.create_task(self._start(live, body))
        await self._notify()

    async def _reserve(self, live: _Live) -> None:
        reserve = live.request
        assert isinstance(reserve, worker_pb2.Reserve)
        if not await self._pass(live, "reserve"):
            return
        missing = range(-(-len(live.tokens) // BLOCK_SIZE))
        ticket = worker_pb2.Ticket(
            ticket_id=reserve.request_id,
            worker_id=self.worker_id,
            incarnation=self.welcome.incarnation,
            lease_ms=5000,
            ordinals=missing,
            slots=missing,
            generations=[1 for _ in missing],
            cached_tokens=self.cached_tokens,
        )
        live.session.send(reserved=worker_pb2.Reserved(request_id=reserve.request_id, ticket=ticket, wait_us=WAIT_US))
        if reserve.compute_here:
            await self._decode(live)

    async def _prefill(self, live: _Live) -> None:
        prefill = live.request
        if not await self._pass(live, "prefill"):
            return
        live.session.send(
            prefilled=worker_pb2.Prefilled(
                request_id=prefill.request_id,
                output=self._next_output(live),
                cached_tokens=self.cached_tokens,
                blocks_computed=-(-prefill.num_prompt_tokens // BLOCK_SIZE),
                queue_us=QUEUE_US,
                compute_us=COMPUTE_US,
            )
        )
        if await self._pass(live, "held"):
            await self._end(live)

    async def _start(self, live: _Live, start: worker_pb2.Start) -> None:
        if not await self._pass(live, "start"):
            return
        num_prompt_tokens = live.request.num_prompt_tokens
        live.tokens += unpack_tokens(start.token_ids)
        if not await self._pass(live, "handed_over"):
            return
        blocks = -(-num_prompt_tokens // BLOCK_SIZE)
        live.session.send(
            handed_over=worker_pb2.HandedOver(
                request_id=start.request_id,
                blocks_adopted=0 if start.compute_missing else blocks,
                blocks_received=0 if start.compute_missing else blocks,
                bytes_received=0 if start.compute_missing else blocks * 100,
                transport="" if start.compute_missing else "shm",
                recomputed_tokens=num_prompt_tokens if start.compute_missing else 0,
            )
        )
        await self._decode(live)

    async def _decode(self, live: _Live) -> None:
        while True:
            index = live.num_outputs
            if not await self._pass(live, ("output", index)):
                return
            output = self._next_output(live)
            if index == self.wrong_index_at:
                output.index -= 1
            entry = worker_pb2.StepOutput(request_id=live.request.request_id, output=output)
            live.session.send(step=worker_pb2.Step(outputs=[entry]))
            if output.finish_reason:
                return await self._end(live)

    def _next_output(self, live: _Live) -> worker_pb2.Output:
        index = live.num_outputs
        live.tokens.append(next_token(live.tokens))
        reason = common_pb2.FINISH_REASON_UNSPECIFIED
        if index == self.stop_token_at:
            reason = common_pb2.FINISH_REASON_STOP
        elif live.num_outputs == live.request.sampling.max_tokens:
            reason = common_pb2.FINISH_REASON_LENGTH
        output = worker_pb2.Output(index=index, token_id=live.tokens[-1], finish_reason=reason)
        if live.request.sampling.HasField("logprobs"):
            output.logprobs.logprob = -float(index)
        return output

    async def _pass(self, live: _Live, point: object) -> bool:
        """Whether the request goes on past `point`."""
        self._reached.add(point)
        await self._notify()
        if point in self._holds:
            await self._holds[point].wait()
        if self.die_at == point:
            self._dead = True
            live.session.outbox.put_nowait(None)
            return False
        if point in self.fail_at:
            await self._end(live, self.fail_at[point])
            return False
        return True

    async def _end(self, live: _Live, error: EngineError | None = None) -> None:
        request_id = live.request.request_id
        ended = worker_pb2.Ended(request_id=request_id)
        if error is not None:
            ended.error, ended.message, ended.retryable = type(error).__name__, str(error), error.retryable
        live.session.send(ended=ended)
        self.live.pop(request_id, None)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
