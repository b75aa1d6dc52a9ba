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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from engine.errors import HashMismatch, InternalError, SlotMismatch, StaleTicket, TransferError
from kv_transfer.loan_records import LoanEntry

MAX_LEASE_S = 5.0


class DuplicateBlock(TransferError):
    """The block is adopted already. Nothing to do; the sender may be told so again."""


class BlockState(Enum):
    EXPECTED = auto()
    WRITING = auto()
    ADOPTED = auto()


class WriteOutcome(Enum):
    ADOPTED = auto()
    REFUSED = auto()
    """The bytes were not right. The slot is quiet and the block expected again."""
    LATE = auto()
    """The ticket had ended. Nothing was adopted, and from now on the slot is quiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBlock:
    ordinal: int
    """Position in the prompt's block chain."""
    slot: int
    generation: int
    """Of the slot."""
    hash: bytes
    """Chained content hash, 32 bytes."""


class WriteGrant(NamedTuple):
    """Leave to write one slot, until `end_write`. Its holder must call that, whatever happens."""

    serial: int
    ticket_id: str
    ordinal: int
    slot: int


@dataclass(frozen=True, slots=True)
class TicketProgress:
    total: int
    adopted: int
    writing: int

    @property
    def complete(self) -> bool:
        return self.adopted == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationStats:
    open: int
    """Tickets now."""
    ending: int
    """Tickets that are over, but have a slot that is still being written."""
    opened: int
    closed: int
    expired: int
    adopted: int
    """Blocks."""
    duplicate: int
    late: int
    """Writes that ended after their ticket."""
    refused: Mapping[str, int]
    """Blocks, by class of error."""


