"""What must hold of a pool's tables. For tests and idle moments; see `engine.block_manager`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.block_stats import BlockStats

if TYPE_CHECKING:
    from engine.block_manager import BlockManager


def check_manager(manager: BlockManager, stats: BlockStats) -> None:
    """Re-derive every invariant, and every count of `stats`. O(blocks)."""
    manager._index.check_integrity()
    manager._cached.check_integrity()
    blocks = range(manager._num_blocks)
    assert min(*manager._holders, *manager._quarantines) >= 0
    free, cached = set(manager._free), set(manager._cached)
    pinned = {block for block in blocks if block in manager._pins}
    held = {block for block in blocks if manager._holders[block] or manager._quarantines[block]}
    registered = {block for block in blocks if block in manager._index}
    assert len(free) == len(manager._free), "a block is free twice"
    assert len(free) + len(cached) + len(pinned - held) + len(held) == len(blocks), "a block was lost"
    assert free | cached | pinned | held == set(blocks), "a block is in two states"
    assert free.isdisjoint(registered), f"free with a hash: {free & registered}"
    assert cached | pinned <= registered, f"cached or pinned without a hash: {(cached | pinned) - registered}"
    if manager._config.sliding_window is None:
        manager._cached.check_before(manager._index.parent)
    manager._pins.check_integrity()
    for chain in manager._pins.chains():
        parents = [manager._index.parent(block) for block in chain]
        assert parents == [None, *chain[:-1]], f"pinned, but no chain from its first block on: {chain}"
    for block in manager._leased:
        assert manager.is_writable(block), f"leased block {block} is shared, or has a hash"
    owned = {block for block in blocks if manager._holders[block]} - manager._leased
    assert stats.owned == len(owned), f"{len(owned)} blocks are owned, {stats}"
    assert stats.quarantined == len(held - owned - manager._leased), f"{stats}"
    assert stats.cached == len(cached) + len(pinned - held), f"{stats}"
    assert stats.copies_avoided == sum(max(0, count - 1) for count in manager._holders), f"{stats}"
