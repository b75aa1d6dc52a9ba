"""Keeps one connection to one worker alive: dial, greet, read, notice silence, dial again.

The only place that opens channels to workers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from enum import StrEnum

import grpc

from engine.errors import EngineError, HandshakeRefused, LinkClosed, WorkerLost
from kvrelay._status import from_rpc_error
from kvrelay._wire import PROTOCOL_VERSION, SESSION_TOKEN_KEY
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.peer import Peer
from router.prefix_index import PrefixIndex
from router.session import WorkerSession
from router.silence import SilenceWatch

logger = logging.getLogger(__name__)

_Call = grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


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
        index: PrefixIndex,
    ) -> None:
        """`accept` raises `HandshakeRefused` for a worker that may not serve; `changed` is told of every new state."""
        self.address = address
        self.state = WorkerState.CONNECTING
        self.detail = "not dialled yet"
        """Why it is not ready; empty while it is."""
        self.draining = False
        """It keeps the requests that it has and gets no new ones."""
        self.lost_at: float | None = None
        """When it was last lost, on the event loop's clock; None while it is ready."""
        self.lost_because = ""
        """Why it was last lost; `detail` goes on to say why it cannot be reached again."""
        self.peer: Peer | None = None
        """As it last introduced itself."""
        self.session: WorkerSession | None = None
        self._config = config
        self._accept = accept
        self._changed = changed
        self._index = index

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
        hello = worker_pb2.Hello(
            protocol=PROTOCOL_VERSION, router_id=self._config.router_id, routing_seed=self._config.routing_seed
        )
        key = self._config.cluster_key
        call = stub.Session(metadata=None if key is None else ((SESSION_TOKEN_KEY, key.session_token),))
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await call.write(worker_pb2.SessionRequest(hello=hello))
                first = await call.read()
            if not isinstance(first, worker_pb2.SessionResponse) or first.WhichOneof("message") != "welcome":
                raise LinkClosed("its first word is no welcome")
            peer = Peer.from_welcome(first.welcome, self.address)
            self.peer = peer  # known by name even if it is refused
            self._accept(peer)
            await self._run_session(call, peer)
        finally:
            call.cancel()

    async def _run_session(self, call: _Call, peer: Peer) -> None:
        """Read and write until the stream ends, or nothing has come for `silence_s`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as scope:

                def give_up() -> None:
                    scope.reschedule(loop.time())

                session = WorkerSession(peer, self._config.max_outbox, give_up, self._index)
                self._become_ready(session)
                writer = asyncio.create_task(_write(call, session), name=f"writer to {self.address}")
                try:
                    with SilenceWatch(self._config.silence_s, give_up) as silence:
                        while isinstance(response := await call.read(), worker_pb2.SessionResponse):
                            silence.heard()
                            session.deliver(response)
                finally:
                    writer.cancel()
                    await asyncio.wait({writer})
        except TimeoutError:
            raise session.over or WorkerLost(f"silent for {self._config.silence_s:g} s") from None

    def _become_ready(self, session: WorkerSession) -> None:
        self.session = session
        self.state, self.detail, self.lost_at = WorkerState.READY, "", None
        logger.info("worker %s (%s) is ready at %s", session.peer.worker_id, session.peer.role, self.address)
        self._changed()

    def _lose(self, reason: str, level: int = logging.WARNING) -> None:
        session, self.session = self.session, None
        if session is not None:
            self.state, self.lost_at = WorkerState.LOST, asyncio.get_running_loop().time()
            self.lost_because = reason
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


async def _write(call: _Call, session: WorkerSession) -> None:
    try:
        async for message in session.outgoing():
            await call.write(message)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        logger.debug("the stream to %s is over: %s", session.peer.worker_id, error)  # its reader learns why
