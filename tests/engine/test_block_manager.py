from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from block_chains import chain, register

from engine.block_manager import BlockManager, BlockStats
from engine.config import CacheConfig
from engine.errors import InternalError, NoFreeBlocks

NUM_BLOCKS = 8


@pytest.fixture
def copies() -> list[tuple[int, int]]:
    """(source, target) of each copy that a test's pool makes."""
    return []


@pytest.fixture
def pool(copies: list[tuple[int, int]]) -> Iterator[BlockManager]:
    config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=4)
    pool = BlockManager(config, copy_block=lambda source, target: copies.append((source, target)))
    yield pool
    pool.check_integrity()
    assert sum([getattr(pool.stats(), n) for n in ("free", "cached", "owned", "leased", "quarantined")]) == NUM_BLOCKS


def test_failed_allocation_leaves_the_pool_unchanged(pool: BlockManager) -> None:
    pool.allocate(5)
    before = pool.stats()
    with pytest.raises(NoFreeBlocks, match="need 4 blocks, 3 of 8 free"):
        pool.allocate(4)
    assert pool.stats() == before
    assert len(pool.allocate(3)) == 3


def test_a_released_block_without_hash_is_free(pool: BlockManager) -> None:
    pool.release(pool.allocate(3))
    assert pool.stats() == BlockStats(free=8, cached=0, owned=0, leased=0, quarantined=0, total=8)


def test_a_released_block_with_hash_is_found_again_with_its_content(pool: BlockManager) -> None:
    blocks = pool.allocate(3)
    register(pool, blocks, chain("a", 3))
    pool.release(blocks)
    assert pool.stats().cached == 3
    assert pool.lookup(chain("a", 3)) == blocks
    pool.acquire(blocks)
    assert pool.stats().owned == 3


def test_lookup_stops_at_the_first_gap(pool: BlockManager) -> None:
    blocks = pool.allocate(2)
    register(pool, blocks, chain("a", 2))
    assert pool.lookup([*chain("a", 1), b"unknown", chain("a", 2)[1]]) == blocks[:1]


def test_lookup_pins_nothing(pool: BlockManager) -> None:
    block = pool.allocate(1)
    register(pool, block, [b"a"])
    pool.release(block)
    pool.lookup([b"a"])
    assert len(pool.allocate(8)) == 8
    assert pool.lookup([b"a"]) == []


def test_free_blocks_are_taken_before_cached_ones(pool: BlockManager) -> None:
    block = pool.allocate(1)
    register(pool, block, [b"a"])
    pool.release(block)
    assert block[0] not in pool.allocate(7)
    assert pool.lookup([b"a"]) == block


def test_of_a_chain_released_together_the_deepest_is_evicted_first(pool: BlockManager) -> None:
    blocks = pool.allocate(4)
    register(pool, blocks, chain("a", 4))
    pool.release(blocks)
    pool.allocate(6)  # 4 free ones and 2 of the chain
    assert pool.lookup(chain("a", 4)) == blocks[:2]


def test_the_least_recently_released_chain_is_evicted_first(pool: BlockManager) -> None:
    first, second = pool.allocate(2), pool.allocate(2)
    register(pool, first, chain("a", 2))
    register(pool, second, chain("b", 2))
    pool.release(first)
    pool.release(second)
    pool.acquire(first)  # used again: now the second is the older one
    pool.release(first)
    pool.allocate(6)
    assert pool.lookup(chain("a", 2)) == first
    assert pool.lookup(chain("b", 2)) == []


def test_a_shared_block_stays_until_its_last_holder_lets_go(pool: BlockManager) -> None:
    blocks = pool.allocate(1)
    register(pool, blocks, [b"a"])
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.stats().owned == 1
    with pytest.raises(NoFreeBlocks):
        pool.allocate(8)
    pool.release(blocks)
    assert pool.stats().cached == 1


def test_the_first_block_with_a_content_keeps_the_hash(pool: BlockManager) -> None:
    first, second = pool.allocate(2)
    assert pool.register(first, b"a", None) == first
    assert pool.register(second, b"a", None) == first
    assert pool.register(first, b"a", None) == first
    pool.release([second])
    assert pool.stats().free == 7
    assert pool.lookup([b"a"]) == [first]


def test_registering_under_a_second_hash_is_refused(pool: BlockManager) -> None:
    (block,) = pool.allocate(1)
    pool.register(block, b"a", None)
    with pytest.raises(InternalError, match="another hash"):
        pool.register(block, b"b", None)
    assert pool.lookup([b"b"]) == []


def test_each_hand_out_has_its_own_generation(pool: BlockManager) -> None:
    (block,) = pool.allocate(1)
    first = pool.generation(block)
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert pool.generation(block) == first + 1


def test_finding_a_block_by_hash_is_no_hand_out(pool: BlockManager) -> None:
    blocks = pool.allocate(1)
    register(pool, blocks, [b"a"])
    before = pool.generation(blocks[0])
    pool.release(blocks)
    pool.acquire(blocks)
    assert pool.generation(blocks[0]) == before


