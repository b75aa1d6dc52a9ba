"""One link of a decode worker and its thread: the handshake, checking, copying, adopting, answering.

What may be written where is `ReservationTable`'s to say; the engine hears from the listener.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from xxhash import xxh3_128_digest

from engine.borrowing import LentColumns, Loan
from engine.errors import DigestMismatch, LinkClosed, ProtocolError, StaleTicket, TransferError
from engine.peer_windows import PeerWindow
from kv_transfer.block_records import COPY, LOAN
from kv_transfer.copies import blocks_of
from kv_transfer.digest import BlockCopier
from kv_transfer.frames import (
    GROUPS_PROTOCOL_VERSION,
    MAX_GROUP_BYTES,
    MAX_RELEASED_TICKETS,
    Abort,
    Ack,
    AskLoans,
    Block,
    Blocks,
    Copies,
    Finish,
    Frame,
    Lend,
    Nack,
    Release,
    Renew,
    clipped,
    encode,
)
from kv_transfer.handshake import Refusal
from kv_transfer.identity import PeerIdentity
from kv_transfer.link import IncomingLink, LinkSettings, accept
from kv_transfer.pool import KvPool
from kv_transfer.reservation import DuplicateBlock, ReservationTable, WriteGrant, WriteOutcome
from kv_transfer.stats import Counters
from kv_transfer.transport_shm import ShmIntake

MAX_UNSENT_ACKS = 16
"""Adopted blocks that one ACK may wait for while more frames are at hand."""


class ReceiverListener(Protocol):
    """Called on link threads, in the order in which things happen to a ticket. Must not wait for the receiver."""

    def blocks_adopted(self, ticket_id: str, ordinals: Sequence[int], num_bytes: int, transport: str) -> None:
        """These blocks are complete and verified in their slots; each is named once. `num_bytes` of all."""
        ...

    def blocks_lent(self, loan: Loan) -> None:
        """These blocks of its ticket are complete where they are. Each must go back once."""
        ...

    def block_refused(self, ticket_id: str, ordinal: int, error: TransferError) -> None:
        """A block of an open ticket was not what was agreed; its sender gives the transfer up."""
        ...

    def writes_quiet(self, ticket_id: str, slots: Collection[int]) -> None:
        """Slots that were still being written when their ticket ended are quiet now."""
        ...

    def link_lost(self, ticket_ids: Collection[str], error: TransferError) -> None:
        """These open, incomplete tickets will get no more blocks from their sender: it is gone, or gave them up."""
        ...


class Receiver(Protocol):
    """What a link needs of the receiver that it belongs to."""

    identity: PeerIdentity
    kv: KvPool
    table: ReservationTable
    listener: ReceiverListener
    copier: BlockCopier
    settings: LinkSettings
    clock: Callable[[], float]
    counters: Counters

    def note_adoption(self, ticket_id: str, since: float, blocks: int, num_bytes: int, transport: str) -> None: ...

    def link_ended(self, link: ReceiverLink) -> None: ...


class ReceiverLink:
    """One link and its thread."""

    def __init__(self, receiver: Receiver, sock: socket.socket) -> None:
        self._receiver = receiver
        self._connection = receiver.settings.connection(sock, receiver.settings.handshake_timeout_s)
        self._table = receiver.table
        self._listener = receiver.listener
        self._counters = receiver.counters
        self._tickets: dict[str, float | None] = {}
        """Open tickets that this link has named -> when the first frame of a block of it came."""
        self._acks: dict[str, list[int]] = {}
        """Ticket -> adopted ordinals that the sender does not know of yet."""
        self._asked = 0
        """Number of the sender's last question after its loans."""
        self.is_stranger = True
        """Still in the handshake, and not told to end."""
        self.thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)

    def end(self) -> None:
        """From any thread: wake the link's thread up, and let it stop."""
        self.is_stranger = False
        self._connection.shut_down()

    def _run(self) -> None:
        error: TransferError = LinkClosed("the link's thread ended by a fault")
        link: IncomingLink | None = None
        try:
            receiver = self._receiver
            link = accept(self._connection, receiver.identity, receiver.kv, receiver.copier, receiver.settings)
            self.is_stranger = False
            self._counters.add("links_accepted", link.intake.transport)
            self._serve(link)
        except TransferError as failure:
            error = failure
        finally:
            self._tear_down(error, link)

    def _serve(self, link: IncomingLink) -> None:
        while True:
            frame = link.connection.receive()
            if frame is None:
                continue  # a sender may be silent: what it owes is bounded by the leases
            self._dispatch(link, frame)
            self._send_acks_if_due(link)

    def _dispatch(self, link: IncomingLink, frame: Frame) -> None:
        match frame:
            case Blocks() if link.protocol >= GROUPS_PROTOCOL_VERSION:
                self._take_blocks(link, frame)
            case Block() if link.protocol < GROUPS_PROTOCOL_VERSION:
                self._take_blocks(link, frame.grouped())
            case Copies() if isinstance(link.intake, ShmIntake) and link.landing is None:
                self._take_copies(link, frame, link.intake)
            case Lend() if link.intake.window is not None:
                self._take_loans(link, frame, link.intake.window)
            case AskLoans() if link.intake.window is not None:
                self._asked = frame.number
                self._send_acks(link, answers=True)
            case Renew():
                for ticket_id in frame.ticket_ids:
                    self._renew(link, ticket_id)
            case Finish():
                short = f"the sender finished after {frame.count} blocks, and not all have come"
                self._no_more_blocks(frame.ticket_id, ProtocolError(short))
            case Abort():
                self._no_more_blocks(frame.ticket_id, LinkClosed("the sender aborted the transfer"))
            case _:
                raise ProtocolError(f"a sender of version {link.protocol} sends no {type(frame).__name__}")

    def _take_blocks(self, link: IncomingLink, frame: Blocks) -> None:
        """Check, copy, verify, adopt, answer. Only an impossible frame or a lost stream ends the link."""
        self._check(link, frame)
        grant, refused = self._begin_write(frame)
        intact: list[bool] = [False] * len(grant.slots)
        try:
            intact = self._copy(link, frame, grant, refused)
        finally:
            outcomes = self._end_write(grant, intact)
        self._conclude(link, frame, grant, outcomes, refused)

    def _take_copies(self, link: IncomingLink, frame: Copies, intake: ShmIntake) -> None:
        """As `_take_blocks`, at once where nothing is wrong with any of them."""
        kv, records = self._receiver.kv, np.frombuffer(frame.records, dtype=COPY)
        grant = None
        if frame.length == kv.layout.block_bytes:
            grant = self._table.begin_all(frame.ticket_id, frame.incarnation, records)
        if grant is None:
            self._take_blocks(link, blocks_of(frame))
            return
        if self._tickets.get(frame.ticket_id) is None:
            self._tickets[frame.ticket_id] = self._receiver.clock()
        intact: list[bool] = [False] * len(grant.slots)
        try:
            digests = intake.copy(records["source"].tolist(), kv, grant.slots)
            same = np.frombuffer(digests, dtype=records["digest"].dtype) == records["digest"]
            intact = same.tolist()
        finally:
            outcomes = self._end_write(grant, intact)
        self._conclude(link, frame, grant, outcomes, {})

    def _conclude(
        self,
        link: IncomingLink,
        frame: Blocks | Copies,
        grant: WriteGrant,
        outcomes: Sequence[WriteOutcome],
        refused: Mapping[int, TransferError],
    ) -> None:
        """Account, answer, tell. The sender hears first: it waits for that, and nothing here needs its blocks."""
        adopted = [n for n, outcome in zip(grant.ordinals, outcomes, strict=True) if outcome is WriteOutcome.ADOPTED]
        if adopted:
            self._account(link, frame.ticket_id, len(adopted))
            self._acks.setdefault(frame.ticket_id, []).extend(adopted)
            num_bytes = len(adopted) * self._receiver.kv.layout.block_bytes
            try:
                self._send_acks_if_due(link)
            finally:
                self._listener.blocks_adopted(frame.ticket_id, adopted, num_bytes, link.intake.transport)
        for ordinal, outcome in zip(grant.ordinals, outcomes, strict=True):
            if outcome is WriteOutcome.REFUSED:
                self._refuse(link, frame, ordinal, DigestMismatch(f"block {ordinal} is not what was sent"))
            elif outcome is WriteOutcome.LATE:
                self._refuse(link, frame, ordinal, StaleTicket(f"ticket {frame.ticket_id} ended during the write"))
        for place, error in refused.items():
            assert isinstance(frame, Blocks), "else none is refused before it is copied"
            self._answer_refused(link, frame, frame.entries[place].ordinal, error)

    def _take_loans(self, link: IncomingLink, frame: Lend, window: PeerWindow) -> None:
        """Check and adopt where they are. The bytes are not looked at: it is the memory itself that was lent."""
        self._send_acks(link)  # with these they may be more than one frame holds
        if xxh3_128_digest(frame.records) != frame.digest:
            raise ProtocolError("what is said of lent blocks was damaged on its way")
        records = np.frombuffer(frame.records, dtype=LOAN)
        sources, said = records["source"].astype(np.int64), records["source_generation"]
        if int(sources.max()) >= window.num_blocks:
            raise ProtocolError(f"block {sources.max()} is none of the peer's {window.num_blocks}")
        if self._tickets.get(frame.ticket_id) is None:
            self._tickets[frame.ticket_id] = self._receiver.clock()
        lent = window.generations[sources] == said
        refused = self._table.adopt_lent(frame.ticket_id, frame.incarnation, records, lent)
        ordinals: list[int] = records["ordinal"].tolist()
        all_ordinals = ordinals
        if refused:
            taken = np.array([place not in refused for place in range(len(ordinals))])
            sources, said, ordinals = sources[taken], said[taken], records["ordinal"][taken].tolist()
        if ordinals:
            window.take(len(ordinals))
            self._account(link, frame.ticket_id, len(ordinals))
            self._acks.setdefault(frame.ticket_id, []).extend(ordinals)
            loan = Loan(frame.ticket_id, window, LentColumns(ordinals, sources, said))
            self._listener.blocks_lent(loan)  # from now on they may come back
        for place, error in refused.items():
            self._answer_refused(link, frame, all_ordinals[place], error)

    def _release(self, link: IncomingLink, window: PeerWindow, *, answers: bool = False) -> None:
        """Tell what was given back, of blocks whose ACKs are sent; whoever `answers` says so even of nothing."""
        while (returned := window.take_returned(MAX_RELEASED_TICKETS)) or answers:
            answers = False
            tickets, counts = tuple(t for t, _ in returned), tuple(n for _, n in returned)
            link.connection.send(encode(Release(number=self._asked, ticket_ids=tickets, counts=counts)))

    def _check(self, link: IncomingLink, frame: Blocks) -> None:
        block_bytes = self._receiver.kv.layout.block_bytes
        if frame.length != block_bytes:
            raise ProtocolError(f"a block of {frame.length} bytes, the layout says {block_bytes}")
        if (count := len(frame.entries)) > 1 and count * block_bytes > MAX_GROUP_BYTES:
            raise ProtocolError(f"a group of {count * block_bytes} bytes, at most {MAX_GROUP_BYTES} are allowed")
        if (fault := link.intake.check(frame)) is not None:
            raise ProtocolError(fault)

    def _begin_write(self, frame: Blocks) -> tuple[WriteGrant, Mapping[int, TransferError]]:
        """The errors say, by their places in the frame, why there is nothing to write."""
        grant, refused = self._table.begin_write(frame.ticket_id, frame.incarnation, frame.entries)
        if grant.slots and self._tickets.get(frame.ticket_id) is None:
            self._tickets[frame.ticket_id] = self._receiver.clock()
        return grant, refused

    def _copy(
        self, link: IncomingLink, frame: Blocks, grant: WriteGrant, refused: Mapping[int, TransferError]
    ) -> list[bool]:
        """Of which slots of the grant hold what was sent. Raises what ended the stream."""
        pool, entries = self._receiver.kv, frame.entries
        slots: Sequence[int | None] = grant.slots
        if refused:
            slots = [None if i in refused else entry.slot for i, entry in enumerate(entries)]
            entries = tuple(entry for i, entry in enumerate(entries) if i not in refused)
        if link.landing is not None:
            digests = link.landing.receive_into(frame, slots)
        else:
            digests = link.intake.receive_into(frame, [None if slot is None else pool.block(slot) for slot in slots])
        return [digest == entry.digest for digest, entry in zip(digests, entries, strict=True)]

    def _end_write(self, grant: WriteGrant, intact: Sequence[bool]) -> list[WriteOutcome]:
        outcomes = self._table.end_write(grant, intact)
        if WriteOutcome.LATE in outcomes:  # all of them are
            self._counters.add("blocks_late", n=len(grant.slots))
            self._listener.writes_quiet(grant.ticket_id, grant.slots)
        return outcomes

    def _account(self, link: IncomingLink, ticket_id: str, adopted: int) -> None:
        since, transport = self._tickets[ticket_id], link.intake.transport
        assert since is not None, "adopted a block that did not begin"
        num_bytes = adopted * self._receiver.kv.layout.block_bytes
        self._counters.add_all(transport, {"blocks_adopted": adopted, "bytes_adopted": num_bytes})
        self._receiver.note_adoption(ticket_id, since, adopted, num_bytes, transport)

    def _answer_refused(
        self, link: IncomingLink, frame: Blocks | Copies | Lend, ordinal: int, error: TransferError
    ) -> None:
        if isinstance(error, DuplicateBlock):
            self._counters.add("blocks_duplicate")
            self._acks.setdefault(frame.ticket_id, []).append(ordinal)
        else:
            self._refuse(link, frame, ordinal, error)

    def _refuse(self, link: IncomingLink, frame: Blocks | Copies | Lend, ordinal: int, error: TransferError) -> None:
        self._counters.add("blocks_refused", type(error).__name__)
        self._nack(link, frame.ticket_id, ordinal, error)
        self._tickets.pop(frame.ticket_id, None)
        if self._table.progress(frame.ticket_id) is not None:
            self._listener.block_refused(frame.ticket_id, ordinal, error)

    def _renew(self, link: IncomingLink, ticket_id: str) -> None:
        try:
            self._table.renew(ticket_id, self._receiver.clock())
        except StaleTicket as error:
            self._tickets.pop(ticket_id, None)
            self._counters.add("frames_ignored")
            self._nack(link, ticket_id, None, error)
            return
        self._tickets.setdefault(ticket_id, None)

    def _no_more_blocks(self, ticket_id: str, error: TransferError) -> None:
        """The sender has said its last about a ticket. `error` counts if blocks are still missing."""
        if ticket_id not in self._tickets:
            self._counters.add("frames_ignored")
            return
        del self._tickets[ticket_id]
        if self._table.missing(ticket_id):
            self._listener.link_lost([ticket_id], error)

    def _nack(self, link: IncomingLink, ticket_id: str, ordinal: int | None, error: TransferError) -> None:
        self._send_acks(link)  # a refusal must not overtake what was adopted before it
        nack = Nack(ticket_id=ticket_id, ordinal=ordinal, error=type(error).__name__, message=clipped(str(error)))
        link.connection.send(encode(nack))

    def _send_acks_if_due(self, link: IncomingLink) -> None:
        """While more frames are at hand, a few may wait for them."""
        if self._acks and (sum(map(len, self._acks.values())) >= MAX_UNSENT_ACKS or not link.connection.has_frame()):
            self._send_acks(link)

    def _send_acks(self, link: IncomingLink, *, answers: bool = False) -> None:
        """And what was given back: behind the ACKs, as what was lent a moment ago may be among it."""
        acks, self._acks = self._acks, {}
        if acks:
            encoded = [encode(Ack(ticket_id=ticket, ordinals=tuple(ordinals))) for ticket, ordinals in acks.items()]
            link.connection.send(b"".join(encoded))
        if link.intake.window is not None:
            self._release(link, link.intake.window, answers=answers)

    def _tear_down(self, error: TransferError, link: IncomingLink | None) -> None:
        if link is None:
            reason = error.code if isinstance(error, Refusal) else type(error).__name__
            self._counters.add("links_refused", reason)
        else:
            self._counters.add("links_lost", type(error).__name__)
            link.intake.close()
            if link.landing is not None:
                link.landing.close()
        self._connection.close()
        lost = [ticket_id for ticket_id in self._tickets if self._table.missing(ticket_id)]
        if lost:
            self._listener.link_lost(lost, error)
        self._receiver.link_ended(self)
