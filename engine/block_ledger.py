"""What the pool will look like after steps that are only planned: to decide first, and change things afterwards."""

from __future__ import annotations

from collections import Counter

from engine.block_manager import BlockManager
from engine.block_tables import AdmissionPlan, BlockTables
from engine.request import Request


class BlockLedger:
    """Adds and subtracts planned growth, preemption and admission. Reads pool and tables, changes neither.

    Exact, if what is planned is carried out so that cached prefixes are taken hold of before anything is allocated.
    """

    def __init__(self, tables: BlockTables, pool: BlockManager) -> None:
        self._tables = tables
        self._pool = pool
        self._changes: Counter[int] = Counter()
        """Block -> references that are planned to come and go."""
        self._growth: dict[str, tuple[int, int | None]] = {}
        """Request -> blocks that it is planned to get, and the one among its own that one of them is a copy of."""
        self.num_allocatable = pool.num_allocatable

    def grow(self, request: Request) -> bool:
        """Plan `BlockTables.grow`. False if it would fail; then nothing is planned."""
        count, shared = self._tables.growth(request)
        if shared is not None and self._will_be_writable(shared):
            count, shared = count - 1, None
        if count > self.num_allocatable:
            return False
        if count:
            self.num_allocatable -= count
            self._growth[request.request_id] = (count, shared)
            if shared is not None:
                self._drop(shared)
        return True

    def give_up(self, request: Request) -> None:
        """Plan to free all blocks of a request, those that it was planned to get too."""
        count, shared = self._growth.pop(request.request_id, (0, None))
        self.num_allocatable += count
        for block in request.block_table[request.num_released_blocks :]:
            if block != shared:
                self._drop(block)

    def admit(self, plan: AdmissionPlan) -> None:
        """Plan an admission that fits."""
        self.num_allocatable -= self.cost(plan)
        self._changes.update(plan.cached)

    def cost(self, plan: AdmissionPlan) -> int:
        """Blocks that an admission takes from those that can be allocated."""
        return plan.num_new + sum(self._can_be_evicted(block) for block in plan.cached)

    def growth(self, request: Request) -> int:
        """Blocks that `request` is planned to get."""
        return self._growth.get(request.request_id, (0, None))[0]

    def _references(self, block: int) -> int:
        return self._pool.references(block) + self._changes[block]

    def _will_be_writable(self, block: int) -> bool:
        return self._references(block) == 1 and not self._pool.is_registered(block)

    def _can_be_evicted(self, block: int) -> bool:
        return self._references(block) == 0 and self._pool.is_own(block) and not self._pool.is_pinned(block)

    def _drop(self, block: int) -> None:
        self._changes[block] -= 1
        self.num_allocatable += self._can_be_evicted(block)
