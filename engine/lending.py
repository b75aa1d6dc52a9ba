"""Blocks of our pool that peers read where they are: who has which, and how a late reader is told that one is gone.

A lent block is a cached one that is given up last: nobody here ever waits for a peer to give one back, so no circle of
workers that wait for each other can close through it. What makes that safe is the generation of each slot, in memory
that peers see. It changes before the slot has a new owner; whoever compares it after reading knows whether what was
read is what was lent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.block_manager import BlockManager
from engine.block_stats import BlockStats
from engine.errors import InternalError


@dataclass(slots=True)
class _Loan:
    blocks: list[int]
    """In chain order, from the first of the prompt on: so that none that is lent is evicted after what it follows."""
    outstanding: int
    """Of these, lent and not given back."""


class LendingBlockManager(BlockManager):
    """Invariants beside those of `BlockManager`:

    1. A block has one holder more for each loan that it is in. No loan is empty.
    2. `_idle` are the lent blocks that nobody else holds, and no name pins: `allocate` may take them.
    3. At most `max_lent` blocks are lent.
    4. `generations`, once a call returns, are those of the slots, and no slot is written under an older one.
    """

    def __init__(
        self,
        *arguments: Any,
        generations: npt.NDArray[np.uint64],
        fence: Callable[[], None],
        max_lent: int,
        **settings: Any,
    ) -> None:
        """`generations`: [blocks] uint64, which peers can see. `fence`: a full memory barrier. `max_lent`: beyond it
        blocks are copied."""
        super().__init__(*arguments, **settings)
        self._generations = generations
        generations[:] = 0
        self._fence = fence
        self._max_lent = max_lent
        self._loans: dict[str, _Loan] = {}
        """The oldest first."""
        self._taken_back: dict[str, int] = {}
        """Loans that we have ended, and how many of their blocks are still to be given back."""
        self._lent: Counter[int] = Counter()
        """Block -> loans that it is in."""
        self._idle: set[int] = set()

    @property
    def num_allocatable(self) -> int:
        return super().num_allocatable + len(self._idle)

    def can_allocate(self, count: int, keeping: Collection[int] = ()) -> bool:
        return super().can_allocate(count + sum(block in self._idle for block in keeping), keeping)

    def allocate(self, count: int) -> list[int]:
        """As ever; of lent blocks the oldest loans' go, after all cached ones."""
        if super().num_allocatable < count <= self.num_allocatable:
            self._take_back(count)
        blocks = super().allocate(count)
        for block in blocks:
            self._generations[block] = self._generation[block]
        self._fence()  # nobody sees what is written into a slot before its new generation
        return blocks

    def references(self, block: int) -> int:
        return super().references(block) - self._lent.get(block, 0)

    def acquire(self, blocks: Sequence[int]) -> None:
        super().acquire(blocks)
        self._look_at(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        self._look_at(blocks)

    def quarantine(self, blocks: Sequence[int]) -> None:
        super().quarantine(blocks)
        self._look_at(blocks)

    def unquarantine(self, blocks: Sequence[int]) -> None:
        super().unquarantine(blocks)
        self._look_at(blocks)

    def discard(self, block: int) -> dict[int, bytes | None]:
        """Whoever borrowed one of them finds out by its generation, and computes anew."""
        hashes = super().discard(block)
        for member in hashes:
            self._generations[member] = self._generation[member]
        self._fence()
        self._look_at(hashes)
        return hashes

    def pin(self, name: str, hashes: Sequence[bytes], max_blocks: int | None = None) -> int:
        try:
            return super().pin(name, hashes, max_blocks)
        finally:
            self._look_at(self._lent)

    def unpin(self, name: str) -> None:
        super().unpin(name)
        self._look_at(self._lent)

    def lend(self, key: str, blocks: Sequence[int], count: int) -> bool:
        """Keep `blocks`, all of a chain up to its last one that is lent, until `count` were given back.

        A loan of that key which is open grows; `blocks` begin with those that it has. False, and nothing has changed,
        if too many would be lent, or that loan was taken back. Raises `InternalError` if one cannot be acquired.
        """
        loan = self._loans.get(key)
        added = blocks[len(loan.blocks) if loan is not None else 0 :]
        num_lent = len(self._lent) + sum(block not in self._lent for block in added)
        if num_lent > self._max_lent or key in self._taken_back:
            return False
        super().acquire(added)
        self._lent.update(added)
        self._look_at(added)
        if loan is None:
            loan = self._loans[key] = _Loan([], 0)
        loan.blocks += added
        loan.outstanding += count
        return True

    def end_loan(self, key: str, count: int) -> None:
        """So many blocks were given back, or will not be read any more. With the last one, all of the loan are."""
        loan = self._loans.get(key)
        outstanding = self._taken_back.get(key, 0) if loan is None else loan.outstanding
        if outstanding < count:
            raise InternalError(f"{count} blocks of loan {key!r} come back, {outstanding} are lent")
        if loan is None:
            self._taken_back[key] = outstanding - count
            if outstanding == count:
                del self._taken_back[key]
            return
        loan.outstanding -= count
        if not loan.outstanding:
            self._forget(key)

    def stats(self) -> BlockStats:
        """Lent blocks that nobody here holds count as cached: they are given up when memory is wanted."""
        stats, idle = super().stats(), len(self._idle)
        return replace(stats, cached=stats.cached + idle, owned=stats.owned - idle, lent=len(self._lent))

    def check_integrity(self) -> None:
        super().check_integrity()
        lent = Counter(block for loan in self._loans.values() for block in loan.blocks)
        assert lent == self._lent, "lent blocks are not those of the loans"
        assert len(lent) <= self._max_lent
        assert self._idle == set(filter(self._is_idle, range(self._num_blocks))), (
            "idle blocks are not those held by loans"
        )
        assert all(loan.outstanding > 0 and loan.blocks for loan in self._loans.values()), "an empty loan"
        assert all(self._taken_back.values()), "a loan is remembered of which nothing comes back"
        assert self._taken_back.keys().isdisjoint(self._loans)
        assert self._generations.tolist() == self._generation, "peers see other generations"

    def _take_back(self, count: int) -> None:
        """End loans, the oldest first, until `count` blocks are free or cached. Their readers find out."""
        while super().num_allocatable < count:
            key, loan = next(iter(self._loans.items()))
            self._taken_back[key] = loan.outstanding
            self._forget(key)

    def _forget(self, key: str) -> None:
        blocks = self._loans.pop(key).blocks
        self._lent.subtract(blocks)
        for block in blocks:
            if not self._lent[block]:
                del self._lent[block]
        self.release(blocks)

    def _look_at(self, blocks: Iterable[int]) -> None:
        """Their holders, loans or pins have changed."""
        if self._lent or self._idle:
            for block in blocks:
                (self._idle.add if self._is_idle(block) else self._idle.discard)(block)

    def _is_idle(self, block: int) -> bool:
        return block in self._lent and not self.references(block) and block not in self._pins