def test_a_failed_release_releases_nothing(pool: BlockManager) -> None:
    held = pool.allocate(2)
    with pytest.raises(InternalError, match="has no holder"):
        pool.release([*held, 7])
    with pytest.raises(InternalError, match="named twice"):
        pool.release([held[0], held[0]])
    assert pool.stats().owned == 2


def test_a_leased_block_is_neither_released_nor_registered_nor_shared(pool: BlockManager) -> None:
    blocks = pool.allocate(2)
    pool.lease(blocks)
    assert pool.stats().leased == 2
    with pytest.raises(InternalError, match="leased"):
        pool.release(blocks)
    with pytest.raises(InternalError, match="leased"):
        pool.register(blocks[0], b"a", None)
    with pytest.raises(InternalError, match="still to arrive"):
        pool.acquire(blocks)
    pool.unlease(blocks)
    assert pool.stats().owned == 2


def test_a_block_that_others_can_find_cannot_be_leased(pool: BlockManager) -> None:
    blocks = pool.allocate(2)
    pool.register(blocks[1], b"a", None)
    with pytest.raises(InternalError, match="cannot be leased"):
        pool.lease(blocks)
    assert pool.stats().leased == 0


def test_a_quarantined_block_is_not_reused_before_it_is_quiet(pool: BlockManager) -> None:
    blocks = pool.allocate(3)
    pool.lease(blocks)
    pool.quarantine(blocks)
    assert (pool.stats().quarantined, pool.stats().leased) == (3, 0)
    assert not set(blocks) & set(pool.allocate(5))
    pool.unquarantine(blocks)
    assert pool.stats().free == 3


def test_a_quarantined_block_with_content_is_shared_and_outlives_its_new_holder(pool: BlockManager) -> None:
    blocks = pool.allocate(1)
    register(pool, blocks, [b"a"])
    pool.quarantine(blocks)
    pool.acquire(pool.lookup([b"a"]))
    assert pool.stats().owned == 1
    pool.release(blocks)
    assert pool.stats().quarantined == 1
    pool.unquarantine(blocks)
    assert pool.stats().cached == 1


def test_a_block_in_quarantine_for_two_requests_needs_two_words(pool: BlockManager) -> None:
    blocks = pool.allocate(1)
    register(pool, blocks, [b"a"])
    pool.acquire(blocks)
    pool.quarantine(blocks)
    pool.quarantine(blocks)
    pool.unquarantine(blocks)
    assert pool.stats().quarantined == 1
    pool.unquarantine(blocks)
    assert pool.stats().cached == 1
    with pytest.raises(InternalError, match="not in quarantine"):
        pool.unquarantine(blocks)


def test_can_allocate_does_not_count_what_is_kept(pool: BlockManager) -> None:
    blocks = pool.allocate(3)
    register(pool, blocks, chain("a", 3))
    pool.release(blocks)
    assert pool.can_allocate(8)
    assert pool.can_allocate(5, keeping=blocks)
    assert not pool.can_allocate(6, keeping=blocks)


def test_a_block_of_one_holder_is_written_in_place(pool: BlockManager, copies: list[tuple[int, int]]) -> None:
    (block,) = pool.allocate(1)
    assert pool.is_writable(block)
    assert pool.copy_on_write(block) == block
    assert copies == []


def test_each_writer_but_the_last_gets_a_copy(pool: BlockManager, copies: list[tuple[int, int]]) -> None:
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.acquire([block])
    assert pool.stats().copies_avoided == 2
    written = [pool.copy_on_write(block) for _ in range(3)]
    assert written[2] == block
    assert copies == [(block, written[0]), (block, written[1])]
    assert len(set(written)) == 3
    assert (pool.stats().owned, pool.stats().copies, pool.stats().copies_avoided) == (3, 2, 0)


def test_a_block_that_others_can_find_is_copied_and_stays(pool: BlockManager) -> None:
    (block,) = pool.allocate(1)
    register(pool, [block], [b"a"])
    copy = pool.copy_on_write(block)
    assert copy != block
    assert pool.lookup([b"a"]) == [block]
    assert (pool.stats().owned, pool.stats().cached) == (1, 1)


def test_a_block_that_a_link_still_reads_is_copied(pool: BlockManager) -> None:
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.quarantine([block])
    assert pool.copy_on_write(block) != block
    assert pool.stats().quarantined == 1
    pool.unquarantine([block])


def test_without_room_for_a_copy_nothing_changes(pool: BlockManager) -> None:
    blocks = pool.allocate(NUM_BLOCKS)
    pool.acquire(blocks[:1])
    before = pool.stats()
    with pytest.raises(NoFreeBlocks):
        pool.copy_on_write(blocks[0])
    assert pool.stats() == before


def test_a_copy_that_fails_costs_no_block() -> None:
    def fail(source: int, target: int) -> None:
        raise OSError(f"cannot copy {source} to {target}")

    pool = BlockManager(CacheConfig(num_blocks=4), copy_block=fail)
    blocks = pool.allocate(1)
    pool.acquire(blocks)
    with pytest.raises(OSError, match="cannot copy"):
        pool.copy_on_write(blocks[0])
    assert (pool.stats().free, pool.references(blocks[0])) == (3, 2)
    pool.check_integrity()