@dataclass(slots=True)
class _Ticket:
    ticket_id: str
    blocks: dict[int, ExpectedBlock]
    states: dict[int, BlockState]
    lease_until: float
    last: int
    """Ordinal of the last block."""
    adopted: int = 0
    over: bool = False
    sources: set[int] = field(default_factory=set)
    """Blocks of the sender that were lent for it."""

    @property
    def complete(self) -> bool:
        return self.adopted == len(self.blocks)

    def writing(self) -> frozenset[int]:
        """Slots, not ordinals."""
        return self._slots(lambda state: state is BlockState.WRITING)

    def unadopted(self) -> frozenset[int]:
        """Slots of the blocks that are still to come, or coming."""
        return self._slots(lambda state: state is not BlockState.ADOPTED)

    def _slots(self, wanted: Callable[[BlockState], bool]) -> frozenset[int]:
        return frozenset(self.blocks[ordinal].slot for ordinal, state in self.states.items() if wanted(state))


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
        self._open: dict[str, _Ticket] = {}
        self._ending: dict[str, _Ticket] = {}
        self._claimed: dict[int, str] = {}
        self._grants: dict[int, tuple[_Ticket, WriteGrant]] = {}
        self._leases: list[tuple[float, int, _Ticket]] = []
        self._serial = count()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def open(self, ticket_id: str, blocks: Sequence[ExpectedBlock], lease_until: float) -> None:
        """Expect `blocks` until `lease_until` (monotonic), or later if renewed.

        All or nothing: on an error the table is unchanged. Raises `StaleTicket` if the id is in use and
        `SlotMismatch` if a slot or an ordinal is named twice, or a slot is another ticket's or not yet quiet.
        """
        expected = {block.ordinal: block for block in blocks}
        slots = {block.slot for block in blocks}
        if len(expected) != len(blocks) or len(slots) != len(blocks):
            raise SlotMismatch(f"ticket {ticket_id} names a slot or an ordinal twice")
        with self._lock:
            if ticket_id in self._open or ticket_id in self._ending:
                raise StaleTicket(f"ticket {ticket_id} is in use")
            for slot in slots:
                if slot in self._claimed:
                    raise SlotMismatch(f"slot {slot} is not quiet: it belongs to ticket {self._claimed[slot]}")
            states = dict.fromkeys(expected, BlockState.EXPECTED)
            ticket = _Ticket(ticket_id, expected, states, lease_until, max(expected, default=-1))
            self._open[ticket_id] = ticket
            self._claimed.update(dict.fromkeys(slots, ticket_id))
            self._counts["opened"] += 1
            if not ticket.complete:
                heapq.heappush(self._leases, (lease_until, next(self._serial), ticket))

    def begin_write(
        self, ticket_id: str, incarnation: str, ordinal: int, slot: int, generation: int, hash: bytes
    ) -> WriteGrant:
        """Leave to write the slot of a block; the slot is busy until `end_write`.

        Raises `StaleTicket` (unknown, over, or of another incarnation), `SlotMismatch` (not this ordinal, slot or
        generation, or somebody is writing it), `HashMismatch`, `DuplicateBlock` (adopted). Then nothing is granted.
        """
        with self._lock:
            try:
                ticket = self._find(ticket_id, incarnation)
                self._compare(ticket, ordinal, slot, generation, hash)
            except DuplicateBlock:
                self._counts["duplicate"] += 1
                raise
            except TransferError as error:
                self._refused[type(error).__name__] += 1
                raise
            ticket.states[ordinal] = BlockState.WRITING
            grant = WriteGrant(next(self._serial), ticket_id, ordinal, slot)
            self._grants[grant.serial] = (ticket, grant)
            return grant

    def end_write(self, grant: WriteGrant, ok: bool) -> WriteOutcome:
        """Give a grant back. `ok`: the slot holds exactly the bytes that were sent.

        On `LATE` the caller must report the slot as quiet. Raises `InternalError` if the grant was given back before.
        """
        with self._lock:
            ticket, _ = self._grants.pop(grant.serial, (None, None))
            if ticket is None:
                raise InternalError(f"grant {grant.serial} on slot {grant.slot} is not open")
            ticket.states[grant.ordinal] = BlockState.EXPECTED
            if ticket.over:
                self._counts["late"] += 1
                del self._claimed[grant.slot]
                if not ticket.writing():
                    del self._ending[ticket.ticket_id]
                return WriteOutcome.LATE
            if not ok:
                self._refused["DigestMismatch"] += 1
                return WriteOutcome.REFUSED
            self._adopted(ticket, grant.ordinal, grant.slot)
            return WriteOutcome.ADOPTED

    def adopt_lent(
        self, ticket_id: str, incarnation: str, entries: Sequence[LoanEntry], lent: Sequence[bool]
    ) -> list[TransferError | None]:
        """Adopt blocks that can be read where they are, or say why not. `lent`: which of them are there still. Not
        lent are the last of a ticket, as its request writes into it, and one block twice."""
        outcomes: list[TransferError | None] = []
        with self._lock:
            for entry, holds in zip(entries, lent, strict=True):
                try:
                    ticket = self._find(ticket_id, incarnation)
                    self._compare(ticket, entry.ordinal, entry.slot, entry.generation, entry.hash)
                    self._check_lent(ticket, entry, holds)
                except DuplicateBlock as error:
                    self._counts["duplicate"] += 1
                    outcomes.append(error)
                except TransferError as error:
                    self._refused[type(error).__name__] += 1
                    outcomes.append(error)
                else:
                    self._adopted(ticket, entry.ordinal, entry.slot)
                    ticket.sources.add(entry.source)
                    outcomes.append(None)
        return outcomes

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
            return ending.writing() if ending is not None else frozenset()

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
            return TicketProgress(len(ticket.blocks), ticket.adopted, len(ticket.writing()))

    def missing(self, ticket_id: str) -> tuple[int, ...]:
        """Ordinals of an open ticket that are not adopted, ascending; empty if the ticket is not open."""
        with self._lock:
            ticket = self._open.get(ticket_id)
            if ticket is None:
                return ()
            return tuple(sorted(o for o, state in ticket.states.items() if state is not BlockState.ADOPTED))

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
            granted = Counter((ticket.ticket_id, grant.ordinal) for ticket, grant in self._grants.values())
            writing = Counter(
                (ticket.ticket_id, ordinal)
                for ticket in tickets
                for ordinal, state in ticket.states.items()
                if state is BlockState.WRITING
            )
            assert granted == writing, f"grants {granted} are not the blocks being written {writing}"
            assert all(n == 1 for n in granted.values()), "two grants on one block"
            claimed = [
                (slot, ticket.ticket_id)
                for ticket in tickets
                for slot in (ticket.writing() if ticket.over else ticket.unadopted())
            ]
            assert len(dict(claimed)) == len(claimed), "a slot belongs to two tickets"
            assert dict(claimed) == self._claimed, "claimed slots are not those of the tickets"
            assert all(ticket.over and ticket.writing() for ticket in self._ending.values()), "a quiet ticket lingers"
            assert not any(ticket.over for ticket in self._open.values())
            ended = self._counts["closed"] + self._counts["expired"]
            assert self._counts["opened"] == ended + len(self._open), "a ticket ended twice, or never"
            entries = Counter(id(ticket) for _, _, ticket in self._leases)
            for ticket in self._open.values():
                assert entries[id(ticket)] == 1 or ticket.complete, f"ticket {ticket.ticket_id} has no armed lease"
                adopted = sum(state is BlockState.ADOPTED for state in ticket.states.values())
                assert adopted == ticket.adopted
            assert all(until <= ticket.lease_until for until, _, ticket in self._leases)

    def _find(self, ticket_id: str, incarnation: str) -> _Ticket:
        ticket = self._open.get(ticket_id)
        if ticket is None:
            raise StaleTicket(f"ticket {ticket_id} is unknown or over")
        if incarnation != self.incarnation:
            raise StaleTicket(f"ticket {ticket_id} is named with incarnation {incarnation}, this is {self.incarnation}")
        return ticket

    def _compare(self, ticket: _Ticket, ordinal: int, slot: int, generation: int, hash: bytes) -> None:
        expected = ticket.blocks.get(ordinal)
        if expected is None:
            raise SlotMismatch(f"ticket {ticket.ticket_id} does not ask for block {ordinal}")
        if (slot, generation) != (expected.slot, expected.generation):
            raise SlotMismatch(
                f"block {ordinal} of ticket {ticket.ticket_id} does not go to slot {slot} generation {generation}"
            )
        if hash != expected.hash:
            # The message travels to the peer: what is expected stays with us.
            raise HashMismatch(f"block {ordinal} of ticket {ticket.ticket_id} has not hash {hash.hex()}")
        match ticket.states[ordinal]:
            case BlockState.ADOPTED:
                raise DuplicateBlock(f"block {ordinal} of ticket {ticket.ticket_id} is adopted already")
            case BlockState.WRITING:
                raise SlotMismatch(f"block {ordinal} of ticket {ticket.ticket_id} is being written")

    def _check_lent(self, ticket: _Ticket, entry: LoanEntry, holds: bool) -> None:
        if not holds:
            raise SlotMismatch(f"block {entry.ordinal} of ticket {ticket.ticket_id} was reused before it was adopted")
        if entry.ordinal == ticket.last or entry.source in ticket.sources:
            raise SlotMismatch(f"block {entry.ordinal} of ticket {ticket.ticket_id} cannot be lent")

    def _adopted(self, ticket: _Ticket, ordinal: int, slot: int) -> None:
        ticket.states[ordinal] = BlockState.ADOPTED
        ticket.adopted += 1
        del self._claimed[slot]
        self._counts["adopted"] += 1

    def _end(self, ticket: _Ticket, how: str) -> None:
        ticket.over = True
        del self._open[ticket.ticket_id]
        self._counts[how] += 1
        writing = ticket.writing()
        for slot in ticket.unadopted() - writing:
            del self._claimed[slot]
        if writing:
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
