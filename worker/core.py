"""What both roles are built around: the engine with its thread, the live requests, the report. Decides nothing.

A role's own state belongs to the event loop. The engine thread and the link threads reach it through `notify`, it
reaches the engine through `post`; no lock is shared. What runs these is `worker.threads`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVarTuple

from engine.block_events import Cleared, EventBatch, Snapshot
from engine.engine import Engine, StepOutput
from engine.errors import DeadlineExceeded, Draining, EngineError, InternalError
from engine.step_loop import StepLoop
from kv_transfer.identity import possible_transports
from kvrelay._wire import PROTOCOL_VERSION, SAMPLING_FIELDS
from kvrelay.v1 import worker_pb2
from worker.block_feed import BlockFeed
from worker.config import WorkerConfig
from worker.engine_builder import EngineParts
from worker.live import LiveRequests, T
from worker.load import LoadReporter
from worker.outputs import layout_to_proto
from worker.session import Session
from worker.threads import RealThreads, Threads, Timer

logger = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")

STOP_TIMEOUT_S = 4.0
"""For each part of a stop."""
BLOCK_CHANGES_GAP_S = 0.02
"""Changes of what is resident are merged over this time before routers are told."""
_COMMANDS_PER_REQUEST = 16
"""More than a request ever has on the engine thread's list, its blocks' arrivals aside."""


class WorkerCore(Generic[T]):
    """Owns the engine thread and the table of live requests of one worker. Created and used on the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        parts: EngineParts,
        deliver: Callable[[StepOutput], None],
        threads: Threads | None = None,
    ) -> None:
        """`deliver` gets each step's output, on the engine thread. `threads` stands in for the real ones in tests."""
        self.config = config
        self.parts = parts
        self.incarnation = uuid.uuid4().hex
        self.live: LiveRequests[T] = LiveRequests(parts.max_requests)
        self.block_feed = BlockFeed(
            parts.kv.num_blocks, lambda seed: self.post(lambda engine: engine.names.use_seed(seed))
        )
        self._deliver = deliver
        self._step_loop = StepLoop(
            parts.engine,
            self._on_output,
            on_fault=self._on_fault,
            max_pending=parts.kv.num_blocks + _COMMANDS_PER_REQUEST * parts.max_requests,
        )
        self._reporter = LoadReporter(self._step_loop, parts.engine.stats())
        self._threads = threads or RealThreads(self._step_loop)
        self._draining = False
        self._blocks_due = False
        """Whether the changes of blocks are to be taken from the engine, or are on their way."""

    def start(self) -> None:
        self._threads.start()

    async def drain(self, timeout_s: float) -> None:
        """From now on `check_new` refuses; returns when nothing is live, or after `timeout_s`."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.live.wait_empty()

    async def stop(self, close_links: Callable[[float], None]) -> None:
        """End the links by `close_links(timeout)`, then the engine thread, and give the pool's memory back.

        What is live was cancelled by the caller; it gets a moment to end in the usual way. If a thread does not end
        in time the pool stays, because that thread may be using it.
        """
        await self.drain(STOP_TIMEOUT_S)
        try:
            await asyncio.to_thread(close_links, STOP_TIMEOUT_S)
            await asyncio.to_thread(self._step_loop.stop, STOP_TIMEOUT_S)
        except (DeadlineExceeded, InternalError) as error:
            logger.error("the KV pool is kept: %s", error)
            return
        self.parts.kv.close()
        if self.parts.ranks is not None:
            await asyncio.to_thread(self.parts.ranks.close)

    def welcome(self, role: str, link_endpoint: bytes = b"") -> worker_pb2.Welcome:
        return worker_pb2.Welcome(
            protocol=PROTOCOL_VERSION,
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            role=role,
            model=self.config.model_name,
            fingerprint=self.parts.identity.model_fingerprint,
            block_size=self.parts.kv.layout.block_size,
            num_blocks=self.parts.kv.num_blocks,
            max_model_len=self.parts.max_model_len,
            link_endpoint=link_endpoint,
            pid=os.getpid(),
            native=self.parts.native.name if self.parts.native is not None else "",
            tells_blocks=True,
            layout=layout_to_proto(self.parts.kv.layout),
            kv_transports=possible_transports(self.config.kv_transports, self.parts.kv.device, self._adopts()),
            kernels=self.parts.kernels,
            sampling_fields=SAMPLING_FIELDS,
            device=self.parts.device,
        )

    def _adopts(self) -> bool:
        return self.parts.kv.lends or self.parts.kv.windows is not None

    async def load(self) -> worker_pb2.Load:
        self._blocks_may_have_changed()
        return await self._reporter.report()

    def check_new(self, session: Session, request_id: str) -> None:
        """Raises `Draining`, `QueueFull` or `MalformedRequest` if this worker cannot take the request."""
        if self._draining:
            raise Draining(f"worker {self.config.worker_id} is stopping")
        self.live.check_new(session, request_id)

    async def check_integrity(self) -> None:
        """Re-derive the engine's invariants, on its thread."""
        await asyncio.wrap_future(self._step_loop.call(Engine.check_integrity))

    def ended(self, record: T, error: EngineError | None) -> None:
        """Nothing of the request is left: forget it and tell the router."""
        self.live.remove(record)
        if error is not None:
            self.count(error)
            fields = {"request_id": record.request_id, "error_class": type(error).__name__}
            if record.traceparent:
                fields["trace_id"] = record.traceparent.split("-")[1]
            told = "request %s ended: %s: %s"
            logger.info(told, record.request_id, type(error).__name__, error, extra={"fields": fields})
        record.session.send_ended(record.request_id, error)

    def count(self, error: EngineError) -> None:
        """For the load report."""
        self._reporter.errors[type(error).__name__] += 1

    def now(self) -> float:
        """Monotonic seconds."""
        return self._threads.now()

    def notify(self, callback: Callable[[*Ts], None], *args: *Ts) -> None:
        """From any thread: run `callback` on the event loop, in the order of the calls of each thread."""
        self._threads.notify(callback, *args)

    def post(self, operation: Callable[[Engine], None]) -> None:
        """Run `operation` on the engine thread before its next step; dropped once that thread has stopped."""
        self._threads.post(operation)

    def post_cancel(self, key: str, operation: Callable[[Engine], None]) -> None:
        """`post` of what cancels a request: the engine's step need not come to its end for the sake of this one."""
        self.parts.engine.doom(key)
        self.post(operation)

    def call_later(self, delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> Timer:
        """Run `callback` on the event loop after `delay_s`, with or without traffic."""
        return self._threads.call_later(delay_s, callback, *args)

    def _on_output(self, output: StepOutput) -> None:
        """On the engine thread, after every step."""
        if not self._blocks_due:
            self.notify(self._blocks_may_have_changed)
        self._deliver(output)

    def _blocks_may_have_changed(self) -> None:
        if self.block_feed.has_seed and not self._blocks_due:
            self._blocks_due = True
            self.call_later(BLOCK_CHANGES_GAP_S, self.post, self._take_block_events)

    def _take_block_events(self, engine: Engine) -> None:
        """On the engine thread."""
        batch = engine.take_block_events()
        resync = any(isinstance(event, Cleared) and event.resync for event in batch.events)
        self.notify(self._feed_blocks, batch, engine.block_snapshot() if resync else None)

    def _feed_blocks(self, batch: EventBatch, snapshot: Snapshot | None) -> None:
        self._blocks_due = False
        self.block_feed.apply(batch.events, snapshot)

    def _on_fault(self, error: Exception) -> None:
        """On the engine thread: something other than one batch failed. The loop goes on."""
        logger.error("fault on the engine thread", exc_info=error)
        self.notify(self.count, InternalError(str(error)))
