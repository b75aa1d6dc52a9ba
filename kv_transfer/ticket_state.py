"""One ticket of a decode worker: what it asks for, and what has come of that. `ReservationTable` holds the lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import HashMismatch, SlotMismatch, TransferError
from kv_transfer.block_records import Claims, Records


class DuplicateBlock(TransferError):
    """The block is adopted already. Nothing to do; the sender may be told so again."""


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
    """Leave to write some slots, until `end_write`. Its holder must call that, whatever happens."""

    serial: int
    ticket_id: str
    ordinals: tuple[int, ...]
    slots: tuple[int, ...]


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


class Ticket:
    """One ticket and the states of its blocks: each is in `expected`, in `writing`, or adopted."""

    def __init__(self, ticket_id: str, blocks: Sequence[ExpectedBlock], lease_until: float) -> None:
        self.ticket_id = ticket_id
        self.blocks = {block.ordinal: block for block in blocks}
        self.lease_until = lease_until
        self.expected = set(self.blocks)
        self.writing: set[int] = set()
        self.over = False
        self._last = max(self.blocks, default=-1)
        """Ordinal of the last block."""
        self._sources: set[int] = set()
        """Blocks of the sender that were lent for it."""
        places = {block.ordinal: (block.slot, block.generation) for block in blocks}
        self._claims = Claims(places, {block.ordinal: block.hash for block in blocks})

    @property
    def adopted(self) -> int:
        return len(self.blocks) - len(self.expected) - len(self.writing)

    @property
    def complete(self) -> bool:
        return not self.expected and not self.writing

    def slots(self, ordinals: Iterable[int]) -> frozenset[int]:
        return frozenset(self.blocks[ordinal].slot for ordinal in ordinals)

    def unadopted(self) -> frozenset[int]:
        """Slots of the blocks that are still to come, or coming."""
        return self.slots(self.expected | self.writing)

    def check(self, ordinal: int, slot: int, generation: int, content_hash: bytes) -> None:
        """Raises why the block may not be written now: see `ReservationTable.begin_write`."""
        block = self.blocks.get(ordinal)
        if block is None:
            raise SlotMismatch(f"ticket {self.ticket_id} does not ask for block {ordinal}")
        if (slot, generation) != (block.slot, block.generation):
            raise SlotMismatch(
                f"block {ordinal} of ticket {self.ticket_id} does not go to slot {slot} generation {generation}"
            )
        if content_hash != block.hash:
            # The message travels to the peer: what is expected stays with us.
            raise HashMismatch(f"block {ordinal} of ticket {self.ticket_id} has not hash {content_hash.hex()}")
        if ordinal in self.writing:
            raise SlotMismatch(f"block {ordinal} of ticket {self.ticket_id} is being written")
        if ordinal not in self.expected:
            raise DuplicateBlock(f"block {ordinal} of ticket {self.ticket_id} is adopted already")

    def check_lent(self, ordinal: int, source: int, holds: bool) -> None:
        """Raises why a block that may be written cannot be borrowed instead. `holds`: it is there still."""
        if not holds:
            raise SlotMismatch(f"block {ordinal} of ticket {self.ticket_id} was reused before it was adopted")
        if ordinal == self._last or source in self._sources:
            raise SlotMismatch(f"block {ordinal} of ticket {self.ticket_id} cannot be lent")

    def expects_all(self, records: Records) -> range | None:
        """Their ordinals, if `check` has nothing against any of these and they follow each other. None says nothing."""
        ordinals = self._claims.match(records)
        return ordinals if ordinals is not None and self.expected.issuperset(ordinals) else None

    def borrows_all(self, records: Records, lent: npt.NDArray[np.bool_]) -> range | None:
        """The same, if `check_lent` has nothing against any either."""
        ordinals = self.expects_all(records)
        if ordinals is None or self._last in ordinals or not lent.all():
            return None
        sources = set(records["source"].tolist())
        return ordinals if len(sources) == len(records) and self._sources.isdisjoint(sources) else None

    def adopt(self, ordinals: Collection[int], sources: Iterable[int] = ()) -> None:
        """Expected blocks. `sources`: where they are, if they are lent."""
        self.expected.difference_update(ordinals)
        self._sources.update(sources)
