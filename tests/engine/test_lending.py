from __future__ import annotations

import numpy as np
import pytest

from engine.block_manager import BlockManager
from engine.config import CacheConfig
from engine.errors import InternalError
from engine.lending import LendingBlockManager

NUM_BLOCKS = 8


class Pool:
    """A lending pool of 8 blocks, and what peers see of it."""

    def __init__(self, max_lent: int = NUM_BLOCKS) -> None:
        self.seen = np.zeros(NUM_BLOCKS, dtype=np.uint64)
        self.num_fences = 0
        self.blocks: LendingBlockManager = LendingBlockManager(
            CacheConfig(num_blocks=NUM_BLOCKS, block_size=4),
            generations=self.seen,
            fence=self._fence,
            max_lent=max_lent,
        )

    def _fence(self) -> None:
        self.num_fences += 1

    def chain(self, name: str, length: int) -> list[int]:
        """A held chain of blocks, registered."""
        held = self.blocks.allocate(length)
        hashes = [f"{name}{i}".ljust(32).encode() for i in range(length)]
        for i, block in enumerate(held):
            self.blocks.register(block, hashes[i], hashes[i - 1] if i else None)
        return held

    def lent(self, key: str, length: int) -> list[int]:
        """A chain that only a loan holds."""
        blocks = self.chain(key, length)
        assert self.blocks.lend(key, blocks, length)
        self.blocks.release(blocks)
        return blocks


def test_a_new_generation_is_seen_before_a_slot_is_handed_out() -> None:
    pool = Pool()

    blocks = pool.blocks.allocate(2)

    assert [int(pool.seen[block]) for block in blocks] == [1, 1]
    assert pool.num_fences == 1


def test_a_lent_block_outlives_all_cached_ones() -> None:
    pool = Pool()
    lent = pool.lent("a", 3)
    cached = pool.chain("b", 5)
    pool.blocks.release(cached)

    taken = pool.blocks.allocate(5)

    assert set(taken) == set(cached)
    assert pool.blocks.lookup([b"a0".ljust(32)]) == lent[:1]
    pool.blocks.check_integrity()


def test_lent_blocks_keep_nobody_waiting_and_the_oldest_loan_goes_first() -> None:
    pool = Pool()
    first, second = pool.lent("a", 3), pool.lent("b", 3)
    assert pool.blocks.num_allocatable == NUM_BLOCKS
    before = pool.seen.copy()

    taken = pool.blocks.allocate(5)

    assert set(first) <= set(taken)
    assert all(pool.seen[block] > before[block] for block in first)
    assert all(pool.seen[block] == before[block] for block in second)
    pool.blocks.check_integrity()


def test_a_block_that_a_request_holds_is_not_taken_with_its_loan() -> None:
    pool = Pool()
    blocks = pool.chain("a", 3)
    assert pool.blocks.lend("a", blocks, 3)

    assert pool.blocks.num_allocatable == NUM_BLOCKS - 3
    assert set(pool.blocks.allocate(5)).isdisjoint(blocks)
    pool.blocks.check_integrity()


def test_what_is_given_back_is_cached_as_before() -> None:
    pool = Pool()
    pool.lent("a", 3)
    pool.blocks.end_loan("a", 1)
    assert pool.blocks.stats().lent == 3

    pool.blocks.end_loan("a", 2)

    assert pool.blocks.stats().lent == 0
    assert (pool.blocks.stats().free, pool.blocks.stats().cached) == (5, 3)
    pool.blocks.check_integrity()


def test_a_loan_holds_what_its_blocks_follow_so_that_none_is_evicted_after_it() -> None:
    pool = Pool()
    blocks = pool.chain("a", 3)
    assert pool.blocks.lend("a", blocks, 1)  # the last of them alone
    pool.blocks.release(blocks)
    pool.blocks.end_loan("a", 1)

    pool.blocks.check_integrity()
    assert pool.blocks.allocate(6)[-1] == blocks[-1]


def test_a_loan_grows_while_its_prompt_is_computed() -> None:
    pool = Pool()
    blocks = pool.chain("a", 3)
    assert pool.blocks.lend("a", blocks[:2], 2)
    assert pool.blocks.lend("a", blocks, 1)
    pool.blocks.release(blocks)

    pool.blocks.end_loan("a", 3)

    assert pool.blocks.stats().lent == 0
    pool.blocks.check_integrity()


def test_beyond_the_limit_nothing_is_lent() -> None:
    pool = Pool(max_lent=4)
    pool.lent("a", 3)
    blocks = pool.chain("b", 2)

    assert not pool.blocks.lend("b", blocks, 2)
    assert pool.blocks.lend("b", blocks[:1], 1)
    assert pool.blocks.stats().lent == 4


def test_a_block_in_two_loans_counts_once() -> None:
    pool = Pool(max_lent=3)
    blocks = pool.chain("a", 3)

    assert pool.blocks.lend("a", blocks, 3)
    assert pool.blocks.lend("b", blocks, 3)
    pool.blocks.release(blocks)
    pool.blocks.end_loan("a", 3)

    assert pool.blocks.stats().lent == 3
    pool.blocks.check_integrity()


def test_a_loan_that_was_taken_back_may_still_be_given_back_and_grows_no_more() -> None:
    pool = Pool()
    pool.lent("a", 3)
    blocks = pool.blocks.allocate(NUM_BLOCKS)

    assert not pool.blocks.lend("a", blocks[:1], 1)
    pool.blocks.end_loan("a", 3)

    with pytest.raises(InternalError, match="come back, 0 are lent"):
        pool.blocks.end_loan("a", 1)


@pytest.mark.parametrize("count", [4, 100])
def test_giving_back_more_than_was_lent_is_refused(count: int) -> None:
    pool = Pool()
    pool.lent("a", 3)

    with pytest.raises(InternalError, match="loan 'a' come back, 3 are lent"):
        pool.blocks.end_loan("a", count)

    pool.blocks.check_integrity()


def test_pinned_blocks_are_not_taken_with_their_loan() -> None:
    pool = Pool()
    blocks = pool.chain("a", 2)
    assert pool.blocks.pin("p", [b"a0".ljust(32), b"a1".ljust(32)]) == 2
    assert pool.blocks.lend("a", blocks, 2)
    pool.blocks.release(blocks)
    assert pool.blocks.num_allocatable == NUM_BLOCKS - 2

    pool.blocks.unpin("p")

    assert pool.blocks.num_allocatable == NUM_BLOCKS
    pool.blocks.check_integrity()


def test_a_pool_that_lends_nothing_is_as_any_other() -> None:
    lending, plain = Pool().blocks, BlockManager(CacheConfig(num_blocks=NUM_BLOCKS, block_size=4))

    for pool in (lending, plain):
        blocks = pool.allocate(3)
        pool.release(blocks)

    assert lending.stats() == plain.stats()


def test_a_discarded_block_is_seen_by_whoever_borrowed_it_and_what_follows() -> None:
    pool = Pool()
    lent = pool.lent("a", 3)
    before = pool.seen.copy()

    discarded = pool.blocks.discard(lent[1])

    assert discarded.keys() == set(lent[1:])
    assert (pool.seen != before).nonzero()[0].tolist() == sorted(lent[1:])
    assert pool.blocks.lookup([f"a{i}".ljust(32).encode() for i in range(3)]) == lent[:1]
    pool.blocks.check_integrity()
    pool.blocks.end_loan("a", 3)
    pool.blocks.check_integrity()
