"""One prefill worker: computes prompts, sends their blocks while it computes, and samples the first token.

Life cycle of a request on this side:

1. *Received.* `Prefill` is checked and its transfer opened at once, so that the ticket's lease is renewed while the
   request waits for its turn. Then the engine gets it.
2. *Computed.* After every step, the blocks which that step completed and the ticket asks for go to the sender (blocks
   from this worker's own prefix cache among them). The next chunk does not wait for them.
3. *Sampled.* The step that computes the last token also draws the first output token: `Prefilled` goes out, whatever
   the transfer does. The last, partial block follows.
4. *Held.* The blocks stay in place until the sender has seen them acknowledged, or has failed.
5. *Ended.* The blocks are given back (and stay cached); `Ended` says that nothing is left.

Cancel, the end of the session, the deadline and an engine error lead from everywhere to the same exit: computing stops
before the next step, sooner where that pays; the transfer is aborted, and no block is reused until the sender says that
nobody reads it. A failed transfer does not stop the computing: the first token is still wanted, and the decode worker
computes what it lacks.

Records belong to the event loop, shipments (`computing`) to the engine thread; the sender's threads only call back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from engine.engine import Engine, RequestUpdate, StepOutput
from engine.errors import DeadlineExceeded, Draining, EngineError, LinkClosed, RequestError
from engine.plan import Pool
from engine.request import Request, RequestKind
from engine.sampler import SampledToken
from kv_transfer.identity import LinkTarget, PeerIdentity
from kv_transfer.link import LinkSettings
from kv_transfer.sender import KvSender, OutgoingBlock, TicketInfo
from kv_transfer.stats import TransferStats
from kvrelay.v1 import worker_pb2
from prefill_worker.computing import PromptComputer
from prefill_worker.shipment import Shipment
from worker.block_feed import BlockFeed
from worker.config import WorkerConfig
from worker.core import WorkerCore
from worker.engine_builder import EngineParts, build_engine
from worker.incoming import read_layout, read_request, read_timeout_s, read_traceparent
from worker.outputs import output_to_proto
from worker.session import Session
from worker.threads import Threads, Timer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    """One live request. It ends when it is neither `computing` nor `sending`, and not before."""

    key: str
    session: Session
    request_id: str
    request: Request
    traceparent: str
    deadline: Timer
    sending: bool
    """A transfer is open."""
    computing: bool = True
    """The first token has not been drawn."""
    stopping: bool = False
    """Cancelled, overdue or failed: no more is computed."""
    error: EngineError | None = None
    """What `Ended` will say."""


class PrefillWorker:
    """The prefill `Role`. Everything that is not marked otherwise runs on the event loop."""

    def __init__(self, config: WorkerConfig, parts: EngineParts, threads: Threads | None = None) -> None:
        """Takes over `parts`; `stop` gives them back. `threads` stands in for the real ones in tests."""
        self._core: WorkerCore[_Prompt] = WorkerCore(config, parts, self._deliver, threads)
        self._identity = parts.identity
        peer = PeerIdentity(
            worker_id=config.worker_id,
            incarnation=self._core.incarnation,
            fingerprint=parts.identity.model_fingerprint,
            layout=parts.kv.layout,
        )
        links = LinkSettings(transports=config.kv_transports, key=config.cluster_key)
        self._sender = KvSender(peer, parts.kv, self, settings=links, copier=parts.native)
        self._computer = PromptComputer(
            self._sender, parts.engine.generation, parts.kv.layout.block_size, parts.engine.lender
        )

    @classmethod
    def build(cls, config: WorkerConfig) -> PrefillWorker:
        """Load the model and make a worker of it. Raises `ModelError` or `ConfigError`."""
        return cls(config, build_engine(config.engine_of("prefill")))

    async def start(self) -> None:
        self._core.start()

    async def drain(self, timeout_s: float) -> None:
        await self._core.drain(timeout_s)

    async def stop(self) -> None:
        for record in self._core.live:
            self._stop(record, Draining("the worker is stopping"))
        await self._core.stop(self._sender.close)

    def welcome(self) -> worker_pb2.Welcome:
        return self._core.welcome("prefill")

    def pool(self) -> Pool:
        return self._core.parts.pool

    @property
    def block_feed(self) -> BlockFeed:
        return self._core.block_feed

    def timings(self) -> Mapping[str, float]:
        return self._core.parts.timings

    async def load(self) -> worker_pb2.Load:
        return await self._core.load()

    async def check_integrity(self) -> None:
        """Re-derive the invariants of engine and sender; while nothing is live, also that nothing is left."""
        await self._core.check_integrity()
        self._sender.check_integrity()
        if not len(self._core.live):
            self._computer.check_idle()

    async def handle(self, session: Session, message: worker_pb2.SessionRequest) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                self._receive(session, message.prefill)
            case "cancel":
                record = self._core.live.by_request(session, message.cancel.request_id)
                if record is not None:  # else it has ended, and the two messages crossed
                    self._stop(record, None)
            case "prewarm":
                self._prewarm(message.prewarm)
            case kind:
                raise RequestError("message", f"a prefill worker takes prefill, cancel and prewarm, got {kind}")

    def _prewarm(self, peer: worker_pb2.Prewarm) -> None:
        try:
            self._sender.prewarm(LinkTarget(peer.worker_id, peer.incarnation, peer.link_endpoint, read_layout(peer)))
        except LinkClosed as error:
            logger.info("no link to %s is opened beforehand: %s", peer.worker_id, error)

    def session_ended(self, session: Session) -> None:
        for record in self._core.live.of(session):
            self._stop(record, None)

    def _receive(self, session: Session, prefill: worker_pb2.Prefill) -> None:
        core = self._core
        core.check_new(session, prefill.request_id)
        now = core.now()
        key = core.live.new_key()
        request = read_request(prefill, key, RequestKind.PREFILL, now)
        timeout_s = read_timeout_s(prefill, core.config.max_timeout_s)
        shipment = self._shipment(prefill, request)
        if shipment is not None:
            self._sender.open(key, _ticket_info(prefill.ticket), now + timeout_s)
        record = _Prompt(
            key=key,
            session=session,
            request_id=prefill.request_id,
            request=request,
            traceparent=read_traceparent(prefill),
            deadline=core.call_later(timeout_s, self._overdue, key),
            sending=shipment is not None,
        )
        core.live.add(record)
        session.load_due.set()
        core.post(partial(self._submit, request=request, shipment=shipment))

    def _shipment(self, prefill: worker_pb2.Prefill, request: Request) -> Shipment | None:
        """None if the decode worker lacks no block."""
        if not prefill.ticket.ordinals:
            return None
        layout = read_layout(prefill.ticket)
        ours = self._identity.block_size
        block_size = ours if layout is None else layout.block_size
        identity = replace(self._identity, block_size=block_size)
        chain = identity.chain(request.scope, prefill.token_ids, request.num_public_tokens)
        same = layout in (None, self._core.parts.kv.layout)
        ordinals = tuple(prefill.ticket.ordinals)
        return Shipment(ordinals, chain, len(request.token_ids), block_size, ours, same_layout=same)

    def _submit(self, engine: Engine, request: Request, shipment: Shipment | None) -> None:
        """On the engine thread."""
        try:
            self._computer.submit(engine, request, shipment)
        except EngineError as error:
            self._core.notify(self._refused, request.request_id, error)

    def _refused(self, key: str, error: EngineError) -> None:
        record = self._core.live.by_key(key)
        if record is not None:
            self._stop(record, error)

    def _deliver(self, output: StepOutput) -> None:
        """On the engine thread, after every step."""
        self._core.notify(self._on_step, output)
        self._computer.ship(output)

    def _on_step(self, output: StepOutput) -> None:
        for update in output.updates:
            record = self._core.live.by_key(update.request_id)
            if record is None or record.stopping:
                continue
            if update.error is not None:
                self._stop(record, update.error)
            elif update.token is not None:
                self._sampled(record, update, update.token)

    def _sampled(self, record: _Prompt, update: RequestUpdate, token: SampledToken) -> None:
        request, block_size = record.request, self._identity.block_size
        # Both were written once, before the step that ended with this update.
        began, cached_tokens = request.first_scheduled, request.num_cached_tokens
        assert began is not None, "a token was drawn by no step"
        num_blocks = -(-update.num_computed_tokens // block_size)
        prefilled = worker_pb2.Prefilled(
            request_id=record.request_id,
            output=output_to_proto(update.index, token, update.finish_reason),
            cached_tokens=cached_tokens,
            blocks_computed=num_blocks - cached_tokens // block_size,
            queue_us=round((began - request.arrival) * 1e6),
            compute_us=round((self._core.now() - began) * 1e6),
        )
        record.session.send(worker_pb2.SessionResponse(prefilled=prefilled))
        record.computing = False
        self._end_if_over(record)

    def transfer_done(self, request_id: str, stats: TransferStats) -> None:
        """On a link thread; `request_id` is our key."""
        self._core.notify(self._transfer_over, request_id, None)

    def transfer_failed(self, request_id: str, error: EngineError) -> None:
        """On a link thread; `request_id` is our key."""
        self._core.notify(self._transfer_over, request_id, error)

    def loan_over(self, request_id: str, count: int) -> None:
        """On a link thread; `request_id` is our key, live or not."""
        self._core.post(lambda engine: self._computer.loan_over(request_id, count))

    def block_doubted(self, block: OutgoingBlock) -> None:
        """On a link thread."""
        self._core.post(lambda engine: self._look_at(engine, block))

    def _look_at(self, engine: Engine, block: OutgoingBlock) -> None:
        """On the engine thread."""
        output = self._computer.look_at(engine, block)
        if output.updates:
            self._deliver(output)

    def _transfer_over(self, key: str, error: EngineError | None) -> None:
        record = self._core.live.by_key(key)
        assert record is not None, f"{key} ended before its transfer"
        record.sending = False
        if error is not None and not record.stopping:
            record.error = error
        self._core.post(lambda engine: self._computer.transfer_over(engine, key))
        self._end_if_over(record)

    def _overdue(self, key: str) -> None:
        record = self._core.live.by_key(key)
        if record is not None:
            self._stop(record, DeadlineExceeded("the deadline passed on the prefill worker"))

    def _stop(self, record: _Prompt, error: EngineError | None) -> None:
        """The one early exit. Idempotent."""
        if record.stopping:
            return
        record.stopping = True
        record.error = error
        self._core.post_cancel(record.key, lambda engine: self._computer.cancel(engine, record.key))
        if record.sending:
            self._sender.abort(record.key)
        self._end_if_over(record)

    def _end_if_over(self, record: _Prompt) -> None:
        """Say `Ended` once nothing is computed or sent any more, and the engine has given back what it held."""
        if record.sending or (record.computing and not record.stopping):
            return
        self._core.post(lambda engine: self._core.notify(self._end, record))

    def _end(self, record: _Prompt) -> None:
        if self._core.live.by_key(record.key) is record:
            record.deadline.cancel()
            self._core.ended(record, record.error)


def _ticket_info(ticket: worker_pb2.Ticket) -> TicketInfo:
    """Raises `RequestError` (field `ticket`) unless there is one slot and one generation for each ordinal."""
    if not len(ticket.ordinals) == len(ticket.slots) == len(ticket.generations):
        raise RequestError(
            "ticket",
            f"{len(ticket.ordinals)} ordinals, {len(ticket.slots)} slots and {len(ticket.generations)} generations",
        )
    places = zip(ticket.slots, ticket.generations, strict=True)
    return TicketInfo(
        ticket_id=ticket.ticket_id,
        worker_id=ticket.worker_id,
        incarnation=ticket.incarnation,
        endpoint=ticket.link_endpoint,
        blocks=dict(zip(ticket.ordinals, places, strict=True)),
        lease_s=ticket.lease_ms / 1000,
        layout=read_layout(ticket),
    )
