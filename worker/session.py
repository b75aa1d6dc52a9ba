"""One router's stream to this worker: who it is, what waits to be written to it, and why it is over.

Knows no role and no engine. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import grpc

from engine.errors import EngineError
from engine.plan import Pool
from kvrelay.v1 import worker_pb2
from worker.block_feed import BlockFeed, BlockOutbox


class SessionOver(Exception):
    """The stream ends, with this status."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class MalformedRequest(Exception):
    """A router broke the protocol: its session ends with INVALID_ARGUMENT and everything it started is cancelled."""


class Session:
    """What a role sees of a router.

    Invariant: at most `max_outbox` messages wait, plus one load report; one more ends the session, because a router
    that does not read would otherwise cost memory without limit.
    """

    def __init__(self, router_id: str, max_outbox: int, *, wants_blocks: bool = False) -> None:
        self.router_id = router_id
        self.wants_blocks = wants_blocks
        """Whether the router looks prefixes up, under the seed that it gave."""
        self.load_due = asyncio.Event()
        """Set it when a request began or ended: a load report follows before the next heartbeat."""
        self._max_outbox = max_outbox
        self._outbox: deque[worker_pb2.SessionResponse] = deque()
        self._load: worker_pb2.Load | None = None
        self.blocks: BlockOutbox | None = None
        """What is to be said of resident blocks, after all else; None if the router does not want to know."""
        self._changed = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        return self._over.done()

    def send(self, message: worker_pb2.SessionResponse) -> None:
        """Queue `message`; it is dropped if the session is over, because nobody is there to read it."""
        if self.over:
            return
        if len(self._outbox) >= self._max_outbox:
            self.close(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_outbox} messages wait for this router to read")
            return
        self._outbox.append(message)
        self._changed.set()

    def send_load(self, load: worker_pb2.Load) -> None:
        """Queue a load report in place of one that was not written yet: only the newest says anything."""
        self._load = load
        self._changed.set()

    def tell_blocks(self, feed: BlockFeed) -> None:
        """From now on."""
        self.blocks = feed.open(self._changed.set)

    def send_ended(self, request_id: str, error: EngineError | None) -> None:
        """Last word on a request: `error` is None if it finished or was cancelled."""
        ended = worker_pb2.Ended(request_id=request_id)
        if error is not None:
            ended.error = type(error).__name__
            ended.message = str(error)
            ended.retryable = error.retryable
        self.send(worker_pb2.SessionResponse(ended=ended))
        self.load_due.set()

    def close(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream. What waits to be written is dropped. Later calls change nothing."""
        if not self.over:
            self._over.set_exception(SessionOver(code, reason))
            self._over.exception()  # nobody may be waiting any more; asyncio would call that a lost error
            self._outbox.clear()

    async def wait_over(self) -> None:
        """Raise `SessionOver` once `close` was called, also while the writer is stuck in a write."""
        await asyncio.shield(self._over)

    async def next_message(self) -> worker_pb2.SessionResponse:
        """The next message to write. For the one writer."""
        while True:
            if self._outbox:
                return self._outbox.popleft()
            if self._load is not None:
                load, self._load = self._load, None
                return worker_pb2.SessionResponse(load=load)
            if self.blocks is not None and (changes := self.blocks.next_message()) is not None:
                return worker_pb2.SessionResponse(block_changes=changes)
            self._changed.clear()
            await self._changed.wait()


class Role(Protocol):
    """What a worker does with its requests: prefill or decode. Every method runs on the event loop."""

    def welcome(self) -> worker_pb2.Welcome: ...

    def pool(self) -> Pool:
        """The KV pool, in numbers."""

    @property
    def block_feed(self) -> BlockFeed:
        """What is resident, for routers."""

    def timings(self) -> Mapping[str, float]:
        """How long each part of the start took, in seconds."""

    async def load(self) -> worker_pb2.Load:
        """The state of this worker, at most one engine step old."""

    async def handle(self, session: Session, message: worker_pb2.SessionRequest) -> None:
        """Take one request of a router.

        An `EngineError` ends the request that the message names; `MalformedRequest` ends the session. Either way
        nothing of the message is left behind.
        """

    def session_ended(self, session: Session) -> None:
        """Cancel everything that `session` started."""

    async def start(self) -> None: ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests with `Draining`; return when none is live, or after `timeout_s`."""

    async def stop(self) -> None:
        """Cancel what is live, then give back threads, sockets and memory. Bounded in time."""
