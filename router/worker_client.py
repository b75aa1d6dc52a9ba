"""Keeps one connection to one worker alive: dial, greet, read, notice silence, dial again.

The only place that opens channels to workers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

import grpc

from engine.errors import EngineError, HandshakeRefused, LinkClosed, WorkerLost
from kvrelay._status import from_rpc_error
from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.peer import Peer
from router.session import WorkerSession

logger = logging.getLogger(__name__)


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    """Not ready yet since this router knows of it."""
    READY = "ready"
    LOST = "lost"
    """Was ready, or was refused. Dialled again all the while."""


class WorkerClient:
    """One address. `run` is its life; everything else is to be read.

    Invariant: `session` is set exactly while `state` is READY.
    """

    def __init__(
        self,
        address: str,
        config: RouterConfig,
        accept: Callable[[Peer], None],
        changed: Callable[[], None],
    ) -> None:
        """`accept` raises `HandshakeRefused` for a worker that may not serve; `changed` is told of every new state."""
        self.address = address
        self.state = WorkerState.CONNECTING
        self.detail = "not dialled yet"
        """Why it is not ready; empty while it is."""
        self.peer: Peer | None = None
        """As it last introduced itself."""
        self.session: WorkerSession | None = None
        self._config = config
        self._accept = accept
        self._changed = changed

    @property
    def name(self) -> str:
        return f"{self.peer.worker_id} ({self.address})" if self.peer is not None else self.address

    async def run(self) -> None:
        """Connect, again and again, until cancelled. Then every request on the session has got `WorkerLost`."""
        pause = self._config.reconnect_min_s
        try:
            while True:
                was_ready, reason = await self._one_session()
                self._lose(reason)
                pause = self._config.reconnect_min_s if was_ready else min(pause * 2, self._config.reconnect_max_s)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # jitter: many routers, one restarted worker
        finally:
            self._lose("this router gave it up", logging.INFO)

    async def _one_session(self) -> tuple[bool, str]:
        """Whether the worker became ready, and why it is not any more."""
        try:
            async with grpc.aio.insecure_channel(self.address, options=self._channel_options()) as channel:
                await self._converse(worker_pb2_grpc.WorkerStub(channel))
        except grpc.aio.AioRpcError as error:
            reason = str(from_rpc_error(error))
        except HandshakeRefused as error:
            self.state = WorkerState.LOST
            reason = f"refused: {error}"
        except EngineError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no welcome within {self._config.connect_timeout_s:g} s"
        else:
            reason = "the worker ended the session"
        return self.session is not None, reason

    async def _converse(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        greeting = worker_pb2.SessionRequest(
            hello=worker_pb2.Hello(protocol=PROTOCOL_VERSION, router_id=self._config.router_id)
        )
        ready: asyncio.Future[WorkerSession] = asyncio.get_running_loop().create_future()

        async def outgoing() -> AsyncIterator[worker_pb2.SessionRequest]:
            yield greeting
            async for message in (await ready).outgoing():
                yield message

        call = stub.Session(outgoing())
        try:
            responses = aiter(call)
            async with asyncio.timeout(self._config.connect_timeout_s):
                first = await anext(responses, None)
            if first is None or first.WhichOneof("message") != "welcome":
                raise LinkClosed("the worker ended the session" if first is None else "its first word is no welcome")
            peer = Peer.from_welcome(first.welcome, self.address)
            self.peer = peer  # known by name even if it is refused
            self._accept(peer)
            await self._read(responses, peer, ready)
        finally:
            ready.cancel()
            call.cancel()

    async def _read(
        self,
        responses: AsyncIterator[worker_pb2.SessionResponse],
        peer: Peer,
        ready: asyncio.Future[WorkerSession],
    ) -> None:
        """Deliver what comes, until the stream ends or nothing has come for `silence_s`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.silence_s) as silence:
                session = WorkerSession(peer, self._config.max_outbox, lambda: silence.reschedule(loop.time()))
                ready.set_result(session)
                self._become_ready(session)
                async for response in responses:
                    silence.reschedule(loop.time() + self._config.silence_s)
                    session.deliver(response)
        except TimeoutError:
            raise session.over or WorkerLost(f"silent for {self._config.silence_s:g} s") from None

    def _become_ready(self, session: WorkerSession) -> None:
        self.session = session
        self.state, self.detail = WorkerState.READY, ""
        logger.info("worker %s (%s) is ready at %s", session.peer.worker_id, session.peer.role, self.address)
        self._changed()

    def _lose(self, reason: str, level: int = logging.WARNING) -> None:
        session, self.session = self.session, None
        if session is not None:
            self.state = WorkerState.LOST
            logger.log(level, "worker %s at %s is lost: %s", session.peer.worker_id, self.address, reason)
            session.end(WorkerLost(f"{session.peer.worker_id}: {reason}"))
        self.detail = reason
        self._changed()

    def _channel_options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._config.max_worker_message_bytes),
            ("grpc.max_send_message_length", self._config.max_worker_message_bytes),
            ("grpc.use_local_subchannel_pool", 1),  # else gRPC's own back-off outlives the channel
            ("grpc.enable_http_proxy", 0),
        ]
