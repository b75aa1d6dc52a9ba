"""Owns what may be written into a decode worker's pool: tickets, their blocks' states, leases. Does no I/O.

A block of a ticket:

    EXPECTED --begin_write--> WRITING --end_write(ok)--> ADOPTED
        ^                        |
        +----end_write(not ok)---+

A ticket ends exactly once, by `close` or by `expire`. Blocks that are WRITING at that moment stay granted, and their
slots busy, until `end_write`, which then adopts nothing.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from engine.errors import InternalError, SlotMismatch, StaleTicket, TransferError
from kv_transfer.block_records import Records
from kv_transfer.frames import BlockEntry
from kv_transfer.ticket_state import (
    DuplicateBlock,
    ExpectedBlock,
    ReservationStats,
    Ticket,
    TicketProgress,
    WriteGrant,
    WriteOutcome,
)

__all__ = [
    "DuplicateBlock",
    "ExpectedBlock",
    "ReservationStats",
    "ReservationTable",
    "TicketProgress",
    "WriteGrant",
    "WriteOutcome",
]

MAX_LEASE_S = 5.0
_LENT = ["ordinal", "slot", "generation", "source", "hash"]


class ReservationTable:
    """Tickets of one decode worker. Every method may be called from any thread, and none waits.

    Invariants, checked by `check_integrity`:
      1. A block is WRITING if and only if exactly one grant on it is open.
      2. A slot belongs to at most one ticket: an open one that still expects its block, or one that has a grant on
         it. A slot is not offered again (`open` refuses it) before it is quiet. That of an adopted block is: it is
         the engine's, who may have given it to another request while the ticket waits for its other blocks.
      3. opened = closed + expired + open.
      4. Every open ticket that misses a block has exactly one entry in the lease heap, not later than its lease.

    A complete ticket has no lease: its blocks are the request's, and wait for nobody. It stays open until `close`,
    so that duplicates are told from strangers.
    """

    def __init__(self, incarnation: str, lease_s: float = MAX_LEASE_S) -> None:
        """`lease_s` is what a renewal grants, at most 5 s."""
        if not 0 < lease_s <= MAX_LEASE_S:
            raise InternalError(f"lease_s must be in (0, {MAX_LEASE_S}], got {lease_s}")
        self.incarnation = incarnation
        self.lease_s = lease_s
        self._lock = threading.Lock()
        self._open: dict[str, Ticket] = {}
        self._ending: dict[str, Ticket] = {}
        self._claimed: dict[int, str] = {}
        self._grants: dict[int, tuple[Ticket, WriteGrant]] = {}
        self._leases: list[tuple[float, int, Ticket]] = []
        self._serial = count()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def open(self, ticket_id: str, blocks: Sequence[ExpectedBlock], lease_until: float) -> None:
        """Expect `blocks` until `lease_until` (monotonic), or later if renewed.

        All or nothing: on an error the table is unchanged. Raises `StaleTicket` if the id is in use and
        `SlotMismatch` if a slot or an ordinal is named twice, or a slot is another ticket's or not yet quiet.
        """
        slots = {block.slot for block in blocks}
        if len({block.ordinal for block in blocks}) != len(blocks) or len(slots) != len(blocks):
            raise SlotMismatch(f"ticket {ticket_id} names a slot or an ordinal twice")
        with self._lock:
            if ticket_id in self._open or ticket_id in self._ending:
                raise StaleTicket(f"ticket {ticket_id} is in use")
            for slot in slots:
                if slot in self._claimed:
                    raise SlotMismatch(f"slot {slot} is not quiet: it belongs to ticket {self._claimed[slot]}")
            ticket = Ticket(ticket_id, blocks, lease_until)
            self._open[ticket_id] = ticket
            self._claimed.update(dict.fromkeys(slots, ticket_id))
            self._counts["opened"] += 1
            if not ticket.complete:
                heapq.heappush(self._leases, (lease_until, next(self._serial), ticket))

    def begin_write(
        self, ticket_id: str, incarnation: str, entries: Sequence[BlockEntry]
    ) -> tuple[WriteGrant, Mapping[int, TransferError]]:
        """Leave to write the slots of some blocks; they are busy until `end_write`.

        Those that may not be written are not in the grant, and here by their place in `entries`: with `StaleTicket`
        (unknown, over, or of another incarnation), `SlotMismatch` (not this ordinal, slot or generation, or somebody
        is writing it), `HashMismatch`, or `DuplicateBlock` (adopted).
        """
        refused: dict[int, TransferError] = {}
        granted: list[BlockEntry] = []
        with self._lock:
            ticket: Ticket | None = None
            for place, entry in enumerate(entries):
                try:
                    ticket = ticket or self._find(ticket_id, incarnation)
                    ticket.check(entry.ordinal, entry.slot, entry.generation, entry.hash)
                except TransferError as error:
                    refused[place] = self._refuse(error)
                else:
                    ticket.expected.remove(entry.ordinal)
                    ticket.writing.add(entry.ordinal)
                    granted.append(entry)
            ordinals, slots = tuple(entry.ordinal for entry in granted), tuple(entry.slot for entry in granted)
            grant = WriteGrant(next(self._serial), ticket_id, ordinals, slots)
            if ticket is not None and granted:
                self._grants[grant.serial] = (ticket, grant)
        return grant, refused

    def begin_all(self, ticket_id: str, incarnation: str, records: Records) -> WriteGrant | None:
        """The same for `COPY` records, if all may be written; else None, and nothing has changed."""
        with self._lock:
            ticket = self._open.get(ticket_id)
            ordinals = None if ticket is None or incarnation != self.incarnation else ticket.expects_all(records)
            if ticket is None or ordinals is None:
                return None
            slots = tuple(records["slot"].tolist())
            ticket.expected.difference_update(ordinals)
            ticket.writing.update(ordinals)
            grant = WriteGrant(next(self._serial), ticket_id, tuple(ordinals), slots)
            self._grants[grant.serial] = (ticket, grant)
            return grant

    def end_write(self, grant: WriteGrant, intact: Sequence[bool]) -> list[WriteOutcome]:
        """Give a grant back. `intact`: which of its slots hold exactly the bytes that were sent.

        Where it is `LATE` the caller must report the slot as quiet. Raises `InternalError` if the grant was given back
        before.
        """
        if not grant.ordinals:
            return []
        with self._lock:
            ticket, _ = self._grants.pop(grant.serial, (None, None))
            if ticket is None:
                raise InternalError(f"grant {grant.serial} on slots {grant.slots} is not open")
            ticket.writing.difference_update(grant.ordinals)
            ticket.expected.update(grant.ordinals)
            if ticket.over:
                self._quiet(ticket, grant.slots)
                return [WriteOutcome.LATE] * len(grant.slots)
            if all(intact):
                self._adopt(ticket, grant.ordinals, grant.slots)
                return [WriteOutcome.ADOPTED] * len(grant.slots)
            for ordinal, slot, ok in zip(grant.ordinals, grant.slots, intact, strict=True):
                if ok:
                    self._adopt(ticket, (ordinal,), (slot,))
                else:
                    self._refused["DigestMismatch"] += 1
            return [WriteOutcome.ADOPTED if ok else WriteOutcome.REFUSED for ok in intact]

    def adopt_lent(
        self, ticket_id: str, incarnation: str, records: Records, lent: npt.NDArray[np.bool_]
    ) -> Mapping[int, TransferError]:
        """Adopt blocks that can be read where they are, or say why not, by their places. `lent`: which of them are
        there still. Not lent are the last of a ticket, as its request writes into it, and one block twice."""
        refused: dict[int, TransferError] = {}
        with self._lock:
            ticket = self._open.get(ticket_id)
            all_of = None if ticket is None or incarnation != self.incarnation else ticket.borrows_all(records, lent)
            if ticket is not None and all_of is not None:
                self._adopt(ticket, all_of, records["slot"].tolist(), records["source"].tolist())
                return refused
            for place, (record, holds) in enumerate(zip(records[_LENT].tolist(), lent.tolist(), strict=True)):
                ordinal, slot, generation, source, content_hash = record
                try:
                    ticket = self._find(ticket_id, incarnation)
                    ticket.check(ordinal, slot, generation, content_hash)
                    ticket.check_lent(ordinal, source, holds)
                except TransferError as error:
                    refused[place] = self._refuse(error)
                else:
                    self._adopt(ticket, (ordinal,), (slot,), (source,))
        return refused

    def renew(self, ticket_id: str, now: float) -> None:
        """Extend a lease to `now` + `lease_s`. Raises `StaleTicket` if the ticket is unknown or over."""
        with self._lock:
            ticket = self._find(ticket_id, self.incarnation)
            ticket.lease_until = max(ticket.lease_until, now + self.lease_s)

    def close(self, ticket_id: str) -> frozenset[int]:
        """End a ticket. Returns the slots that are still being written: they must not be reused yet.

        Idempotent; also the question to ask after `expire`. The link thread reports each returned slot by
        `writes_quiet`, perhaps before this call has returned: let both end up, in this order, on one thread.
        """
        with self._lock:
            ticket = self._open.get(ticket_id)
            if ticket is not None:
                self._end(ticket, "closed")
            ending = self._ending.get(ticket_id)
            return ending.slots(ending.writing) if ending is not None else frozenset()

    def expire(self, now: float) -> list[str]:
        """End the tickets that miss blocks and whose lease ran out by `now`, and return their ids."""
        expired = []
        with self._lock:
            while (until := self._earliest_lease()) is not None and until <= now:
                ticket = heapq.heappop(self._leases)[2]
                self._end(ticket, "expired")
                expired.append(ticket.ticket_id)
        return expired

    def next_expiry(self) -> float | None:
        """When to call `expire` next, if nothing is renewed until then."""
        with self._lock:
            return self._earliest_lease()

    def progress(self, ticket_id: str) -> TicketProgress | None:
        """Of an open ticket."""
        with self._lock:
            ticket = self._open.get(ticket_id)
            if ticket is None:
                return None
            return TicketProgress(len(ticket.blocks), ticket.adopted, len(ticket.writing))

    def missing(self, ticket_id: str) -> tuple[int, ...]:
        """Ordinals of an open ticket that are not adopted, ascending; empty if the ticket is not open."""
        with self._lock:
            ticket = self._open.get(ticket_id)
            if ticket is None:
                return ()
            return tuple(sorted(ticket.expected | ticket.writing))

    def stats(self) -> ReservationStats:
        with self._lock:
            return ReservationStats(
                open=len(self._open),
                ending=len(self._ending),
                refused=MappingProxyType(dict(self._refused)),
                **{
                    name: self._counts[name] for name in ("opened", "closed", "expired", "adopted", "duplicate", "late")
                },
            )

    def check_integrity(self) -> None:
        with self._lock:
            tickets = [*self._open.values(), *self._ending.values()]
            granted = Counter(
                (ticket.ticket_id, ordinal) for ticket, grant in self._grants.values() for ordinal in grant.ordinals
            )
            writing = Counter((ticket.ticket_id, ordinal) for ticket in tickets for ordinal in ticket.writing)
            assert granted == writing, f"grants {granted} are not the blocks being written {writing}"
            assert all(n == 1 for n in granted.values()), "two grants on one block"
            claimed = [
                (slot, ticket.ticket_id)
                for ticket in tickets
                for slot in (ticket.slots(ticket.writing) if ticket.over else ticket.unadopted())
            ]
            assert len(dict(claimed)) == len(claimed), "a slot belongs to two tickets"
            assert dict(claimed) == self._claimed, "claimed slots are not those of the tickets"
            assert all(ticket.over and ticket.writing for ticket in self._ending.values()), "a quiet ticket lingers"
            assert not any(ticket.over for ticket in self._open.values())
            ended = self._counts["closed"] + self._counts["expired"]
            assert self._counts["opened"] == ended + len(self._open), "a ticket ended twice, or never"
            entries = Counter(id(ticket) for _, _, ticket in self._leases)
            for ticket in self._open.values():
                assert entries[id(ticket)] == 1 or ticket.complete, f"ticket {ticket.ticket_id} has no armed lease"
                assert ticket.expected.isdisjoint(ticket.writing)
                assert ticket.expected | ticket.writing <= ticket.blocks.keys()
            assert all(until <= ticket.lease_until for until, _, ticket in self._leases)

    def _find(self, ticket_id: str, incarnation: str) -> Ticket:
        ticket = self._open.get(ticket_id)
        if ticket is None:
            raise StaleTicket(f"ticket {ticket_id} is unknown or over")
        if incarnation != self.incarnation:
            raise StaleTicket(f"ticket {ticket_id} is named with incarnation {incarnation}, this is {self.incarnation}")
        return ticket

    def _refuse(self, error: TransferError) -> TransferError:
        if isinstance(error, DuplicateBlock):
            self._counts["duplicate"] += 1
        else:
            self._refused[type(error).__name__] += 1
        return error

    def _adopt(
        self, ticket: Ticket, ordinals: Sequence[int], slots: Sequence[int], sources: Sequence[int] = ()
    ) -> None:
        ticket.adopt(ordinals, sources)
        for slot in slots:
            del self._claimed[slot]
        self._counts["adopted"] += len(slots)

    def _quiet(self, ticket: Ticket, slots: Sequence[int]) -> None:
        """Nobody writes any more into these slots of a ticket that is over."""
        self._counts["late"] += len(slots)
        for slot in slots:
            del self._claimed[slot]
        if not ticket.writing:
            del self._ending[ticket.ticket_id]

    def _end(self, ticket: Ticket, how: str) -> None:
        ticket.over = True
        del self._open[ticket.ticket_id]
        self._counts[how] += 1
        for slot in ticket.slots(ticket.expected):
            del self._claimed[slot]
        if ticket.writing:
            self._ending[ticket.ticket_id] = ticket

    def _earliest_lease(self) -> float | None:
        # Renewing and ending leave the heap alone; what they made of its first entry is settled here.
        while self._leases:
            until, _, ticket = self._leases[0]
            if ticket.over or ticket.complete:
                heapq.heappop(self._leases)
            elif ticket.lease_until > until:
                heapq.heapreplace(self._leases, (ticket.lease_until, next(self._serial), ticket))
            else:
                return until
        return None
