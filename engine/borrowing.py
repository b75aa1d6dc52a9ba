"""Blocks of peers' pools that requests read where they are. See `engine.lending` for the other side.

Their ids lie beyond those of our own. They are held and shared as ours are, and found by their content while somebody
holds them; with the last holder they go back. They are never written, copied to host memory, lent again, pinned, or
told to routers as resident; nor is what follows them, as residency is whole prefixes.

A peer may take one back without asking: it is gone, or thinks that we are. So nothing that was computed from them
counts before `find_lost` has looked at their generations again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from engine.block_manager import BlockManager
from engine.block_stats import BlockStats
from engine.errors import InternalError


class Lender(Protocol):
    """A peer's pool, as `engine.peer_windows.PeerWindow`."""

    @property
    def first_block(self) -> int: ...

    @property
    def generations(self) -> npt.NDArray[np.uint64]: ...

    def give_back(self, ticket_id: str, count: int) -> None: ...


class LentBlock(NamedTuple):
    ordinal: int
    """Position in the request's block chain."""
    source: int
    """Its id at the lender."""
    generation: int
    """Of the lender's slot when it was lent."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks that arrived without being copied. Each must be given to `BlockManager.borrow`, or back."""

    ticket_id: str
    lender: Lender
    blocks: Sequence[LentBlock]

    @property
    def ordinals(self) -> Sequence[int]:
        blocks = self.blocks
        return blocks.ordinals if isinstance(blocks, LentColumns) else [block.ordinal for block in blocks]

    def give_back(self, count: int) -> None:
        if count:
            self.lender.give_back(self.ticket_id, count)


class LentColumns(Sequence[LentBlock]):
    """Blocks of a loan, as a link has them: made one by one only for who looks at them."""

    def __init__(
        self, ordinals: list[int], sources: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]
    ) -> None:
        self.ordinals = ordinals
        self._sources = sources
        self._generations = generations

    def __len__(self) -> int:
        return len(self.ordinals)

    @overload
    def __getitem__(self, index: int) -> LentBlock: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LentBlock]: ...
    def __getitem__(self, index: int | slice) -> LentBlock | Sequence[LentBlock]:
        return list(self)[index]

    def __iter__(self) -> Iterator[LentBlock]:
        return map(LentBlock, self.ordinals, self._sources.tolist(), self._generations.tolist())


@dataclass(slots=True)
class _Borrowed:
    lender: Lender
    source: int
    generation: int
    holders: int = 0
    tickets: list[str] | None = None
    """That it came for; it goes back once for each."""
    hash: bytes | None = None


