"""What the reservation table grants and when tickets end, in any order of events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from kv_links import block_hash

from engine.errors import HashMismatch, InternalError, SlotMismatch, StaleTicket
from kv_transfer.frames import BlockEntry
from kv_transfer.reservation import (
    DuplicateBlock,
    ExpectedBlock,
    ReservationTable,
    TicketProgress,
    WriteGrant,
    WriteOutcome,
)


def expected(*slots: int, generation: int = 1) -> list[ExpectedBlock]:
    return [
        ExpectedBlock(ordinal=ordinal, slot=slot, generation=generation, hash=block_hash(ordinal))
        for ordinal, slot in enumerate(slots)
    ]


def begin(table: ReservationTable, ticket_id: str, ordinal: int, slot: int, generation: int = 1) -> WriteGrant:
    return begin_as(table, ticket_id, table.incarnation, ordinal, slot, generation, block_hash(ordinal))


def begin_as(
    table: ReservationTable, ticket_id: str, incarnation: str, ordinal: int, slot: int, generation: int, hash: bytes
) -> WriteGrant:
    """One block; raises why not."""
    entry = BlockEntry(ordinal, slot, generation, hash, bytes(16), None)
    grant, refused = table.begin_write(ticket_id, incarnation, [entry])
    assert (len(grant.slots), len(refused)) in ((1, 0), (0, 1))
    for error in refused.values():
        raise error
    return grant


def end(table: ReservationTable, grant: WriteGrant, ok: bool = True) -> WriteOutcome:
    (outcome,) = table.end_write(grant, [ok])
    return outcome


@pytest.fixture
def table() -> Iterator[ReservationTable]:
    table = ReservationTable("inc-1", lease_s=2.0)
    yield table
    table.check_integrity()


def test_a_block_is_adopted_when_its_write_ends_well(table: ReservationTable) -> None:
    table.open("t", expected(10, 11), lease_until=2.0)

    assert end(table, begin(table, "t", 1, 11)) is WriteOutcome.ADOPTED

    assert table.progress("t") == TicketProgress(total=2, adopted=1, writing=0)
    assert table.missing("t") == (0,)


def test_a_block_that_came_damaged_is_expected_again(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)

    assert end(table, begin(table, "t", 0, 10), ok=False) is WriteOutcome.REFUSED

    assert end(table, begin(table, "t", 0, 10)) is WriteOutcome.ADOPTED
    assert table.stats().refused == {"DigestMismatch": 1}


def test_the_slot_of_an_adopted_block_may_be_in_other_hands_before_its_ticket_ends(table: ReservationTable) -> None:
    """The engine gives it back at once where it has found another block with the same content."""
    table.open("t", expected(10, 11), lease_until=2.0)
    end(table, begin(table, "t", 0, 10))
    table.open("u", expected(10, generation=2), lease_until=2.0)
    grant = begin(table, "u", 0, 10, generation=2)

    with pytest.raises(DuplicateBlock):
        begin(table, "t", 0, 10)
    assert table.close("t") == frozenset()
    assert end(table, grant) is WriteOutcome.ADOPTED


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ticket_id": "other"}, StaleTicket),
        ({"incarnation": "inc-0"}, StaleTicket),
        ({"ordinal": 2}, SlotMismatch),
        ({"slot": 11}, SlotMismatch),
        ({"generation": 2}, SlotMismatch),
        ({"hash": block_hash(1)}, HashMismatch),
    ],
)
def test_a_write_that_differs_from_the_ticket_is_refused_and_counted(
    table: ReservationTable, change: dict[str, object], error: type[Exception]
) -> None:
    table.open("t", expected(10, 11), lease_until=2.0)
    right = {
        "ticket_id": "t",
        "incarnation": "inc-1",
        "ordinal": 0,
        "slot": 10,
        "generation": 1,
        "hash": block_hash(0),
    }

    with pytest.raises(error):
        begin_as(table, **(right | change))  # type: ignore[arg-type]

    assert table.stats().refused == {error.__name__: 1}
    assert table.progress("t") == TicketProgress(total=2, adopted=0, writing=0)


def test_a_refusal_does_not_tell_the_peer_the_expected_hash(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)

    with pytest.raises(HashMismatch) as refusal:
        begin_as(table, "t", "inc-1", 0, 10, 1, block_hash(5))

    assert block_hash(0).hex() not in str(refusal.value)


def test_an_adopted_block_that_comes_again_is_a_duplicate(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)
    end(table, begin(table, "t", 0, 10))

    with pytest.raises(DuplicateBlock):
        begin(table, "t", 0, 10)

    assert table.stats().duplicate == 1
    assert not table.stats().refused


def test_a_slot_has_one_writer_at_a_time(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)
    grant = begin(table, "t", 0, 10)

    with pytest.raises(SlotMismatch, match="is being written"):
        begin(table, "t", 0, 10)

    assert end(table, grant) is WriteOutcome.ADOPTED


def test_closing_names_the_slots_that_are_still_written_until_they_are_quiet(table: ReservationTable) -> None:
    table.open("t", expected(10, 11), lease_until=2.0)
    grant = begin(table, "t", 0, 10)

    assert table.close("t") == {10}
    assert table.close("t") == {10}

    assert end(table, grant) is WriteOutcome.LATE
    assert table.close("t") == frozenset()
    assert table.stats().adopted == 0


def test_a_slot_is_not_offered_again_before_it_is_quiet(table: ReservationTable) -> None:
    table.open("old", expected(10), lease_until=2.0)
    grant = begin(table, "old", 0, 10)
    table.close("old")

    with pytest.raises(SlotMismatch, match="not quiet"):
        table.open("new", expected(10, generation=2), lease_until=2.0)

    end(table, grant)
    table.open("new", expected(10, generation=2), lease_until=2.0)
    assert table.progress("new") == TicketProgress(total=1, adopted=0, writing=0)


def test_a_refused_open_leaves_the_table_unchanged(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)
    before = table.stats()

    with pytest.raises(SlotMismatch):
        table.open("other", expected(9, 10), lease_until=1.0)
    with pytest.raises(SlotMismatch, match="twice"):
        table.open("other", expected(9, 9), lease_until=1.0)
    with pytest.raises(StaleTicket, match="in use"):
        table.open("t", expected(9), lease_until=1.0)

    assert table.stats() == before
    table.open("other", expected(9), lease_until=2.0)


def test_a_lease_runs_out_unless_it_is_renewed(table: ReservationTable) -> None:
    table.open("renewed", expected(10), lease_until=2.0)
    table.open("silent", expected(11), lease_until=2.0)
    table.renew("renewed", now=1.5)

    assert table.next_expiry() == 2.0
    assert table.expire(now=1.9) == []
    assert table.expire(now=2.0) == ["silent"]
    assert table.next_expiry() == 3.5
    assert table.expire(now=3.5) == ["renewed"]
    assert table.next_expiry() is None


def test_renewing_the_earliest_lease_does_not_hide_a_later_one(table: ReservationTable) -> None:
    table.open("head", expected(10), lease_until=1.0)
    table.open("behind", expected(11), lease_until=1.5)
    for now in (0.5, 1.0, 1.4):
        table.renew("head", now)

    assert table.expire(now=1.5) == ["behind"]


def test_an_expired_ticket_is_stale_and_still_says_which_slots_are_busy(table: ReservationTable) -> None:
    table.open("t", expected(10, 11), lease_until=2.0)
    grant = begin(table, "t", 0, 10)

    assert table.expire(now=2.0) == ["t"]

    with pytest.raises(StaleTicket):
        begin(table, "t", 1, 11)
    with pytest.raises(StaleTicket):
        table.renew("t", now=2.0)
    assert table.close("t") == {10}
    assert end(table, grant) is WriteOutcome.LATE
    assert (table.stats().expired, table.stats().closed) == (1, 0)


def test_a_complete_ticket_has_no_lease(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)
    end(table, begin(table, "t", 0, 10))

    assert table.next_expiry() is None
    assert table.expire(now=100.0) == []
    assert table.close("t") == frozenset()


def test_a_ticket_without_blocks_is_complete_from_the_start(table: ReservationTable) -> None:
    table.open("t", [], lease_until=2.0)

    progress = table.progress("t")
    assert progress is not None
    assert progress.complete
    assert table.expire(now=100.0) == []


def test_closing_what_is_unknown_or_over_does_nothing(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)
    table.close("t")

    assert table.close("t") == table.close("never") == frozenset()
    assert table.stats().closed == 1


def test_a_grant_ends_once(table: ReservationTable) -> None:
    table.open("t", expected(10), lease_until=2.0)
    grant = begin(table, "t", 0, 10)
    end(table, grant)

    with pytest.raises(InternalError):
        end(table, grant)


def test_leases_longer_than_five_seconds_are_refused() -> None:
    with pytest.raises(InternalError, match="lease_s"):
        ReservationTable("inc-1", lease_s=5.1)


SLOTS = st.integers(0, 5)


class AnyOrder(RuleBasedStateMachine):
    """Opens, writes, ends, closes, expires and repeats in any order, beside the simplest possible account of it."""

    tickets = Bundle("tickets")
    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.table = ReservationTable("inc-1", lease_s=2.0)
        self.now = 0.0
        self.number = 0
        self.written: dict[int, str] = {}
        """Slot -> ticket, of every grant that is open."""
        self.alive: set[str] = set()
        self.leases: dict[str, float] = {}
        """The longest that each ticket was ever granted."""
        self.ends: list[str] = []

    @rule(target=tickets, slots=st.lists(SLOTS, min_size=1, max_size=3, unique=True))
    def open(self, slots: list[int]) -> object:
        ticket_id = f"t{self.number}"
        self.number += 1
        try:
            self.table.open(ticket_id, expected(*slots, generation=self.number), self.now + 2.0)
        except SlotMismatch:
            return multiple()
        assert self.written.keys().isdisjoint(slots), "a slot was given away while somebody writes it"
        self.alive.add(ticket_id)
        self.leases[ticket_id] = self.now + 2.0
        return (ticket_id, slots, self.number)

    @property
    def ending(self) -> list[str]:
        return sorted(set(self.written.values()) - self.alive)

    @precondition(lambda self: self.ending)
    @rule(slots=st.lists(SLOTS, max_size=3, unique=True), data=st.data())
    def open_under_the_id_of_an_ending_ticket(self, slots: list[int], data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(self.ending))
        with pytest.raises(StaleTicket):
            self.table.open(ticket_id, expected(*slots, generation=self.number + 1), self.now + 2.0)

    @rule(target=grants, ticket=tickets, which=st.integers(0, 2), incarnation=st.sampled_from(["inc-1", "inc-0"]))
    def begin(self, ticket: tuple[str, list[int], int], which: int, incarnation: str) -> object:
        ticket_id, slots, generation = ticket
        ordinal = which % len(slots)
        try:
            grant = begin_as(
                self.table, ticket_id, incarnation, ordinal, slots[ordinal], generation, block_hash(ordinal)
            )
        except (StaleTicket, SlotMismatch, DuplicateBlock):
            return multiple()
        assert ticket_id in self.alive
        assert incarnation == "inc-1"
        (slot,) = grant.slots
        assert slot not in self.written, "two writers on one slot"
        self.written[slot] = ticket_id
        return grant

    @rule(grant=consumes(grants), ok=st.booleans())
    def end(self, grant: WriteGrant, ok: bool) -> None:
        outcome = end(self.table, grant, ok)
        del self.written[grant.slots[0]]
        assert (outcome is WriteOutcome.LATE) == (grant.ticket_id not in self.alive)
        assert outcome is not WriteOutcome.ADOPTED or ok

    @rule(ticket=tickets)
    def close(self, ticket: tuple[str, list[int], int]) -> None:
        ticket_id = ticket[0]
        busy = self.table.close(ticket_id)
        assert busy == {slot for slot, writer in self.written.items() if writer == ticket_id}
        if ticket_id in self.alive:
            self.alive.remove(ticket_id)
            self.ends.append(ticket_id)

    @rule(ticket=tickets, lag=st.floats(0.0, 3.0))
    def renew(self, ticket: tuple[str, list[int], int], lag: float) -> None:
        """By a clock that was read a while ago: what was granted since stays."""
        try:
            self.table.renew(ticket[0], self.now - lag)
        except StaleTicket:
            assert ticket[0] not in self.alive
        else:
            assert ticket[0] in self.alive
            self.leases[ticket[0]] = max(self.leases[ticket[0]], self.now - lag + 2.0)

    @rule(step=st.floats(0.0, 3.0))
    def expire(self, step: float) -> None:
        self.now += step
        for ticket_id in self.table.expire(self.now):
            assert self.leases[ticket_id] <= self.now, "a lease was shortened"
            self.alive.remove(ticket_id)
            self.ends.append(ticket_id)
        following = self.table.next_expiry()
        assert following is None or following > self.now

    @invariant()
    def every_ticket_ends_at_most_once(self) -> None:
        assert len(set(self.ends)) == len(self.ends)
        stats = self.table.stats()
        assert (stats.open, stats.closed + stats.expired) == (len(self.alive), len(self.ends))

    @invariant()
    def the_counts_agree(self) -> None:
        self.table.check_integrity()

    def teardown(self) -> None:
        for ticket_id in list(self.alive):
            self.table.close(ticket_id)
        self.table.check_integrity()
        assert self.table.stats().open == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
