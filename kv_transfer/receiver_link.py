"""One link of a decode worker and its thread: the handshake, checking, copying, adopting, answering.

What may be written where is `ReservationTable`'s to say; the engine hears from the listener.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from engine.borrowing import LentBlock, Loan
from engine.errors import DigestMismatch, LinkClosed, ProtocolError, StaleTicket, TransferError
from engine.peer_windows import PeerWindow
from kv_transfer.digest import BlockCopier
from kv_transfer.frames import (
    GROUPS_PROTOCOL_VERSION,
    MAX_GROUP_BYTES,
    MAX_RELEASED_TICKETS,
    Abort,
    Ack,
    AskLoans,
    Block,
    BlockEntry,
    Blocks,
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
from kv_transfer.loan_records import LoanEntry, unpack_loans
from kv_transfer.pool import KvPool
from kv_transfer.reservation import DuplicateBlock, ReservationTable, WriteGrant, WriteOutcome
from kv_transfer.stats import Counters

MAX_UNSENT_ACKS = 16
"""Adopted blocks that one ACK may wait for while more frames are at hand."""


class ReceiverListener(Protocol):
    """Called on link threads, in the order in which things happen to a ticket. Must not wait for the receiver."""

    def block_adopted(self, ticket_id: str, ordinal: int, num_bytes: int, transport: str) -> None:
        """The block is complete and verified in its slot; called once for each."""
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
            if self._acks and (self._unsent_acks() >= MAX_UNSENT_ACKS or not link.connection.has_frame()):
                self._send_acks(link)

    def _dispatch(self, link: IncomingLink, frame: Frame) -> None:
        match frame:
            case Blocks() if link.protocol >= GROUPS_PROTOCOL_VERSION:
                self._take_blocks(link, frame)
            case Block() if link.protocol < GROUPS_PROTOCOL_VERSION:
                self._take_blocks(link, frame.grouped())
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
        grants = [self._begin_write(frame, entry) for entry in frame.entries]
        intact: list[bool] = [False] * len(grants)
        try:
            intact = self._copy(link, frame, grants)
        finally:
            outcomes = self._end_writes(frame, grants, intact)
        if adopted := outcomes.count(WriteOutcome.ADOPTED):
            self._account(link, frame.ticket_id, adopted)
        for entry, outcome in zip(frame.entries, outcomes, strict=True):
            self._answer(link, frame, entry, outcome)

    def _take_loans(self, link: IncomingLink, frame: Lend, window: PeerWindow) -> None:
        """Check and adopt where they are. The bytes are not looked at: it is the memory itself that was lent."""
        self._send_acks(link)  # with these they may be more than one frame holds
        entries = unpack_loans(frame.records)
        sources = np.array([entry.source for entry in entries])
        if int(sources.max()) >= window.num_blocks:
            raise ProtocolError(f"block {sources.max()} is none of the peer's {window.num_blocks}")
        said = np.array([entry.source_generation for entry in entries], dtype=np.uint64)
        if self._tickets.get(frame.ticket_id) is None:
            self._tickets[frame.ticket_id] = self._receiver.clock()
        lent = (window.generations[sources] == said).tolist()
        outcomes = self._table.adopt_lent(frame.ticket_id, frame.incarnation, entries, lent)
        blocks = tuple(
            LentBlock(entry.ordinal, entry.source, entry.source_generation)
            for entry, outcome in zip(entries, outcomes, strict=True)
            if outcome is None
        )
        if blocks:
            window.take(len(blocks))
            self._account(link, frame.ticket_id, len(blocks))
            self._acks.setdefault(frame.ticket_id, []).extend(block.ordinal for block in blocks)
            self._listener.blocks_lent(Loan(frame.ticket_id, window, blocks))  # from now on they may come back
        for entry, outcome in zip(entries, outcomes, strict=True):
            if outcome is not None:
                self._answer(link, frame, entry, outcome)

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

    def _begin_write(self, frame: Blocks, entry: BlockEntry) -> WriteGrant | TransferError:
        """The error says why there is nothing to write."""
        try:
            grant = self._table.begin_write(
                frame.ticket_id, frame.incarnation, entry.ordinal, entry.slot, entry.generation, entry.hash
            )
        except TransferError as error:
            return error
        if self._tickets.get(frame.ticket_id) is None:
            self._tickets[frame.ticket_id] = self._receiver.clock()
        return grant

    def _copy(self, link: IncomingLink, frame: Blocks, grants: Sequence[WriteGrant | TransferError]) -> list[bool]:
        """Of which grants the slot holds what was sent. Raises what ended the stream."""
        pool = self._receiver.kv
        slots = [pool.block(grant.slot) if isinstance(grant, WriteGrant) else None for grant in grants]
        digests = iter(link.intake.receive_into(frame, slots))
        return [
            slot is not None and next(digests) == entry.digest for slot, entry in zip(slots, frame.entries, strict=True)
        ]

    def _end_writes(
        self, frame: Blocks, grants: Sequence[WriteGrant | TransferError], intact: Sequence[bool]
    ) -> list[WriteOutcome | TransferError]:
        outcomes: list[WriteOutcome | TransferError] = []
        for grant, ok in zip(grants, intact, strict=True):
            if isinstance(grant, TransferError):
                outcomes.append(grant)
                continue
            outcome = self._table.end_write(grant, ok)
            if outcome is WriteOutcome.LATE:
                self._counters.add("blocks_late")
                self._listener.writes_quiet(frame.ticket_id, [grant.slot])
            outcomes.append(outcome)
        return outcomes

    def _account(self, link: IncomingLink, ticket_id: str, adopted: int) -> None:
        since, transport = self._tickets[ticket_id], link.intake.transport
        assert since is not None, "adopted a block that did not begin"
        num_bytes = adopted * self._receiver.kv.layout.block_bytes
        self._counters.add_all(transport, {"blocks_adopted": adopted, "bytes_adopted": num_bytes})
        self._receiver.note_adoption(ticket_id, since, adopted, num_bytes, transport)

    def _answer(
        self,
        link: IncomingLink,
        frame: Blocks | Lend,
        entry: BlockEntry | LoanEntry,
        outcome: WriteOutcome | TransferError,
    ) -> None:
        match outcome:
            case WriteOutcome.ADOPTED:
                length, transport = self._receiver.kv.layout.block_bytes, link.intake.transport
                self._listener.block_adopted(frame.ticket_id, entry.ordinal, length, transport)
                self._acks.setdefault(frame.ticket_id, []).append(entry.ordinal)
            case DuplicateBlock():
                self._counters.add("blocks_duplicate")
                self._acks.setdefault(frame.ticket_id, []).append(entry.ordinal)
            case WriteOutcome.REFUSED:
                self._refuse(link, frame, entry, DigestMismatch(f"block {entry.ordinal} is not what was sent"))
            case WriteOutcome.LATE:
                self._refuse(link, frame, entry, StaleTicket(f"ticket {frame.ticket_id} ended during the write"))
            case TransferError() as error:
                self._refuse(link, frame, entry, error)

    def _refuse(
        self, link: IncomingLink, frame: Blocks | Lend, entry: BlockEntry | LoanEntry, error: TransferError
    ) -> None:
        self._counters.add("blocks_refused", type(error).__name__)
        self._nack(link, frame.ticket_id, entry.ordinal, error)
        self._tickets.pop(frame.ticket_id, None)
        if self._table.progress(frame.ticket_id) is not None:
            self._listener.block_refused(frame.ticket_id, entry.ordinal, error)

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

    def _unsent_acks(self) -> int:
        return sum(map(len, self._acks.values()))

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
        self._connection.close()
        lost = [ticket_id for ticket_id in self._tickets if self._table.missing(ticket_id)]
        if lost:
            self._listener.link_lost(lost, error)
        self._receiver.link_ended(self)
