"""What passes between a prefill worker, its transfers and its links: tickets, blocks that leave, how it all ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.block_hash import HASH_BYTES
from engine.errors import EngineError, ProtocolError
from engine.kv_layout import KvLayout
from kv_transfer.frames import Frame, Lend
from kv_transfer.identity import MAX_ID_BYTES
from kv_transfer.loan_records import RECORD
from kv_transfer.stats import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketInfo:
    """What a decode worker's ticket says to the prefill worker. Raises `ProtocolError` if it cannot be one."""

    ticket_id: str
    worker_id: str
    incarnation: str
    endpoint: bytes
    """An encoded `LinkEndpoint`."""
    blocks: Mapping[int, tuple[int, int]]
    """Ordinal -> (slot, generation)."""
    lease_s: float
    layout: KvLayout | None = None
    """Of the receiver's blocks; None: they are as the sender's."""

    def __post_init__(self) -> None:
        for name in ("ticket_id", "worker_id", "incarnation"):
            if not 0 < len(getattr(self, name).encode("utf-8", "replace")) <= MAX_ID_BYTES:
                raise ProtocolError(f"a ticket's {name} must have 1 to {MAX_ID_BYTES} bytes")
        if not self.lease_s > 0:
            raise ProtocolError(f"a ticket's lease_s must be positive, got {self.lease_s}")
        for ordinal, (slot, generation) in self.blocks.items():
            if not (0 <= ordinal < 1 << 32 and 0 <= slot < 1 << 32 and 0 <= generation < 1 << 64):
                raise ProtocolError(f"a ticket asks for block {ordinal} in slot {slot} generation {generation}")


@dataclass(frozen=True, slots=True)
class OutgoingBlock:
    ordinal: int
    source_block: int
    """Block id in the prefill worker's pool."""
    hash: bytes
    more_blocks: tuple[int, ...] = ()
    """Those that follow it in the sequence, where the receiver's block takes tokens from several of ours."""
    generation: int | None = None
    """Of `source_block`, if the block is that one alone and full: its bytes stay as they are until this changes."""


@dataclass(frozen=True, slots=True, eq=False)
class LendableBlocks:
    """Blocks of a prompt that the receiver may read where they are. The engine holds each from the moment that they
    are handed over until that is over."""

    ordinals: npt.NDArray[np.int64]  # [blocks], ascending
    sources: npt.NDArray[np.int64]  # [blocks], ids in our pool
    generations: npt.NDArray[np.uint64]  # [blocks], of these
    hashes: bytes
    """32 of each."""

    def __len__(self) -> int:
        return len(self.ordinals)

    def singly(self) -> list[OutgoingBlock]:
        """To be sent all the same."""
        hashes = [self.hashes[at : at + HASH_BYTES] for at in range(0, len(self.hashes), HASH_BYTES)]
        columns = zip(self.ordinals.tolist(), self.sources.tolist(), hashes, self.generations.tolist(), strict=True)
        return [
            OutgoingBlock(n, source, content_hash, (), generation) for n, source, content_hash, generation in columns
        ]

    def parted(self, count: int) -> tuple[LendableBlocks, LendableBlocks]:
        """The first `count`, and the rest."""
        at = count * HASH_BYTES
        return (
            LendableBlocks(self.ordinals[:count], self.sources[:count], self.generations[:count], self.hashes[:at]),
            LendableBlocks(self.ordinals[count:], self.sources[count:], self.generations[count:], self.hashes[at:]),
        )

    def only(self, kept: npt.NDArray[np.bool_]) -> LendableBlocks:
        hashes = np.frombuffer(self.hashes, dtype=f"V{HASH_BYTES}")[kept].tobytes()
        return LendableBlocks(self.ordinals[kept], self.sources[kept], self.generations[kept], hashes)


class Places:
    """Where a ticket wants its blocks, as columns."""

    def __init__(self, ordinals: npt.NDArray[np.int64], places: npt.NDArray[np.uint64]) -> None:
        self._ordinals = ordinals
        self._places = places

    @classmethod
    def of(cls, blocks: Mapping[int, tuple[int, int]]) -> Self:
        """Of ordinals with slot and generation."""
        ordinals = np.fromiter(blocks, dtype=np.int64, count=len(blocks))
        places = np.fromiter(chain.from_iterable(blocks.values()), dtype=np.uint64, count=2 * len(blocks))
        order = np.argsort(ordinals)
        return cls(ordinals[order], places.reshape(-1, 2)[order])

    def records(self, blocks: LendableBlocks) -> bytes:
        """What a `Lend` frame says of `blocks`, all of which the ticket asks for."""
        at = np.searchsorted(self._ordinals, blocks.ordinals)
        records = np.empty(len(blocks), dtype=RECORD)
        records["ordinal"] = blocks.ordinals
        records["slot"] = self._places[at, 0]
        records["generation"] = self._places[at, 1]
        records["source_generation"] = blocks.generations
        records["source"] = blocks.sources
        records["hash"] = np.frombuffer(blocks.hashes, dtype=f"V{HASH_BYTES}")
        return records.tobytes()


def lendable(
    ordinals: Sequence[int], sources: Sequence[int], generations: npt.NDArray[np.uint64], hashes: Sequence[bytes]
) -> LendableBlocks:
    """`generations`: of all slots of the pool."""
    at = np.array(sources, dtype=np.int64)
    return LendableBlocks(np.array(ordinals, dtype=np.int64), at, generations[at], b"".join(hashes))


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Send this group of blocks, then call `sent`. Their sources are read until then."""

    request_id: str
    ticket_id: str
    incarnation: str
    blocks: tuple[OutgoingBlock, ...]
    places: tuple[tuple[int, int], ...]
    """(slot, generation) of each."""


@dataclass(frozen=True, slots=True)
class SendLoan:
    """Send this, then call `sent`."""

    request_id: str
    frame: Lend


Step = SendBlocks | SendLoan | Frame


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended. Its source blocks are not read any more."""

    request_id: str
    error: EngineError | None
    stats: TransferStats
