"""What the reservation table says of several blocks at once. `test_reservation` has the rest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kv_links import block_hash

from engine.errors import HashMismatch, SlotMismatch, StaleTicket
from kv_transfer.block_records import LOAN, Records
from kv_transfer.frames import BlockEntry
from kv_transfer.reservation import DuplicateBlock, ExpectedBlock, ReservationTable, TicketProgress, WriteOutcome


@pytest.fixture
def table() -> Iterator[ReservationTable]:
    """With one ticket, for blocks 0 to 2 in the slots 10 to 12."""
    table = ReservationTable("inc-1", lease_s=2.0)
    blocks = [ExpectedBlock(ordinal=n, slot=10 + n, generation=1, hash=block_hash(n)) for n in range(3)]
    table.open("t", blocks, lease_until=2.0)
    yield table
    table.check_integrity()


def fill(records: Records, ordinal: int, slot: int, source: int) -> None:
    values = {"ordinal": ordinal, "slot": slot, "generation": 1, "source": source, "hash": block_hash(ordinal)}
    for name, value in values.items():
        records[name][ordinal] = value


def test_of_a_group_each_block_is_granted_or_refused_alone(table: ReservationTable) -> None:
    entries = [
        BlockEntry(n, slot, 1, block_hash(n), bytes(16), None) for n, slot in ((0, 10), (1, 99), (2, 12), (2, 12))
    ]

    grant, refused = table.begin_write("t", "inc-1", entries)

    assert (grant.ordinals, grant.slots) == ((0, 2), (10, 12))
    assert list(refused) == [1, 3]
    assert table.end_write(grant, [True, False]) == [WriteOutcome.ADOPTED, WriteOutcome.REFUSED]
    assert table.missing("t") == (1, 2)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, None),
        ({"ordinal": 5}, SlotMismatch),
        ({"slot": 11}, SlotMismatch),
        ({"generation": 2}, SlotMismatch),
        ({"hash": block_hash(1)}, HashMismatch),
        ({"ordinal": 2, "slot": 12, "hash": block_hash(2)}, SlotMismatch),
        ({"source": 8}, SlotMismatch),
    ],
)
def test_of_lent_blocks_each_is_compared_with_the_ticket(
    table: ReservationTable, change: dict[str, object], error: type[Exception] | None
) -> None:
    records = np.zeros(2, dtype=LOAN)
    for n, (source, slot) in enumerate(((7, 10), (8, 11))):
        fill(records, n, slot, source)
    for name, value in change.items():
        records[name][0] = value

    refused = table.adopt_lent("t", "inc-1", records, np.array([True, True]))

    # Of two that name one source the first is taken.
    place = 1 if "source" in change else 0
    assert {at: type(why) for at, why in refused.items()} == ({} if error is None else {place: error})
    assert table.progress("t") == TicketProgress(total=3, adopted=2 - len(refused), writing=0)


def test_a_lent_block_that_was_reused_is_not_adopted(table: ReservationTable) -> None:
    records = np.zeros(1, dtype=LOAN)
    fill(records, 0, 10, 7)

    assert isinstance(table.adopt_lent("t", "inc-1", records, np.array([False]))[0], SlotMismatch)
    assert isinstance(table.adopt_lent("t", "inc-0", records, np.array([True]))[0], StaleTicket)
    assert not table.adopt_lent("t", "inc-1", records, np.array([True]))
    assert isinstance(table.adopt_lent("t", "inc-1", records, np.array([True]))[0], DuplicateBlock)
