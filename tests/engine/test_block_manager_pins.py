"""Prefixes that stay, and how to forget all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from block_chains import cached_chain, chain

from engine.block_manager import BlockManager, BlockStats
from engine.config import CacheConfig
from engine.errors import InternalError, NoFreeBlocks, PinLimit
from engine.pinned_prefixes import MAX_NAMES

NUM_BLOCKS = 8


@pytest.fixture
def pool() -> Iterator[BlockManager]:
    pool = BlockManager(CacheConfig(num_blocks=NUM_BLOCKS, block_size=4, max_pinned_share=0.5))
    yield pool
    pool.check_integrity()


def test_a_pinned_prefix_is_not_evicted_before_it_is_unpinned(pool: BlockManager) -> None:
    blocks = cached_chain(pool, "a", 5)
    assert pool.pin("system", chain("a", 3)) == 3
    assert (pool.stats().cached, pool.stats().pinned) == (5, 3)
    assert not pool.can_allocate(6)
    taken = pool.allocate(5)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(1)
    assert pool.lookup(chain("a", 5)) == blocks[:3]
    pool.unpin("system")
    assert pool.stats().pinned == 0
    pool.release(taken)
    pool.allocate(7)
    assert pool.lookup(chain("a", 5)) == blocks[:1]


def test_a_pinned_block_is_held_and_released_as_any_other(pool: BlockManager) -> None:
    blocks = cached_chain(pool, "a", 2)
    pool.pin("system", chain("a", 2))
    pool.acquire(blocks)
    assert (pool.stats().cached, pool.stats().owned) == (0, 2)
    pool.unpin("system")
    pool.pin("again", chain("a", 2))
    pool.release(blocks)
    assert (pool.stats().cached, pool.stats().owned, pool.num_allocatable) == (2, 0, 6)


def test_what_is_not_resident_is_not_pinned(pool: BlockManager) -> None:
    cached_chain(pool, "a", 2)
    assert pool.pin("system", chain("a", 4)) == 2
    assert pool.pin("none", chain("b", 4)) == 0
    assert pool.stats().pinned == 2


def test_pinning_again_changes_over(pool: BlockManager) -> None:
    cached_chain(pool, "a", 3)
    cached_chain(pool, "b", 3)
    pool.pin("system", chain("a", 3))
    assert pool.pin("system", chain("b", 2)) == 2
    assert pool.stats().pinned == 2
    assert pool.pin("system", []) == 0
    assert pool.stats().pinned == 0


def test_more_than_the_share_of_the_pool_is_not_pinned(pool: BlockManager) -> None:
    cached_chain(pool, "a", 3)
    cached_chain(pool, "b", 3)
    pool.pin("system", chain("a", 3))
    with pytest.raises(PinLimit, match="5 pinned blocks, at most 4"):
        pool.pin("other", chain("b", 2))
    with pytest.raises(PinLimit, match="at most 2"):
        pool.pin("system", chain("b", 3), max_blocks=2)
    assert pool.stats().pinned == 3
    assert pool.pin("other", chain("b", 1)) == 1


def test_a_block_under_two_names_counts_once_and_stays_for_both(pool: BlockManager) -> None:
    cached_chain(pool, "a", 4)
    pool.pin("short", chain("a", 2))
    pool.pin("long", chain("a", 4))
    assert pool.stats().pinned == 4
    pool.unpin("long")
    assert pool.stats().pinned == 2
    pool.unpin("short")
    pool.unpin("short")
    assert pool.stats().pinned == 0


def test_a_pin_begins_where_its_chain_does(pool: BlockManager) -> None:
    cached_chain(pool, "a", 3)
    with pytest.raises(InternalError, match="no chain from its first block"):
        pool.pin("tail", chain("a", 3)[1:])
    assert pool.stats().pinned == 0


def test_resetting_is_refused_while_a_block_is_in_use(pool: BlockManager) -> None:
    blocks = cached_chain(pool, "a", 2)
    pool.acquire(blocks[:1])
    pool.take_events()
    assert not pool.reset_prefix_cache()
    assert pool.take_events().events == ()
    assert pool.lookup(chain("a", 2)) == blocks
    pool.release(blocks[:1])
    assert pool.reset_prefix_cache()


@pytest.mark.parametrize("state", ["owned", "leased", "quarantined"])
def test_a_block_without_content_is_in_use_too(pool: BlockManager, state: str) -> None:
    blocks = pool.allocate(1)
    if state == "leased":
        pool.lease(blocks)
    elif state == "quarantined":
        pool.quarantine(blocks)
    assert getattr(pool.stats(), state) == 1
    assert not pool.reset_prefix_cache()


def test_resetting_forgets_pins_too(pool: BlockManager) -> None:
    cached_chain(pool, "a", 3)
    pool.pin("system", chain("a", 2))
    assert pool.reset_prefix_cache()
    assert pool.stats() == BlockStats(free=8, cached=0, owned=0, leased=0, quarantined=0, total=8)
    assert pool.snapshot().hashes == ()


def test_names_are_limited_too(pool: BlockManager) -> None:
    cached_chain(pool, "a", 1)
    for i in range(MAX_NAMES):
        pool.pin(f"name {i}", chain("a", 1))
    with pytest.raises(PinLimit, match="one more than 1024 names"):
        pool.pin("one more", chain("a", 1))
    assert pool.pin("name 0", chain("a", 1)) == 1


def test_a_discarded_block_ends_the_pins_behind_it(pool: BlockManager) -> None:
    blocks = cached_chain(pool, "a", 4)
    pool.pin("system", chain("a", 3))

    assert pool.discard(blocks[1]).keys() == set(blocks[1:])

    assert pool.lookup(chain("a", 4)) == blocks[:1]
    assert (pool.stats().pinned, pool.stats().damaged) == (1, 1)
    assert pool.num_allocatable == NUM_BLOCKS - 1
