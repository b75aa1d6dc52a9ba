"""Owns the transfers that are under way on one link, seen from the sender: what to send next, and how each one ends.

Decides only. `kv_transfer.sender` does what it says, tells it what came of that, and holds the lock around every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile

import numpy as np

from engine.errors import (
    DeadlineExceeded,
    EngineError,
    InternalError,
    LinkClosed,
    RequestCancelled,
    SlotMismatch,
)
from kv_transfer.block_records import Claims
from kv_transfer.frames import (
    MAX_GROUP_BLOCKS,
    MAX_LENT_BLOCKS,
    MAX_RENEWED_TICKETS,
    Abort,
    Copies,
    Finish,
    Frame,
    Lend,
    Renew,
)
from kv_transfer.identity import ADOPT
from kv_transfer.in_flight import InFlight
from kv_transfer.link import LinkSettings
from kv_transfer.loans import OutgoingLoans
from kv_transfer.outgoing import (
    BlockColumns,
    Outcome,
    OutgoingBlock,
    SendBlocks,
    SendColumns,
    Sent,
    Step,
    TicketInfo,
    Transfer,
    copies,
    lend,
    loans,
)
from kv_transfer.source_digests import SourceDigests
from kv_transfer.stats import TransferStats

_GROUP_BYTES = 16 * 1024 * 1024
"""At most: enough to hide what a group costs (0.1 ms at the receiver, whose caches the copy before it has emptied)."""
_FIRST_GROUP_BYTES = 1024 * 1024
"""While nothing is in flight: the receiver has nothing to do until the first group was prepared."""


class OutgoingTransfers:
    """Every open transfer is in exactly one state: open, or ended and (once no block of it is in hand) an `Outcome`.

    Blocks leave in groups, as many of a request as are there: nobody waits for a group to fill. A group has at most
    `_GROUP_BYTES`, a quarter of the budget, and twice what is in flight: the receiver copies that while the next one is
    prepared. Requests that have any take turns, while the unacknowledged bytes fit the budget.
    """

    def __init__(self, block_bytes: int, settings: LinkSettings, digests: SourceDigests | None = None) -> None:
        """`digests`: that are known. Those blocks can leave without being read."""
        self._digests = digests
        self._block_bytes = block_bytes
        self._settings = settings
        largest = min(_GROUP_BYTES, settings.max_unacked_bytes // 4)
        self.group_blocks = max(1, min(MAX_GROUP_BLOCKS, largest // block_bytes))
        """At most in one `SendBlocks`."""
        self._first_group_blocks = max(1, min(self.group_blocks, _FIRST_GROUP_BYTES // block_bytes))
        self.transport = ""
        self.columns = False
        """`Copies` may be sent."""
        self.loans = OutgoingLoans(settings.ask_loans_s, settings.loan_lease_s)
        self._by_request: dict[str, Transfer] = {}
        self._by_ticket: dict[str, Transfer] = {}
        self._turn: deque[Transfer] = deque()
        self._control: deque[Frame] = deque()
        self._in_flight = InFlight[Sent]()
        self._looked_at: tuple[BlockColumns | None, int] = (None, 0)
        self._renew_at: float | None = None
        self._next_deadline: float | None = None
        self._outcomes: deque[Outcome] = deque()

    def __len__(self) -> int:
        return len(self._by_request)

    def open(self, request_id: str, ticket: TicketInfo, deadline: float, now: float) -> None:
        """Raises `InternalError` if the request or the ticket is open already; nothing changes then."""
        if request_id in self._by_request or ticket.ticket_id in self._by_ticket:
            raise InternalError(f"request {request_id}, ticket {ticket.ticket_id} has an open transfer already")
        ordinals = set(ticket.blocks)
        transfer = Transfer(request_id, ticket, deadline, ordinals, set(ordinals), Claims(ticket.blocks))
        self._by_request[request_id] = self._by_ticket[ticket.ticket_id] = transfer
        self._control.append(Renew(ticket_ids=(ticket.ticket_id,)))
        self._renew_at = _earlier(self._renew_at, now + ticket.lease_s / 3)
        self._next_deadline = _earlier(self._next_deadline, deadline)

    def send(self, request_id: str, blocks: Iterable[OutgoingBlock | BlockColumns]) -> None:
        """Queue what the ticket asks for and has not been given; the rest, and all for an ended request, is ignored.
        What may be lent is, if the link can; else it is sent."""
        transfer = self._by_request.get(request_id)
        idle = transfer is not None and not transfer.queued
        for block in blocks:
            if isinstance(block, BlockColumns):
                self._queue_columns(transfer, request_id, block)
            elif transfer is not None and transfer.error is None and block.ordinal in transfer.unsent:
                transfer.unsent.remove(block.ordinal)
                transfer.queued.append(block)
        if transfer is not None and idle and transfer.queued:
            self._turn.append(transfer)

    def _queue_columns(self, transfer: Transfer | None, request_id: str, blocks: BlockColumns) -> None:
        if transfer is None or transfer.error is not None:
            self.loans.refuse(request_id, len(blocks) * blocks.lendable)
            return
        ordinals: list[int] = blocks.ordinals.tolist()
        if not transfer.unsent.issuperset(ordinals):
            kept = np.array([ordinal in transfer.unsent for ordinal in ordinals])
            self.loans.refuse(request_id, (len(ordinals) - int(kept.sum())) * blocks.lendable)
            blocks = blocks.only(kept)
            ordinals = blocks.ordinals.tolist()
        if ordinals:
            transfer.unsent.difference_update(ordinals)
            if blocks.lendable:
                self.loans.hold(transfer.ticket.ticket_id, request_id, ordinals)
            transfer.queued.append(blocks)

    def finish(self, request_id: str) -> None:
        """No more blocks will come. A transfer that still lacks one fails with `SlotMismatch`."""
        transfer = self._by_request.get(request_id)
        if transfer is None or transfer.error is not None or transfer.finished:
            return
        transfer.finished = True
        if transfer.unsent:
            self._abort(transfer, SlotMismatch(f"finished without blocks {sorted(transfer.unsent)[:8]} of the ticket"))
            return
        self._conclude(transfer)

    def abort(self, request_id: str) -> None:
        transfer = self._by_request.get(request_id)
        if transfer is not None:
            self._abort(transfer, RequestCancelled("the transfer was aborted"))

    def next_step(self, now: float) -> Step | None:
        """What to send now, or None: then wait until something happens, or `next_wake`.

        Raises `LinkClosed` if the receiver has not answered the block that is due for too long.
        """
        if self._in_flight and now >= self._in_flight.progress_at + self._settings.progress_timeout_s:
            raise LinkClosed(f"the block that is due was not answered for {self._settings.progress_timeout_s:g} s")
        self._end_overdue(now)
        self._renew(now)
        if self._control:
            return self._control.popleft()
        if (question := self.loans.next_question(now)) is not None:
            return question
        if not self._turn:
            return None
        head = self._turn[0].queued[0]
        if isinstance(head, BlockColumns) and self._lends(head):
            return self._take_columns(MAX_LENT_BLOCKS, now)
        room = self._settings.max_unacked_bytes // self._block_bytes - len(self._in_flight)
        if self._in_flight and room < 1:
            return None
        if isinstance(head, BlockColumns) and (known := self._num_known(head)):
            return self._take_columns(min(known, self.group_blocks, max(1, room)), now)
        return self._take_group(max(1, room), now)

    def is_light(self) -> bool:
        """Whether `next_step` gives nothing that must be read first: frames alone, and blocks whose digest is known."""
        if self._control or not self._turn:
            return True
        head = self._turn[0].queued[0]
        if isinstance(head, BlockColumns):
            return self._lends(head) or self._num_known(head) > 0
        return self._is_known(head)

    def _lends(self, blocks: BlockColumns) -> bool:
        return blocks.lendable and self.transport == ADOPT

    def _num_known(self, blocks: BlockColumns) -> int:
        """Of the first of these, that can leave as columns. Asked twice of the same, it looks once: what is known
        stays known while they wait."""
        if self._looked_at[0] is not blocks or not self._looked_at[1]:
            known = self._digests.num_kept(blocks) if self.columns and self._digests is not None else 0
            self._looked_at = blocks, known
        return self._looked_at[1]

    def _is_known(self, block: OutgoingBlock) -> bool:
        return self._digests is not None and self._digests.is_kept(block)

    def _most(self, queued: Sequence[OutgoingBlock]) -> int:
        """Blocks of the next group. Where there is nothing to prepare, nobody waits for a large one."""
        known = sum(1 for _ in takewhile(self._is_known, queued))
        return known or min(self.group_blocks, max(self._first_group_blocks, 2 * len(self._in_flight)))

    def _take_columns(self, most: int, now: float) -> SendColumns:
        transfer = self._turn.popleft()
        ticket, head = transfer.ticket, transfer.queued.popleft()
        assert isinstance(head, BlockColumns)
        blocks, rest = head.parted(most) if len(head) > most else (head, None)
        if rest is not None:
            transfer.queued.appendleft(rest)
        ordinals = blocks.ordinals.tolist()
        self._leave(transfer, dict.fromkeys(ordinals, blocks), now)
        frame: Lend | Copies
        if self._lends(blocks):
            records = loans(transfer.claims, blocks)
            frame = lend(ticket.ticket_id, ticket.incarnation, records)
        else:
            assert self._digests is not None, "they are known"
            self._drop_loans(transfer, blocks)
            records = copies(transfer.claims, blocks, self._digests.of(blocks))
            length = self._block_bytes
            frame = Copies(ticket_id=ticket.ticket_id, incarnation=ticket.incarnation, records=records, length=length)
        return SendColumns(transfer.request_id, frame)

    def _drop_loans(self, transfer: Transfer, blocks: BlockColumns) -> None:
        """They are sent, or not at all."""
        if blocks.lendable:
            self.loans.drop(transfer.ticket.ticket_id, blocks.ordinals.tolist())

    def _take_group(self, room: int, now: float) -> SendBlocks:
        """The first blocks of who is next."""
        transfer = self._turn.popleft()
        ticket, queued = transfer.ticket, transfer.queued
        if isinstance(queued[0], BlockColumns):
            head = queued.popleft()
            assert isinstance(head, BlockColumns)
            self._drop_loans(transfer, head)
            queued.extendleft(reversed(head.singly()))
        ready = list(_copied(islice(queued, self.group_blocks)))
        group = tuple(ready[: min(self._most(ready), room)])
        for _ in group:
            queued.popleft()
        self._leave(transfer, {block.ordinal: block for block in group}, now)
        transfer.writing = True
        places = tuple(ticket.blocks[block.ordinal] for block in group)
        return SendBlocks(transfer.request_id, ticket.ticket_id, ticket.incarnation, group, places)

    def _leave(self, transfer: Transfer, blocks: dict[int, Sent], now: float) -> None:
        """They are sent now."""
        if transfer.queued:
            self._turn.append(transfer)
        self._in_flight.add(transfer.ticket.ticket_id, blocks, now)
        if transfer.first_sent is None:
            transfer.first_sent = now

    def sent(self, step: SendBlocks | SendColumns) -> None:
        """The writer is done with `step`. Of columns no source was read, so their transfer may be over by now."""
        if isinstance(step, SendColumns) and step.request_id not in self._by_request:
            return
        transfer = self._by_request[step.request_id]
        if isinstance(step, SendBlocks):
            transfer.writing = False
        if transfer.error is None:
            self._conclude(transfer)
        elif not transfer.writing:
            self._settle(transfer)

    def next_wake(self) -> float | None:
        wake = _earlier(_earlier(self._renew_at, self._next_deadline), self.loans.next_wake())
        if self._in_flight:
            wake = _earlier(wake, self._in_flight.progress_at + self._settings.progress_timeout_s)
        return wake

    def acked(self, ticket_id: str, ordinals: Sequence[int], now: float) -> int:
        """Returns how many of the acknowledgements were of something that is over."""
        transfer = self._by_ticket.get(ticket_id)
        answered = self._in_flight.answered(ticket_id, ordinals, now)
        self.loans.acked(ticket_id, answered, now)
        if transfer is not None and answered:
            transfer.unacked -= answered
            transfer.last_acked = now
            if transfer.error is None:
                self._conclude(transfer)
        return len(ordinals) - len(answered)

    def nacked(self, ticket_id: str, ordinal: int | None, error: EngineError, now: float) -> bool:
        """A block, or (None) the ticket, was refused. Returns whether that still mattered."""
        if ordinal is not None:
            if not self._in_flight.answered(ticket_id, (ordinal,), now):
                return False
            self.loans.drop(ticket_id, (ordinal,))
        transfer = self._by_ticket.get(ticket_id)
        # A renewal may cross the last acknowledgement: the receiver closes a complete ticket when it likes.
        if transfer is None or transfer.error is not None or not transfer.unacked:
            return False
        self._fail(transfer, error)
        return True

    def sent_block(self, ticket_id: str, ordinal: int | None) -> OutgoingBlock | None:
        """That is in flight under this number."""
        sent = None if ordinal is None else self._in_flight.get(ticket_id, ordinal)
        if isinstance(sent, BlockColumns):
            return next(block for block in sent.singly() if block.ordinal == ordinal)
        return sent

    def fail_all(self, error: EngineError) -> None:
        """The link is over, and nobody has a block in hand any more."""
        for transfer in list(self._by_request.values()):
            transfer.writing = False
            self._fail(transfer, error)
        self.loans.end_all()
        self._control.clear()
        self._in_flight.clear()

    def has_outcomes(self) -> bool:
        """Or blocks that were lent and go back to the engine."""
        return bool(self._outcomes) or self.loans.has_over()

    def take_outcome(self) -> Outcome | None:
        """A transfer that ended; each exactly once."""
        return self._outcomes.popleft() if self._outcomes else None

    def _abort(self, transfer: Transfer, error: EngineError) -> None:
        if transfer.error is None:
            self._control.append(Abort(ticket_id=transfer.ticket.ticket_id))
            self._fail(transfer, error)

    def _fail(self, transfer: Transfer, error: EngineError) -> None:
        if transfer.error is None:
            transfer.error = error
        if transfer.queued:
            for blocks in transfer.queued:
                if isinstance(blocks, BlockColumns):
                    self._drop_loans(transfer, blocks)
            transfer.queued.clear()
            self._turn.remove(transfer)
        if not transfer.writing:
            self._settle(transfer)

    def _conclude(self, transfer: Transfer) -> None:
        """Send FINISH when the last block has left, and end the transfer when the last is acknowledged."""
        if not transfer.finished or transfer.queued or transfer.writing:
            return
        if not transfer.finish_queued:
            transfer.finish_queued = True
            self._control.append(Finish(ticket_id=transfer.ticket.ticket_id, count=len(transfer.ticket.blocks)))
        if not transfer.unacked:
            self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        del self._by_request[transfer.request_id]
        del self._by_ticket[transfer.ticket.ticket_id]
        blocks = len(transfer.ticket.blocks) - len(transfer.unacked)
        seconds = 0.0
        if transfer.first_sent is not None and transfer.last_acked is not None:
            seconds = transfer.last_acked - transfer.first_sent
        stats = TransferStats(
            blocks=blocks, bytes=blocks * self._block_bytes, transport=self.transport, seconds=seconds
        )
        self._outcomes.append(Outcome(transfer.request_id, transfer.error, stats))

    def _end_overdue(self, now: float) -> None:
        if self._next_deadline is None or now < self._next_deadline:
            return
        for transfer in list(self._by_request.values()):
            if transfer.deadline <= now:
                self._abort(transfer, DeadlineExceeded("the deadline passed during the transfer"))
        deadlines = [transfer.deadline for transfer in self._by_request.values() if transfer.error is None]
        self._next_deadline = min(deadlines, default=None)

    def _renew(self, now: float) -> None:
        if self._renew_at is None or now < self._renew_at:
            return
        # What is acknowledged to the last block needs no lease any more.
        waiting = [t.ticket for t in self._by_request.values() if t.error is None and t.unacked]
        ids = [ticket.ticket_id for ticket in waiting]
        for start in range(0, len(ids), MAX_RENEWED_TICKETS):
            self._control.append(Renew(ticket_ids=tuple(ids[start : start + MAX_RENEWED_TICKETS])))
        self._renew_at = now + min(ticket.lease_s for ticket in waiting) / 3 if waiting else None


def _copied(queued: Iterable[OutgoingBlock | BlockColumns]) -> Iterator[OutgoingBlock]:
    """The first of these, as far as they are not lent."""
    for block in queued:
        if isinstance(block, BlockColumns):
            return
        yield block


def _earlier(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
