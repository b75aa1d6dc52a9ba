"""What a DECODE request waits for before it may run. Knows no link: it is told which blocks arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MissingBlock:
    """A block of the prompt that the prefill worker has to send, and where it goes."""

    ordinal: int
    """Position in the request's block chain."""
    slot: int
    """Block id in this worker's pool."""
    generation: int
    """Of the slot: bumped whenever the slot changes hands, so that a late write is told apart."""
    expected_hash: bytes


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks granted to a DECODE request."""

    request_id: str
    cached_tokens: int
    """Leading tokens whose KV is resident already, and pinned."""
    missing: tuple[MissingBlock, ...]
    """Ascending by ordinal. Empty if everything is resident or the transfer was given up before the grant."""
    wait_s: float
    """From `reserve` to the grant."""


@dataclass(slots=True)
class Adoption:
    """The request may run once the router's tokens came (`started`) and the KV question is settled: every missing
    block adopted, or the transfer given up.

    Invariant: every ordinal below `first_missing` is resident; `first_missing` is in `missing`, or all are adopted.
    """

    num_tokens: int
    """Tokens of the reservation. Their KV is what the link brings."""
    started: bool = False
    given_up: bool = False
    missing: set[int] = field(default_factory=set)
    """Ordinals that were not adopted yet. Filled when the blocks are granted."""
    first_missing: int = 0
    borrowed: dict[int, int] = field(default_factory=dict)
    """Ordinal -> block of a peer that holds it, while the request's own is still in its place: those behind a gap."""
    first_lost: int | None = None
    """The first ordinal that was lent and given back unread, as a block before it is lost. With its first step the
    request starts over."""

    def expect(self, ordinals: Iterable[int]) -> None:
        """The grant: these ordinals, a range that ends with the reservation's last block, come over the link."""
        self.missing = set(ordinals)
        self.first_missing = min(self.missing, default=0)

    def adopt(self, ordinal: int) -> None:
        """Note the arrival of a missing block."""
        self.missing.remove(ordinal)
        while self.missing and self.first_missing not in self.missing:
            self.first_missing += 1

    def resident_tokens(self, block_size: int) -> int:
        """Tokens of the reservation with KV, up to the first gap."""
        resident = self.first_missing * block_size if self.missing else self.num_tokens
        return resident if self.first_lost is None else min(resident, self.first_lost * block_size)

    def lose(self, ordinals: Sequence[int]) -> None:
        """These missing blocks were lent, and can neither be read nor come another way. Nor are those in `borrowed`
        read any more."""
        for ordinal in ordinals:
            self.adopt(ordinal)
        known = () if self.first_lost is None else (self.first_lost,)
        self.first_lost = min([*ordinals, *self.borrowed, *known])
        self.borrowed.clear()

    @property
    def settled(self) -> bool:
        return self.started and (self.given_up or not self.missing)