def test_a_pool_that_cannot_copy_says_so() -> None:
    pool = BlockManager(CacheConfig(num_blocks=4))
    blocks = pool.allocate(1)
    pool.acquire(blocks)
    with pytest.raises(InternalError, match="without a way to copy"):
        pool.copy_on_write(blocks[0])
    assert pool.stats().owned == 1


def test_a_block_whose_kv_is_still_to_arrive_is_not_written(pool: BlockManager) -> None:
    blocks = pool.allocate(1)
    pool.lease(blocks)
    with pytest.raises(InternalError, match="still to arrive"):
        pool.copy_on_write(blocks[0])


def test_a_block_without_its_parent_is_not_registered(pool: BlockManager) -> None:
    (block,) = pool.allocate(1)
    assert pool.register(block, b"ab", b"a") == block
    assert not pool.is_registered(block)
    assert pool.lookup([b"ab"]) == []


def test_with_an_evicted_block_those_that_continue_it_cannot_be_found_any_more() -> None:
    """Only a window gives blocks up before what continues them."""
    pool = BlockManager(CacheConfig(num_blocks=4, sliding_window=1))
    blocks = pool.allocate(3)
    register(pool, blocks, chain("a", 3))
    pool.release(blocks[:1])
    pool.allocate(2)
    assert pool.lookup(chain("a", 3)) == []
    assert not pool.is_registered(blocks[2])
    pool.release(blocks[1:])
    assert (pool.stats().free, pool.stats().cached) == (2, 0)
    pool.check_integrity()


def test_of_blocks_that_leave_a_window_the_deeper_is_evicted_first() -> None:
    pool = BlockManager(CacheConfig(num_blocks=4, sliding_window=1))
    blocks = pool.allocate(4)
    register(pool, blocks, chain("a", 4))
    for block in blocks[:3]:
        pool.release([block])
    pool.allocate(2)
    assert pool.lookup(chain("a", 4)) == blocks[:1]
    pool.check_integrity()


def test_a_cached_block_whose_parent_is_evicted_is_free() -> None:
    """Three blocks of a chain, held by one that gives back the first and the second, and by one that gives back all."""
    pool = BlockManager(CacheConfig(num_blocks=3, sliding_window=1))
    blocks = pool.allocate(3)
    register(pool, blocks, chain("a", 3))
    pool.acquire(blocks[1:2])
    pool.release(blocks[:1])
    pool.release(blocks[1:])
    pool.release(blocks[1:2])  # evicted before its parent, and here before what continues it
    pool.allocate(1)
    assert pool.lookup(chain("a", 3)) == blocks[:1]
    assert (pool.stats().cached, pool.stats().free) == (1, 1)
    pool.check_integrity()


MISUSE: dict[str, Callable[[BlockManager, int], object]] = {
    "can_allocate": lambda pool, block: pool.can_allocate(1, keeping=[block]),
    "generation": lambda pool, block: pool.generation(block),
    "references": lambda pool, block: pool.references(block),
    "acquire": lambda pool, block: pool.acquire([0, block]),
    "release": lambda pool, block: pool.release([0, block]),
    "is_writable": lambda pool, block: pool.is_writable(block),
    "copy_on_write": lambda pool, block: pool.copy_on_write(block),
    "register": lambda pool, block: pool.register(block, b"new", None),
    "lease": lambda pool, block: pool.lease([0, block]),
    "unlease": lambda pool, block: pool.unlease([1, block]),
    "quarantine": lambda pool, block: pool.quarantine([0, block]),
    "unquarantine": lambda pool, block: pool.unquarantine([2, block]),
}


@pytest.mark.parametrize("block", [-1, -NUM_BLOCKS, NUM_BLOCKS, -NUM_BLOCKS - 1])
@pytest.mark.parametrize("last", ["held", "leased", "quarantined", "cached"])
@pytest.mark.parametrize("call", MISUSE)
def test_a_block_that_the_pool_has_not_is_refused_before_anything_changes(
    pool: BlockManager, call: str, last: str, block: int
) -> None:
    """A negative id would be one of the last blocks, whatever may be done with those."""
    blocks = sorted(pool.allocate(NUM_BLOCKS))
    pool.lease(blocks[1:2])
    pool.quarantine(blocks[2:3])
    register(pool, blocks[3:4], [b"a"])
    if last == "leased":
        pool.lease(blocks[-1:])
    elif last == "quarantined":
        pool.quarantine(blocks[-1:])
    elif last == "cached":
        register(pool, blocks[-1:], [b"b"])
        pool.release(blocks[-1:])
    before = pool.stats(), [pool.references(b) for b in blocks], pool.lookup([b"new"])

    with pytest.raises(InternalError):
        MISUSE[call](pool, block)

    assert (pool.stats(), [pool.references(b) for b in blocks], pool.lookup([b"new"])) == before