class BorrowingBlockManager(BlockManager):
    """Invariants beside those of `BlockManager`:

    1. A borrowed block has a holder. It has gone back as often as it came when it has none.
    2. A content is registered under one block, ours or borrowed, and never under one that is lost.
    """

    def __init__(self, *arguments: Any, fence: Callable[[], None], **settings: Any) -> None:
        """`fence`: a full memory barrier."""
        super().__init__(*arguments, **settings)
        self._fence = fence
        self._borrowed: dict[int, _Borrowed] = {}
        self._by_hash: dict[bytes, int] = {}
        self._lost: set[int] = set()
        self._watched: list[tuple[Lender, list[int], npt.NDArray[np.int64], npt.NDArray[np.uint64]]] | None = None
        """What `find_lost` compares, by lender: ids, sources, generations. None: to be made."""
        self._num_lost = 0

    def is_own(self, block: int) -> bool:
        return block < self._num_blocks

    def borrow(self, loan: Loan, lent: LentBlock) -> int:
        """Take one block of `loan`. Returns its id, which the caller holds."""
        block = loan.lender.first_block + lent.source
        borrowed = self._borrowed.get(block)
        if borrowed is None:
            borrowed = self._borrowed[block] = _Borrowed(loan.lender, lent.source, lent.generation, tickets=[])
            self._watched = None
        elif borrowed.generation != lent.generation:
            self._lose(block)  # what we have had so far is gone; so whoever holds it must let go first
        assert borrowed.tickets is not None
        borrowed.tickets.append(loan.ticket_id)
        borrowed.holders += 1
        return block

    def find_lost(self) -> Collection[int]:
        """Borrowed blocks, among those held, that their owner took back. What was read from them before this call may
        be anything; what was read from all others is what was lent."""
        if not self._borrowed:
            return ()
        self._fence()  # what was read before this line was read before the generations are
        if self._watched is None:
            self._watched = self._make_watched()
        for lender, blocks, sources, generations in self._watched:
            now = lender.generations[sources]
            if not np.array_equal(now, generations):
                for i in np.flatnonzero(now != generations).tolist():
                    self._lose(blocks[i])
        return self._lost

    def can_allocate(self, count: int, keeping: Collection[int] = ()) -> bool:
        return super().can_allocate(count, [block for block in keeping if self.is_own(block)])

    def generation(self, block: int) -> int:
        return super().generation(block) if self.is_own(block) else self._get(block).generation

    def references(self, block: int) -> int:
        if self.is_own(block):
            return super().references(block)
        return self._borrowed[block].holders if block in self._borrowed else 0

    def acquire(self, blocks: Sequence[int]) -> None:
        own, borrowed = self._parted(blocks)
        super().acquire(own)
        for block in borrowed:
            self._borrowed[block].holders += 1

    def release(self, blocks: Sequence[int]) -> None:
        own, borrowed = self._parted(blocks)
        super().release(own)
        self._let_go(borrowed)

    def is_writable(self, block: int) -> bool:
        return self.is_own(block) and super().is_writable(block)

    def copy_on_write(self, block: int) -> int:
        if not self.is_own(block):
            raise InternalError(f"block {block} is borrowed: nobody writes behind its end, or in it")
        return super().copy_on_write(block)

    def register(self, block: int, content_hash: bytes, parent: bytes | None, name: bytes = b"") -> int:
        resident = self._by_hash.get(content_hash)
        if resident is not None:
            return resident
        if self.is_own(block):
            return super().register(block, content_hash, parent, name)
        resident = self._index.block_of(content_hash)
        if resident is not None:
            return resident
        if block not in self._lost:
            self._get(block).hash = content_hash
            self._by_hash[content_hash] = block
        return block

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        blocks = super().lookup(hashes)
        if self._by_hash:
            for content_hash in hashes[len(blocks) :]:
                block = self._by_hash.get(content_hash)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def is_registered(self, block: int) -> bool:
        if self.is_own(block):
            return super().is_registered(block)
        return block in self._borrowed and self._borrowed[block].hash is not None

    def quarantine(self, blocks: Sequence[int]) -> None:
        own, _ = self._parted(blocks)
        super().quarantine(own)  # of a borrowed one, the hold just changes hands

    def unquarantine(self, blocks: Sequence[int]) -> None:
        own, borrowed = self._parted(blocks)
        super().unquarantine(own)
        self._let_go(borrowed)

    def reset_prefix_cache(self) -> bool:
        return not self._borrowed and super().reset_prefix_cache()

    def stats(self) -> BlockStats:
        return replace(super().stats(), borrowed=len(self._borrowed), borrowed_lost=self._num_lost)

    def check_holders(self, holders: Counter[int]) -> None:
        super().check_holders(holders)
        for block, count in holders.items():
            assert self.is_own(block) or self.references(block) == count, f"borrowed {block} has {count} holders"
        assert all(block in holders for block in self._borrowed), "borrowed, and held by nobody"

    def check_integrity(self) -> None:
        super().check_integrity()
        for block, borrowed in self._borrowed.items():
            assert not self.is_own(block)
            assert borrowed.holders > 0, f"borrowed block {block} has no holder"
            assert borrowed.tickets, f"borrowed block {block} came for nobody"
            assert borrowed.hash is None or self._by_hash[borrowed.hash] == block
        by_hash = {self._borrowed[block].hash: block for block in self._by_hash.values()}
        assert by_hash == self._by_hash, "found by a hash that is not its own"
        assert all(self._index.block_of(content_hash) is None for content_hash in self._by_hash), "registered twice"
        assert self._lost <= self._borrowed.keys()
        assert all(self._borrowed[block].hash is None for block in self._lost), "lost, and found by hash"

    def _get(self, block: int) -> _Borrowed:
        borrowed = self._borrowed.get(block)
        if borrowed is None:
            raise InternalError(f"block {block} is neither ours nor borrowed")
        return borrowed

    def _parted(self, blocks: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Ours, and borrowed ones, each in their order. Raises `InternalError` if one is neither."""
        if not self._borrowed or max(blocks, default=0) < self._num_blocks:
            return blocks, ()
        own = [block for block in blocks if self.is_own(block)]
        borrowed = [block for block in blocks if not self.is_own(block)]
        self._check_distinct(own)
        for block in borrowed:
            self._get(block)
        if len(set(borrowed)) != len(borrowed):
            raise InternalError(f"a block is named twice: {list(blocks)}")
        return own, borrowed

    def _let_go(self, blocks: Sequence[int]) -> None:
        returned: dict[Lender, Counter[str]] = {}
        for block in blocks:
            borrowed = self._borrowed[block]
            borrowed.holders -= 1
            if not borrowed.holders:
                self._unregister(borrowed)
                del self._borrowed[block]
                self._lost.discard(block)
                self._watched = None
                returned.setdefault(borrowed.lender, Counter()).update(borrowed.tickets or ())
        for lender, tickets in returned.items():
            for ticket_id, count in tickets.items():
                lender.give_back(ticket_id, count)

    def _lose(self, block: int) -> None:
        if block not in self._lost:
            self._lost.add(block)
            self._num_lost += 1
            self._unregister(self._borrowed[block])

    def _unregister(self, borrowed: _Borrowed) -> None:
        if borrowed.hash is not None:
            del self._by_hash[borrowed.hash]
            borrowed.hash = None

    def _make_watched(self) -> list[tuple[Lender, list[int], npt.NDArray[np.int64], npt.NDArray[np.uint64]]]:
        by_lender: dict[Lender, list[int]] = {}
        for block, borrowed in self._borrowed.items():
            by_lender.setdefault(borrowed.lender, []).append(block)
        return [
            (
                lender,
                blocks,
                np.array([self._borrowed[block].source for block in blocks], dtype=np.int64),
                np.array([self._borrowed[block].generation for block in blocks], dtype=np.uint64),
            )
            for lender, blocks in by_lender.items()
        ]
