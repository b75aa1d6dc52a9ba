"""What users of other engines' prefix caches rely on, at the sizes at which those engines test it: blocks of 16 tokens.

Content hashes are ours, and no block of ours is reserved as a null block, so ids begin at 0.
"""

from __future__ import annotations

import pytest
from block_follower import BlockFollower
from factories import fake_identity
from table_model import TableModel

from engine.block_events import Cleared, Removed, Stored
from engine.block_hash import block_chain, pack_tokens

SIZE = 16
COMMON = [token for token in range(3) for _ in range(SIZE)]
PROMPT = [*COMMON, *[3] * 7]  # 3 full blocks and 7 tokens


def model(num_blocks: int, **settings: bool) -> TableModel:
    return TableModel(num_blocks=num_blocks, block_size=SIZE, **settings)


def chain(tokens: list[int], scope: bytes = b"tenant") -> list[bytes]:
    return block_chain(fake_identity(SIZE).root(scope), pack_tokens(tokens), SIZE)


def test_only_full_blocks_of_a_prompt_have_hashes() -> None:
    tables = model(10)
    request = tables.admit(PROMPT, max_tokens=1)
    tables.compute(request)
    assert request.num_cached_tokens == 0
    assert request.block_table == [0, 1, 2, 3]
    assert request.block_hashes == chain(COMMON)
    assert not tables.pool.is_registered(3)
    assert [tables.pool.references(block) for block in range(4)] == [1] * 4
    tables.check()


def test_a_second_request_shares_the_full_blocks_of_a_live_one() -> None:
    tables = model(10)
    tables.compute(tables.admit(PROMPT, max_tokens=1))
    second = tables.admit([*COMMON, *[4] * 5], max_tokens=1)
    assert second.num_cached_tokens == 48
    assert second.block_table == [0, 1, 2, 4]
    assert [tables.pool.references(block) for block in range(5)] == [2, 2, 2, 1, 1]
    assert tables.pool.stats().free == 5
    tables.check()


def test_decode_fills_the_last_block_before_it_takes_another() -> None:
    tables = model(10)
    request = tables.admit(PROMPT, max_tokens=1)
    tables.compute(request)
    assert tables.append(request, *[5] * 4)
    assert len(request.block_table) == 4
    assert not tables.pool.is_registered(request.block_table[3])
    assert tables.append(request, *[6] * 19)
    assert len(request.block_table) == 5
    assert tables.pool.is_registered(request.block_table[3])
    assert not tables.pool.is_registered(request.block_table[4])
    tables.check()


def test_a_block_that_is_reused_loses_its_hash() -> None:
    tables = model(1)
    first = tables.admit([7] * 16, max_tokens=1)
    tables.compute(first)
    tables.free(first)
    assert tables.pool.stats().cached == 1
    second = tables.admit([7] * 15, max_tokens=1)
    assert second.num_cached_tokens == 0
    assert tables.pool.lookup(chain([7] * 16)) == []
    tables.check()


def test_the_block_that_was_just_hit_is_not_the_one_evicted() -> None:
    tables = model(2)
    for tokens in ([1] * 16, [2] * 16):
        request = tables.admit(tokens, max_tokens=1)
        tables.compute(request)
        tables.free(request)
    both = tables.admit([1] * 16 + [2] * 16, max_tokens=1)
    assert both.num_cached_tokens == 16
    assert tables.pool.lookup(chain([1] * 16)) == both.block_table[:1]
    assert tables.pool.lookup(chain([2] * 16)) == []
    tables.check()


def test_without_caching_nothing_is_hit_and_a_full_pool_refuses() -> None:
    tables = TableModel(num_blocks=4, block_size=4, caching=False)
    first = tables.admit(list(range(10)), max_tokens=1)
    assert len(first.block_table) == 3
    tables.compute(first)
    tables.free(first)
    second = tables.admit(list(range(16)), max_tokens=1)
    tables.compute(second)
    assert (len(second.block_table), second.num_cached_tokens) == (4, 0)
    assert not tables.append(second, 16)
    assert len(second.block_table) == 4
    tables.check()


def test_the_cache_is_reset_only_when_no_block_is_live() -> None:
    tables = model(10)
    live = tables.admit(PROMPT, max_tokens=1)
    tables.compute(live)
    done = tables.admit([9] * 20, max_tokens=1)
    tables.compute(done)
    tables.free(done)
    assert not tables.pool.reset_prefix_cache()
    assert len(tables.pool.lookup(chain(COMMON))) == 3
    tables.free(live)
    assert tables.pool.reset_prefix_cache()
    assert tables.pool.lookup(chain(COMMON)) == []
    assert not any(tables.pool.is_registered(block) for block in range(10))
    assert tables.pool.stats().free == 10
    tables.check()


@pytest.mark.parametrize(("scope", "cached"), [(b"one", 48), (b"two", 0)])
def test_a_hit_stays_within_its_scope(scope: bytes, cached: int) -> None:
    tables = model(10)
    tables.compute(tables.admit(PROMPT, max_tokens=1, scope=b"one"))
    second = tables.admit([*COMMON, *[4] * 5], max_tokens=1, scope=scope)
    assert second.num_cached_tokens == cached
    tables.check()


def test_equal_tokens_at_another_position_hash_differently() -> None:
    hashes = chain([1] * 48)
    assert len(set(hashes)) == 3
    assert chain([1] * 16) == hashes[:1]
    assert not set(chain([2] * 16 + [1] * 32)) & set(hashes)


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_events_tell_what_is_resident(num_blocks: int) -> None:
    tables, follower = model(num_blocks), BlockFollower()
    prompts = [[i + base for i in range(num_blocks * SIZE)] for base in (0, 1000)]

    first = tables.admit(prompts[0], max_tokens=1)
    tables.compute(first)
    batch = tables.pool.take_events()
    (stored,) = batch.events
    assert isinstance(stored, Stored)
    assert stored.hashes == tuple(chain(prompts[0]))
    assert tables.pool.take_events().events == ()
    follower.apply(batch)

    tables.free(first)
    second = tables.admit(prompts[1], max_tokens=1)
    tables.compute(second)
    batch = tables.pool.take_events()
    follower.apply(batch)
    removed, stored = batch.events
    assert isinstance(removed, Removed)
    assert isinstance(stored, Stored)
    assert removed.hashes == tuple(reversed(chain(prompts[0])))
    assert stored.hashes == tuple(chain(prompts[1]))
    assert list(follower.resident) == chain(prompts[1])

    tables.free(second)
    assert tables.pool.reset_prefix_cache()
    batch = tables.pool.take_events()
    assert [type(event) for event in batch.events] == [Cleared]
    follower.apply(batch)
    assert follower.resident == {}
    tables.check()


def test_the_same_prompt_again_stores_only_the_block_that_it_computed_again() -> None:
    tables = model(4)
    for _ in range(2):
        request = tables.admit([*COMMON, *[3] * 16], max_tokens=1)
        tables.compute(request)
        tables.free(request)
        batch = tables.pool.take_events()
    removed, stored = batch.events
    assert isinstance(removed, Removed)
    assert isinstance(stored, Stored)
    assert removed.hashes == stored.hashes == (chain([*COMMON, *[3] * 16])[3],)
    assert stored.parent == chain(COMMON)[2]
    tables.check()
