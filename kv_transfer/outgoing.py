"""What passes between a prefill worker, its transfers and its links: tickets, blocks that leave, how it all ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from engine.block_hash import HASH_BYTES
from engine.errors import EngineError, ProtocolError
from engine.kv_layout import KvLayout
from kv_transfer.block_records import COPY, LOAN, Claims, Records, hashes_of
from kv_transfer.frames import Copies, Frame, Lend
from kv_transfer.identity import MAX_ID_BYTES
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
class BlockColumns:
    """Full blocks of a prompt, each one block of our pool and of the receiver's layout."""

    ordinals: npt.NDArray[np.int64]  # [blocks], ascending
    sources: npt.NDArray[np.int64]  # [blocks], ids in our pool
    generations: npt.NDArray[np.uint64]  # [blocks], of these
    hashes: bytes
    """32 of each."""
    lendable: bool = False
    """The receiver may read them where they are: the engine holds each from the moment that they are handed over until
    that is over."""

    def __len__(self) -> int:
        return len(self.ordinals)

    def singly(self) -> list[OutgoingBlock]:
        hashes = [self.hashes[at : at + HASH_BYTES] for at in range(0, len(self.hashes), HASH_BYTES)]
        columns = zip(self.ordinals.tolist(), self.sources.tolist(), hashes, self.generations.tolist(), strict=True)
        return [
            OutgoingBlock(ordinal, source, content_hash, (), generation)
            for ordinal, source, content_hash, generation in columns
        ]

    def parted(self, count: int) -> tuple[BlockColumns, BlockColumns]:
        """The first `count`, and the rest."""
        at = count * HASH_BYTES
        first, rest = slice(count), slice(count, None)
        return (
            replace(self, **self._cut(first), hashes=self.hashes[:at]),
            replace(self, **self._cut(rest), hashes=self.hashes[at:]),
        )

    def only(self, kept: npt.NDArray[np.bool_]) -> BlockColumns:
        return replace(self, **self._cut(kept), hashes=hashes_of(self.hashes)[kept].tobytes())

    def _cut(self, which: slice | npt.NDArray[np.bool_]) -> dict[str, Any]:
        return {name: getattr(self, name)[which] for name in ("ordinals", "sources", "generations")}


def loans(claims: Claims, blocks: BlockColumns) -> bytes:
    """What a `Lend` frame says of `blocks`, all of which the ticket claims."""
    records = _records(claims, blocks, LOAN)
    records["source_generation"] = blocks.generations
    return records.tobytes()


def copies(claims: Claims, blocks: BlockColumns, digests: npt.NDArray[np.void]) -> bytes:
    """What a `Copies` frame says of them."""
    records = _records(claims, blocks, COPY)
    records["digest"] = digests
    return records.tobytes()


def _records(claims: Claims, blocks: BlockColumns, kind: np.dtype[np.void]) -> Records:
    records = np.empty(len(blocks), dtype=kind)
    claims.fill(records, blocks.ordinals)
    records["source"] = blocks.sources
    records["hash"] = hashes_of(blocks.hashes)
    return records


def lend(ticket_id: str, incarnation: str, records: bytes) -> Lend:
    return Lend(ticket_id=ticket_id, incarnation=incarnation, records=records, digest=xxh3_128_digest(records))


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
class SendColumns:
    """Send this, then call `sent`. No source is read."""

    request_id: str
    frame: Lend | Copies


Step = SendBlocks | SendColumns | Frame


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended. Its source blocks are not read any more."""

    request_id: str
    error: EngineError | None
    stats: TransferStats


Sent = OutgoingBlock | BlockColumns
"""A block in flight, or those with which it left."""


@dataclass(slots=True)
class Transfer:
    request_id: str
    ticket: TicketInfo
    deadline: float
    unsent: set[int]
    """Ordinals that the ticket asks for and nobody has given us yet."""
    unacked: set[int]
    claims: Claims
    queued: deque[OutgoingBlock | BlockColumns] = field(default_factory=deque)
    writing: bool = False
    """The writer has blocks of it in hand."""
    finished: bool = False
    finish_queued: bool = False
    error: EngineError | None = None
    first_sent: float | None = None
    last_acked: float | None = None
