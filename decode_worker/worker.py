"""One decode worker: reserves blocks, adopts those that a prefill worker sends, and generates from there.

Life cycle of a request on this side:

1. *Waiting.* `Reserve` is checked; the engine gives it blocks in its turn: those of the prefix cache, and room for
   the rest of the prompt and one block of growth.
2. *Open.* The missing blocks make a ticket with a lease. `Reserved` carries it to the router, and that to a prefill
   worker. Each block that arrives is checked by the links, adopted, and registered under its hash.
3. *Settled.* When the last missing block was adopted, the ticket is closed and `HandedOver` says so. If blocks will
   not come (the lease ran out, a block was refused, the link or the prefill worker is lost, the router says so), the
   ticket is closed too; as soon as no write into its slots is under way, the engine keeps what came up to the first
   gap, computes the rest, and `HandedOver` says why.
4. *Started.* `Start` brings the tokens that the router has emitted meanwhile. Started and settled, the request joins
   the batch. Every step's tokens go out as one `Step` per router.
5. *Ended.* The last token, then `Ended`: nothing is left. The blocks stay cached.

With `compute_here` there is no ticket and no `Start`: the engine computes the prompt. `Reserved`, with a ticket that
asks for nothing, follows when that has begun; `HandedOver` does not.

Cancel, the end of the session, the deadline and an engine error lead from everywhere to the same exit: the ticket is
closed, the engine forgets the request, and a slot that is still being written stays in quarantine until it is quiet.

Records belong to the event loop, which is told of everything in the order of events; engine and links only call back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from decode_worker.hand_over import HandOver
from decode_worker.outgoing_step import OutgoingStep
from decode_worker.stream import Phase, Stream
from decode_worker.ticket import ask_for, expected_blocks, new_ticket
from engine.block_hash import unpack_tokens
from engine.borrowing import Loan
from engine.engine import Engine, MissingBlock, Reservation, StepOutput
from engine.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineError,
    LinkClosed,
    RequestError,
    TransferError,
)
from engine.plan import Pool
from engine.request import RequestKind
from kv_transfer.identity import PeerIdentity
from kv_transfer.link import LinkSettings
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ReservationTable
from kvrelay.v1 import worker_pb2
from worker.block_feed import BlockFeed
from worker.config import WorkerConfig
from worker.core import WorkerCore
from worker.engine_builder import EngineParts, build_engine
from worker.incoming import read_request, read_timeout_s, read_traceparent
from worker.session import Session
from worker.threads import Threads, Timer


class DecodeWorker:
    """The decode `Role`. Everything that is not marked otherwise runs on the event loop."""

    def __init__(self, config: WorkerConfig, parts: EngineParts, threads: Threads | None = None) -> None:
        """Takes over `parts`; `stop` gives them back. `threads` stands in for the real ones in tests."""
        self._core: WorkerCore[Stream] = WorkerCore(config, parts, self._deliver, threads)
        self._table = ReservationTable(self._core.incarnation, config.lease_s)
        peer = PeerIdentity(
            worker_id=config.worker_id,
            incarnation=self._core.incarnation,
            fingerprint=parts.identity.model_fingerprint,
            layout=parts.kv.layout,
        )
        links = LinkSettings(transports=config.kv_transports, key=config.cluster_key)
        self._receiver = KvReceiver(peer, parts.kv, self._table, self, config.host, settings=links, copier=parts.native)
        self._lease_timer: Timer | None = None

    @classmethod
    def build(cls, config: WorkerConfig) -> DecodeWorker:
        """Load the model and make a worker of it. Raises `ModelError` or `ConfigError`."""
        return cls(config, build_engine(config.engine_of("decode")))

    async def start(self) -> None:
        """Raises `ConfigError` if links cannot be accepted on the host."""
        try:
            self._receiver.start()
        except OSError as error:
            raise ConfigError(f"cannot accept links on {self._core.config.host}: {error}") from error
        self._core.start()

    async def drain(self, timeout_s: float) -> None:
        await self._core.drain(timeout_s)

    async def stop(self) -> None:
        for record in self._core.live:
            self._stop(record, Draining("the worker is stopping"))
        await self._core.stop(self._receiver.close)
        if self._lease_timer is not None:
            self._lease_timer.cancel()

    def welcome(self) -> worker_pb2.Welcome:
        return self._core.welcome("decode", self._receiver.endpoint())

    def pool(self) -> Pool:
        return self._core.parts.pool

    @property
    def block_feed(self) -> BlockFeed:
        return self._core.block_feed

    def timings(self) -> Mapping[str, float]:
        return self._core.parts.timings

    async def load(self) -> worker_pb2.Load:
        load = await self._core.load()
        load.errors.update({f"LinkRefused: {why}": n for why, n in self._receiver.refusals().items()})
        return load

    async def check_integrity(self) -> None:
        """Re-derive the invariants of engine and reservation table."""
        await self._core.check_integrity()
        self._table.check_integrity()

    async def handle(self, session: Session, message: worker_pb2.SessionRequest) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._receive(session, message.reserve)
            case "start":
                self._start(session, message.start)
            case "cancel":
                record = self._core.live.by_request(session, message.cancel.request_id)
                if record is not None:  # else it has ended, and the two messages crossed
                    self._stop(record, None)
            case kind:
                raise RequestError("message", f"a decode worker takes reserve, start and cancel, got {kind}")

    def session_ended(self, session: Session) -> None:
        for record in self._core.live.of(session):
            self._stop(record, None)

    def _receive(self, session: Session, reserve: worker_pb2.Reserve) -> None:
        core = self._core
        core.check_new(session, reserve.request_id)
        key = core.live.new_key()
        kind = RequestKind.LOCAL if reserve.compute_here else RequestKind.DECODE
        request = read_request(reserve, key, kind, core.now())
        timeout_s = read_timeout_s(reserve, core.config.max_timeout_s)
        record = Stream(
            key=key,
            session=session,
            request_id=reserve.request_id,
            request=request,
            lane=reserve.lane,
            traceparent=read_traceparent(reserve),
            deadline=core.call_later(timeout_s, self._overdue, key),
        )
        core.live.add(record)
        session.load_due.set()
        if kind is RequestKind.LOCAL:
            self._on_engine(key, lambda engine: engine.submit(request))
        else:
            self._on_engine(
                key, lambda engine: engine.reserve(request, lambda grant: core.notify(self._granted, grant))
            )

    def _granted(self, reservation: Reservation) -> None:
        record = self._core.live.by_key(reservation.request_id)
        if record is None or record.stopping:
            return
        block_size = self._core.parts.identity.block_size
        record.hand_over = HandOver(reservation, len(record.request.token_ids), block_size)
        missing = reservation.missing if record.given_up is None else ()
        if missing:
            self._table.open(record.key, expected_blocks(missing), self._core.now() + self._core.config.lease_s)
            record.phase = Phase.OPEN
            self._arm_lease_timer()
        self._send_reserved(record, missing, reservation.cached_tokens, reservation.wait_s)
        if not missing:
            self._settle(record)

    def _send_reserved(
        self, record: Stream, missing: Sequence[MissingBlock], cached_tokens: int, wait_s: float
    ) -> None:
        ticket = new_ticket(record.key, self._core.config, self._core.incarnation, self._core.parts.kv.layout)
        ticket.link_endpoint, ticket.cached_tokens = self._receiver.endpoint(), cached_tokens
        ask_for(ticket, missing)
        reserved = worker_pb2.Reserved(request_id=record.request_id, wait_us=round(wait_s * 1e6), ticket=ticket)
        record.session.send(worker_pb2.SessionResponse(reserved=reserved))

    def blocks_adopted(self, ticket_id: str, ordinals: Sequence[int], num_bytes: int, transport: str) -> None:
        """On a link thread."""
        key = ticket_id
        self._core.notify(self._arrived, key, ordinals, lambda engine: engine.adopted(key, *ordinals), None)

    def blocks_lent(self, loan: Loan) -> None:
        """On a link thread."""
        key = loan.ticket_id
        self._core.notify(self._arrived, key, loan.ordinals, lambda engine: engine.borrow(key, loan), loan)

    def _arrived(
        self, key: str, ordinals: Sequence[int], operation: Callable[[Engine], None], loan: Loan | None
    ) -> None:
        """If the ticket was closed while this was on its way, the blocks count as not arrived."""
        record = self._core.live.by_key(key)
        if record is None or record.stopping or record.phase is not Phase.OPEN or record.hand_over is None:
            if loan is not None:
                loan.give_back(len(ordinals))
            return
        record.hand_over.adopt(ordinals)
        self._on_engine(key, operation)
        if record.hand_over.complete:
            self._table.close(key)
            self._settle(record)

    def block_refused(self, ticket_id: str, ordinal: int, error: TransferError) -> None:
        """On a link thread."""
        self._core.notify(self._block_refused, ticket_id, error)

    def _block_refused(self, key: str, error: TransferError) -> None:
        record = self._core.live.by_key(key)
        if record is not None and record.hand_over is not None and record.phase is Phase.OPEN:
            record.hand_over.refuse(self._core.parts.kv.layout.block_bytes)
        self._give_up_key(key, error)

    def link_lost(self, ticket_ids: Collection[str], error: TransferError) -> None:
        """On a link thread."""
        for ticket_id in ticket_ids:
            self._core.notify(self._give_up_key, ticket_id, error)

    def _arm_lease_timer(self) -> None:
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
        expiry = self._table.next_expiry()
        if expiry is not None:
            delay_s = max(0.0, expiry - self._core.now())
            self._lease_timer = self._core.call_later(delay_s, self._expire_leases)

    def _expire_leases(self) -> None:
        for key in self._table.expire(self._core.now()):
            self._give_up_key(key, LinkClosed("the lease ran out: its prefill worker is silent"))
        self._arm_lease_timer()

    def _give_up_key(self, key: str, error: TransferError) -> None:
        record = self._core.live.by_key(key)
        if record is not None and not record.stopping:
            self._give_up(record, error)

    def _give_up(self, record: Stream, error: TransferError) -> None:
        """Wait for no more blocks. Does nothing if it waits for none."""
        if record.given_up is not None or record.phase not in (Phase.WAITING, Phase.OPEN):
            return
        record.given_up = error
        if isinstance(error, LinkClosed):
            record.uncounted = error
        else:  # wrong bytes are a fault, whatever becomes of the request
            self._core.count(error)
        if record.phase is Phase.OPEN:  # else the grant settles it
            self._close_ticket(record)
            if not record.busy:
                self._settle(record)

    def _count_loss(self, record: Stream) -> None:
        """The request goes on without the blocks that did not come: so it was not cancelled."""
        error, record.uncounted = record.uncounted, None
        if error is not None:
            self._core.count(error)

    def _close_ticket(self, record: Stream) -> None:
        record.phase = Phase.CLOSING
        record.busy |= self._table.close(record.key)

    def writes_quiet(self, ticket_id: str, slots: Collection[int]) -> None:
        """On a link thread."""
        self._core.notify(self._quiet, ticket_id, slots)

    def _quiet(self, key: str, slots: Collection[int]) -> None:
        record = self._core.live.by_key(key)
        if record is None:
            return
        # Others that were quiet before the ticket was closed are nobody's business: they may be in new hands.
        ours = record.busy.intersection(slots)
        record.busy -= ours
        if record.stopping:
            self._core.post(lambda engine: engine.quiet(ours))
            self._end_if_over(record)
        elif record.phase is Phase.CLOSING and not record.busy:
            self._settle(record)

    def _settle(self, record: Stream) -> None:
        """No link touches the slots any more, and it is known which blocks came."""
        assert record.hand_over is not None, "settled before it was granted"
        error = record.given_up
        if error is not None:
            self._core.post(lambda engine: engine.give_up_transfer(record.key))
        record.phase = Phase.SETTLED
        stats = self._receiver.transfer_stats(record.key)
        text = "" if error is None else f"{type(error).__name__}: {error}"
        handed_over = record.hand_over.message(record.request_id, stats, text)
        record.session.send(worker_pb2.SessionResponse(handed_over=handed_over))

    def _start(self, session: Session, start: worker_pb2.Start) -> None:
        record = self._core.live.by_request(session, start.request_id)
        if record is None or record.stopping:
            return
        try:
            token_ids = unpack_tokens(start.token_ids)
        except RequestError as error:  # not for the caller, who would say that nothing is left of the request
            self._stop(record, error)
            return
        if not token_ids and not start.compute_missing:
            self._stop(record, RequestError("token_ids", "must not be empty unless compute_missing is set"))
            return
        self._on_engine(record.key, lambda engine: engine.start(record.key, token_ids))
        if start.compute_missing:
            self._give_up(record, LinkClosed("the router says that no more blocks will come"))

    def _deliver(self, output: StepOutput) -> None:
        """On the engine thread, after every step."""
        self._core.notify(self._on_step, output)

    def _on_step(self, output: StepOutput) -> None:
        steps: defaultdict[Session, OutgoingStep] = defaultdict(OutgoingStep)
        finished: list[Stream] = []
        for update in output.updates:
            record = self._core.live.by_key(update.request_id)
            if record is None or record.stopping:
                continue
            self._count_loss(record)
            if update.error is not None:
                self._stop(record, update.error)
                continue
            if record.phase is Phase.WAITING:
                self._begun(record)
            if update.token is not None:
                steps[record.session].add(record, update.index, update.token, update.finish_reason)
            if update.finish_reason is not None:
                finished.append(record)
        for session, step in steps.items():
            session.send(worker_pb2.SessionResponse(step=step.to_proto()))
        for record in finished:
            self._end(record)

    def _begun(self, record: Stream) -> None:
        """The first step of a `compute_here` request: only now is it known what the prefix cache had."""
        record.phase = Phase.SETTLED
        began, arrival = record.request.first_scheduled, record.request.arrival
        assert began is not None, "an update of a step that was not"
        self._send_reserved(record, (), record.request.num_cached_tokens, began - arrival)

    def _overdue(self, key: str) -> None:
        if (record := self._core.live.by_key(key)) is not None:
            self._stop(record, DeadlineExceeded("the deadline passed on the decode worker"))

    def _stop(self, record: Stream, error: EngineError | None) -> None:
        """The one early exit. Idempotent."""
        if record.stopping:
            return
        record.stopping = True
        record.error = error
        if record.phase is Phase.OPEN:
            self._close_ticket(record)
        busy = frozenset(record.busy)

        def forget(engine: Engine) -> None:
            engine.cancel(record.key, busy)
            self._core.notify(self._forgotten, record)

        self._core.post_cancel(record.key, forget)

    def _forgotten(self, record: Stream) -> None:
        record.forgotten = True
        self._end_if_over(record)

    def _end_if_over(self, record: Stream) -> None:
        if record.forgotten and not record.busy:
            self._end(record)

    def _end(self, record: Stream) -> None:
        record.deadline.cancel()
        self._core.ended(record, record.error)
        if not len(self._core.live):
            self._table.check_integrity()

    def _on_engine(self, key: str, operation: Callable[[Engine], None]) -> None:
        """Post `operation`; if the engine refuses it, the request ends with that error."""

        def run(engine: Engine) -> None:
            try:
                operation(engine)
            except EngineError as error:
                self._core.notify(self._refused, key, error)

        self._core.post(run)

    def _refused(self, key: str, error: EngineError) -> None:
        if (record := self._core.live.by_key(key)) is not None:
            self._stop(record, error)
