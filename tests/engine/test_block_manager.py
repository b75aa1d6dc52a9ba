from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_manager import BlockManager, BlockStats
from engine.config import CacheConfig
from engine.errors import InternalError, NoFreeBlocks

NUM_BLOCKS = 8


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def register(pool: BlockManager, blocks: list[int], hashes: list[bytes]) -> None:
    for block, content_hash in zip(blocks, hashes, strict=True):
        assert pool.register(block, content_hash) == block


@pytest.fixture
def pool() -> Iterator[BlockManager]:
    pool = BlockManager(CacheConfig(num_blocks=NUM_BLOCKS, block_size=4))
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
    blocks = pool.allocate(3)
    hashes = chain("a", 3)
    register(pool, [blocks[0], blocks[2]], [hashes[0], hashes[2]])
    assert pool.lookup(hashes) == blocks[:1]


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
    assert pool.register(first, b"a") == first
    assert pool.register(second, b"a") == first
    assert pool.register(first, b"a") == first
    pool.release([second])
    assert pool.stats().free == 7
    assert pool.lookup([b"a"]) == [first]


def test_registering_under_a_second_hash_is_refused(pool: BlockManager) -> None:
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    with pytest.raises(InternalError, match="another hash"):
        pool.register(block, b"b")
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
        pool.register(blocks[0], b"a")
    with pytest.raises(InternalError, match="still to arrive"):
        pool.acquire(blocks)
    pool.unlease(blocks)
    assert pool.stats().owned == 2


def test_a_block_that_others_can_find_cannot_be_leased(pool: BlockManager) -> None:
    blocks = pool.allocate(2)
    pool.register(blocks[1], b"a")
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


class ObviousPool(RuleBasedStateMachine):
    """The block manager against a model that works everything out from two lists of holders, in whatever time."""

    @initialize()
    def build(self) -> None:
        self.pool = BlockManager(CacheConfig(num_blocks=NUM_BLOCKS, block_size=4))
        self.holders: list[list[int]] = []
        self.quarantines: list[list[int]] = []
        self.leased: set[int] = set()
        self.hash_of: dict[int, bytes] = {}
        self.released: list[int] = []  # with a hash and without a holder, in the order of release
        self.handed_out = [0] * NUM_BLOCKS

    def refs(self, block: int) -> int:
        return sum(block in blocks for blocks in self.holders + self.quarantines)

    def settle(self, blocks: list[int]) -> None:
        """After a reference was dropped from each of `blocks`, the last first."""
        self.released += [b for b in reversed(blocks) if self.refs(b) == 0 and b in self.hash_of]

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = {b for b in range(NUM_BLOCKS) if self.refs(b) == 0 and b not in self.hash_of}
        if count > len(free) + len(self.released):
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count)
            return
        num_evicted = max(0, count - len(free))
        evicted, self.released = self.released[:num_evicted], self.released[num_evicted:]
        blocks = self.pool.allocate(count)
        assert set(blocks) - free == set(evicted)
        for block in evicted:
            del self.hash_of[block]
        for block in blocks:
            self.handed_out[block] += 1
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.sampled_from("ab"))
    def register(self, data: st.DataObject, name: str) -> None:
        """A prefix of a holder's blocks turns out to hold a prefix of chain `name`."""
        blocks = data.draw(st.sampled_from(self.holders))
        for block, content_hash in zip(blocks, chain(name, 3), strict=False):
            if block in self.leased or block in self.hash_of:
                break
            first = next((b for b, h in self.hash_of.items() if h == content_hash), block)
            assert self.pool.register(block, content_hash) == first
            self.hash_of[first] = content_hash

    @rule(name=st.sampled_from("ab"))
    def share(self, name: str) -> None:
        block_of = {content_hash: block for block, content_hash in self.hash_of.items()}
        expected: list[int] = []
        for content_hash in chain(name, 3):
            if content_hash not in block_of:
                break
            expected.append(block_of[content_hash])
        assert self.pool.lookup(chain(name, 3)) == expected
        self.pool.acquire(expected)
        self.released = [b for b in self.released if b not in expected]
        self.holders.append(expected)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.holders) - 1))
        if self.leased & set(self.holders[i]):
            with pytest.raises(InternalError):
                self.pool.release(self.holders[i])
            return
        blocks = self.holders.pop(i)
        self.pool.release(blocks)
        self.settle(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        fit = [b for b in blocks if self.refs(b) == 1 and b not in self.hash_of and b not in self.leased]
        self.pool.lease(fit)
        self.leased |= set(fit)

    @rule()
    def unlease(self) -> None:
        self.pool.unlease(sorted(self.leased))
        self.leased.clear()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.quarantine(blocks)
        self.leased -= set(blocks)
        self.quarantines.append(blocks)

    @precondition(lambda self: self.quarantines)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        blocks = self.quarantines.pop(data.draw(st.integers(0, len(self.quarantines) - 1)))
        self.pool.unquarantine(blocks)
        self.settle(blocks)

    @invariant()
    def states_agree(self) -> None:
        self.pool.check_integrity()
        blocks = range(NUM_BLOCKS)
        held = {b for b in blocks if any(b in holder for holder in self.holders)}
        quarantined = {b for b in blocks if self.refs(b) > 0} - held
        assert self.pool.stats() == BlockStats(
            free=sum(self.refs(b) == 0 and b not in self.hash_of for b in blocks),
            cached=len(self.released),
            owned=len(held - self.leased),
            leased=len(self.leased),
            quarantined=len(quarantined),
            total=NUM_BLOCKS,
        )
        assert [self.pool.generation(b) for b in blocks] == self.handed_out
        assert [self.pool.references(b) for b in blocks] == [self.refs(b) for b in blocks]


ObviousPool.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAgainstAnObviousPool = ObviousPool.TestCase
