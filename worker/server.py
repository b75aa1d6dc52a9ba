"""The gRPC edge of a worker: reads and writes sessions, turns faults into answers, and decides nothing.

Hello ─▶ Welcome ─▶ requests one by one ─▶ role.handle
                    outbox ─▶ one writer         load reports ─▶ outbox
the stream ends, whoever ends it ─▶ role.session_ended
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.errors import ConfigError, EngineError, InternalError
from kvrelay._server import MAX_WATCHES, BoundedHealth, server_options
from kvrelay._wire import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, SESSION_TOKEN_KEY
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from worker.config import WorkerConfig
from worker.session import MalformedRequest, Role, Session, SessionOver

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
MIN_LOAD_GAP_S = 0.02
"""Load reports that requests cause are merged over this time: a message costs 60 to 75 us whatever it carries."""
MAX_REQUEST_ID_CHARS = 256
LAST_WORD_TIMEOUT_S = 5.0
"""For the ends of all sessions, at a stop."""

KEEPALIVE_S = 5.0
_SERVICE = "kvrelay.v1.Worker"
_Context = grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


class WorkerServer:
    """Serves one role to any number of routers, and the standard health service."""

    def __init__(self, role: Role, config: WorkerConfig) -> None:
        self._role = role
        self._config = config
        self._sessions: set[Session] = set()
        self._streams: set[asyncio.Task[None]] = set()
        """Each serves one session, until its last word is on its way."""
        self._health = BoundedHealth()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Serve; returns the address. Raises `ConfigError` naming the port if it is taken; nothing stays open then."""
        most = 2 * self._config.max_sessions + MAX_WATCHES
        server = grpc.aio.server(options=server_options(KEEPALIVE_S), maximum_concurrent_rpcs=most)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Servicer(self), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        wanted = f"{self._config.host}:{self._config.port}"
        try:
            port = server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {wanted}: the port is in use, or the address not ours") from error
        await server.start()
        await self._health.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        return f"{self._config.host}:{port}"

    async def stop(self, grace_s: float) -> None:
        """Let live requests finish within `grace_s`, end every session with UNAVAILABLE, close the port. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        await self._role.drain(grace_s)
        for session in self._sessions:
            session.close(grpc.StatusCode.UNAVAILABLE, f"worker {self._config.worker_id} is stopping")
        if self._streams:
            await asyncio.wait(self._streams, timeout=LAST_WORD_TIMEOUT_S)
        await server.stop(grace=None)  # the rest (a health watch, a stream without Hello) has no end of its own

    async def run_session(self, requests: AsyncIterator[worker_pb2.SessionRequest], context: _Context) -> None:
        """One stream, from Hello to its end."""
        over: SessionOver | None = None
        try:
            session = await self._shake_hands(requests, context)
        except SessionOver as refused:
            await context.abort(refused.code, refused.reason)
        self._add(session)  # before Welcome: whoever has read it is told of a stop, and its end is heard of
        try:
            # By itself: a call whose first write was cut off cannot be ended with a status.
            await context.write(worker_pb2.SessionResponse(welcome=self._role.welcome()))
            if session.wants_blocks:
                session.tell_blocks(self._role.block_feed)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.wait_over())
                tasks.create_task(self._read(session, requests))
                tasks.create_task(self._write(session, context))
                tasks.create_task(self._report_load(session))
        except* SessionOver as ends:
            over = cast(SessionOver, ends.exceptions[0])
        finally:
            self._sessions.discard(session)
            if session.blocks is not None:
                self._role.block_feed.close(session.blocks)
            session.close(grpc.StatusCode.CANCELLED, "the stream ended")
            self._role.session_ended(session)
            logger.info("session with router %s ended: %s", session.router_id, over or "cancelled")
        if over is not None and over.code is not grpc.StatusCode.OK:
            await context.abort(over.code, over.reason)

    def _add(self, session: Session) -> None:
        stream = cast("asyncio.Task[None]", asyncio.current_task())
        self._sessions.add(session)
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)

    async def _shake_hands(self, requests: AsyncIterator[worker_pb2.SessionRequest], context: _Context) -> Session:
        self._check_token(context)
        if len(self._sessions) >= self._config.max_sessions:
            raise SessionOver(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._config.max_sessions} routers are connected already"
            )
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await _next_request(requests)
        except TimeoutError:
            raise SessionOver(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello within {HELLO_TIMEOUT_S:.0f} s") from None
        if first.WhichOneof("message") != "hello":
            raise SessionOver(grpc.StatusCode.FAILED_PRECONDITION, "the first message must be Hello")
        if self._server is None:
            raise SessionOver(grpc.StatusCode.UNAVAILABLE, f"worker {self._config.worker_id} is stopping")
        hello = first.hello
        if not MIN_PROTOCOL_VERSION <= hello.protocol <= PROTOCOL_VERSION + 1:
            raise SessionOver(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol {hello.protocol}: this worker speaks {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
            )
        wants_blocks = hello.HasField("routing_seed")
        if wants_blocks and not self._role.block_feed.accept_seed(hello.routing_seed):
            raise SessionOver(
                grpc.StatusCode.FAILED_PRECONDITION,
                "its routing seed is not that of the first router of this worker: a cluster has one",
            )
        logger.info("session with router %s (protocol %d)", hello.router_id, hello.protocol)
        return Session(hello.router_id, self._config.max_outbox, wants_blocks=wants_blocks)

    def _check_token(self, context: _Context) -> None:
        """Before anything else, so that a stranger takes no session from a router."""
        key = self._config.cluster_key
        if key is None:
            return
        shown = dict(context.invocation_metadata() or ()).get(SESSION_TOKEN_KEY, b"")
        if not hmac.compare_digest(_as_bytes(shown), key.session_token.encode()):
            what = "another one" if shown else "none"
            logger.warning("session refused: %s shows %s for the cluster key", context.peer(), what)
            raise SessionOver(
                grpc.StatusCode.UNAUTHENTICATED, f"this worker has a cluster key, and the router shows {what}"
            )

    async def _read(self, session: Session, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        while True:
            message = await _next_request(requests)
            kind = message.WhichOneof("message")
            if kind == "list_blocks":
                if session.blocks is not None and message.list_blocks.number:
                    session.blocks.list_blocks(message.list_blocks.number)
                continue
            if kind is None or kind == "hello":
                raise SessionOver(grpc.StatusCode.INVALID_ARGUMENT, f"expected a request, got {kind or 'nothing'}")
            request_id: str = getattr(getattr(message, kind), "request_id", "")
            if kind != "prewarm" and not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
                raise SessionOver(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{kind}.request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters, got {len(request_id)}",
                )
            try:
                await self._role.handle(session, message)
            except MalformedRequest as error:
                raise SessionOver(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
            except EngineError as error:
                session.send_ended(request_id, error)
            except Exception as error:  # edge: a fault of ours ends one request, not every request of this router
                logger.exception("fault while handling %s of request %s", kind, request_id)
                session.send_ended(request_id, InternalError(f"{type(error).__name__}: {error}"))

    async def _write(self, session: Session, context: _Context) -> None:
        while True:
            await context.write(await session.next_message())

    async def _report_load(self, session: Session) -> None:
        while True:
            session.load_due.clear()
            try:
                session.send_load(await self._role.load())
                if session.blocks is not None:
                    session.blocks.beat()
            except EngineError as error:  # the engine is gone: to be seen as lost is all that is left to do
                await self._health.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
                raise SessionOver(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            await asyncio.sleep(MIN_LOAD_GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat_s):
                    await session.load_due.wait()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


async def _next_request(requests: AsyncIterator[worker_pb2.SessionRequest]) -> worker_pb2.SessionRequest:
    try:
        return await anext(requests)
    except StopAsyncIteration:
        raise SessionOver(grpc.StatusCode.OK, "the router closed the stream") from None
    except DecodeError as error:
        raise SessionOver(grpc.StatusCode.INVALID_ARGUMENT, f"a message that is no SessionRequest: {error}") from error


class _Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, server: WorkerServer) -> None:
        self._server = server

    async def Session(  # type: ignore[override]  # the generated type knows only generators; grpc.aio also takes `write`
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: _Context
    ) -> None:
        await self._server.run_session(request_iterator, context)
