from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from index_implementations import IMPLEMENTATIONS, make
from key_trees import Path, PathKeys, keys_of, prefixes

from engine.errors import ConfigError, ProtocolError
from engine.routing_key import SHORT_BITS, RoutingKeys
from router.prefix_index import (
    MAX_KEYS,
    MAX_MATCHES,
    NUM_SHARDS,
    PACK_EVERY,
    Match,
    PackedKeys,
    PrefixIndex,
    pack_keys,
)

MIB = 1 << 20


@pytest.fixture(params=IMPLEMENTATIONS)
def index(request: pytest.FixtureRequest) -> Iterator[PrefixIndex]:
    index = make(request.param, 8 * MIB)
    yield index
    index.check_integrity()


def path(length: int, *, last: int = 0) -> Path:
    return (1,) * (length - 1) + (last,)


def hold(index: PrefixIndex, prompt: Path) -> int:
    slot = index.add_worker()
    index.store(slot, keys_of(prefixes(prompt)))
    return slot


def lookup(index: PrefixIndex, prompt: Path, now: float = 0.0) -> list[Match]:
    return index.lookup(PathKeys(prompt), now)


def sweep(index: PrefixIndex) -> None:
    for _ in range(NUM_SHARDS):
        index.maintain()


def test_each_worker_is_told_with_the_depth_to_which_it_holds_the_prompt(index: PrefixIndex) -> None:
    whole, half = hold(index, path(100)), hold(index, path(100)[:50])
    hold(index, (2,) * 100)
    assert lookup(index, path(100)) == [Match(100, 1 << whole), Match(50, 1 << half)]
    assert lookup(index, (*path(60)[:59], 7)) == [Match(59, 1 << whole), Match(50, 1 << half)]
    assert lookup(index, (3,) * 10) == []
    assert lookup(index, ()) == []


def test_a_lookup_works_out_few_keys(index: PrefixIndex) -> None:
    hold(index, (1,) * 512)
    keys = PathKeys((1,) * 512)
    assert index.lookup(keys, 0.0)[0].num_blocks == 512
    assert keys.num_probed <= 11


def test_only_the_deepest_matches_are_told(index: PrefixIndex) -> None:
    for depth in range(1, MAX_MATCHES + 10):
        hold(index, (1,) * depth)
    depths = [match.num_blocks for match in lookup(index, (1,) * 100)]
    assert depths == list(range(MAX_MATCHES + 9, 9, -1))


def test_storing_and_removing_tell_what_they_changed(index: PrefixIndex) -> None:
    slot, other = index.add_worker(), index.add_worker()
    assert index.store(slot, [1, 2, 3]) == 6
    assert index.store(slot, [2, 3, 4]) == 4
    assert index.store(other, [4]) == 4
    assert index.remove(slot, [4, 5]) == 4
    assert index.remove(slot, [4]) == 0
    assert sorted(index.resident(slot)) == [1, 2, 3]
    assert list(index.resident(other)) == [4]
    assert index.stats().keys == 4


def test_a_dropped_worker_is_gone_at_once_and_its_slot_is_not_reused_before_the_sweep(index: PrefixIndex) -> None:
    slot = hold(index, path(20))
    stays = hold(index, path(20)[:10])
    index.drop_worker(slot)
    assert lookup(index, path(20)) == [Match(10, 1 << stays)]
    assert list(index.resident(slot)) == []
    assert index.add_worker() not in (slot, stays)
    sweep(index)
    assert index.stats().keys == 10
    assert index.add_worker() == slot
    assert list(index.resident(slot)) == []


def test_without_a_free_slot_the_dead_ones_are_swept(index: PrefixIndex) -> None:
    for _ in range(2000):
        index.drop_worker(hold(index, (1, 2)))
    slot = hold(index, (1, 2))
    assert lookup(index, (1, 2)) == [Match(2, 1 << slot)]


def test_over_the_budget_the_keys_used_longest_ago_go(index: PrefixIndex) -> None:
    max_keys = index.stats().max_bytes // index.BYTES_PER_KEY
    slot, hot = index.add_worker(), list(range(2**40, 2**40 + 2 * NUM_SHARDS))
    index.store(slot, hot)
    for start in range(0, 3 * max_keys, 1000):
        index.store(slot, range(start, start + 1000))
        assert index.store(slot, hot) == 0, "a key that is used all the time was dropped"
        assert index.stats().keys <= max_keys
    stats = index.stats()
    assert stats.evictions > 2 * max_keys
    assert stats.num_bytes < stats.max_bytes
    assert set(hot) <= set(index.resident(slot))
    assert 0 not in set(index.resident(slot))


def test_what_a_dispatched_prompt_uses_is_not_evicted(index: PrefixIndex) -> None:
    max_keys = index.stats().max_bytes // index.BYTES_PER_KEY
    slot = index.add_worker()
    hot = keys_of(prefixes((1,) * 40))
    index.store(slot, hot)
    for start in range(0, 3 * max_keys, 1000):
        index.store(slot, range(start, start + 1000))
        index.speculate(slot, hot, now=0.0)
    assert lookup(index, (1,) * 40, now=1000.0) == [Match(40, 1 << slot)]


def test_dispatched_work_counts_for_a_while(index: PrefixIndex) -> None:
    slot = index.add_worker()
    index.speculate(slot, keys_of(prefixes(path(30))), now=100.0)
    assert lookup(index, path(30), 109.9) == [Match(30, 1 << slot)]
    assert lookup(index, path(30), 120.0) == []
    assert index.stats().keys == 0


def test_dispatched_work_of_a_dropped_worker_does_not_count(index: PrefixIndex) -> None:
    slot = index.add_worker()
    index.speculate(slot, keys_of(prefixes(path(30))), now=0.0)
    index.drop_worker(slot)
    sweep(index)
    index.maintain()
    assert lookup(index, path(30), 1.0) == []


def test_speculation_is_bounded(index: PrefixIndex) -> None:
    slot = index.add_worker()
    room = index.stats().max_bytes // index.BYTES_PER_KEY
    index.speculate(slot, range(room), now=0.0)
    assert 0 < index.stats().speculative_keys <= room // 5


def test_tables_that_grew_wide_are_packed(index: PrefixIndex) -> None:
    slot = index.add_worker()
    few, many = list(range(4000)), list(range(4000, 24_000))
    index.store(slot, few)
    filled = index.stats().num_bytes
    index.store(slot, many)
    index.remove(slot, many)
    loose = index.stats().num_bytes
    for _ in range(PACK_EVERY):
        sweep(index)
    assert index.stats().num_bytes < min(2 * filled, 0.8 * loose)
    assert sorted(index.resident(slot)) == few


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_budget_without_room_for_the_tables_is_refused(implementation: type[PrefixIndex]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        make(implementation, implementation.least_bytes() - 1)


def test_a_change_tells_what_it_was_in_keys_and_their_sum(index: PrefixIndex) -> None:
    slot = index.add_worker()
    assert index.apply(slot, pack_keys([9]), pack_keys([1, 2, 3])) == (6, 3)
    assert index.apply(slot, pack_keys([2, 3]), pack_keys([3, 7])) == (5, 0)
    assert index.apply(slot, pack_keys([1, 3, 7]), b"") == (2**64 - 11, -3)


@pytest.mark.parametrize(
    ("removed", "stored"),
    [(b"1234567", b""), (b"", pack_keys([5, 2**60])), (pack_keys([2**63]), b""), (b"", bytes(8 * MAX_KEYS + 8))],
)
def test_keys_that_cannot_be_change_nothing(index: PrefixIndex, removed: bytes, stored: bytes) -> None:
    slot = hold(index, path(5))
    with pytest.raises(ProtocolError):
        index.apply(slot, removed, stored)
    assert sorted(index.resident(slot)) == sorted(keys_of(prefixes(path(5))))


def test_the_largest_change_is_taken(index: PrefixIndex) -> None:
    slot = index.add_worker()
    assert index.apply(slot, b"", pack_keys(range(MAX_KEYS)))[1] == MAX_KEYS
    assert index.stats().keys <= index.stats().max_bytes // index.BYTES_PER_KEY


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_public_tokens", [0, 100])
def test_prompts_are_looked_up_by_their_tokens(index: PrefixIndex, block_size: int, num_public_tokens: int) -> None:
    tokens = bytes(range(256)) * 4
    slot, half = index.add_worker(), 128 // block_size
    keys = RoutingKeys(7, b"scope", tokens, block_size, num_public_tokens)
    index.store(slot, keys.all_short()[:half])
    assert index.lookup(keys, 0.0) == [Match(half, 1 << slot)]
    assert index.lookup(PackedKeys(keys.all_short()), 0.0) == [Match(half, 1 << slot)]
    other = RoutingKeys(7, b"another", tokens, block_size, num_public_tokens)
    assert index.lookup(other, 0.0) == (
        [Match(num_public_tokens // block_size, 1 << slot)] if num_public_tokens else []
    )


@pytest.mark.parametrize("seed", range(30))
def test_with_holes_in_what_is_held_both_find_the_same_and_look_at_keys_of_the_prompt_only(seed: int) -> None:
    """As after an eviction."""
    rng = random.Random(seed)
    keys = [rng.getrandbits(SHORT_BITS) for _ in range(60)]
    found = []
    for implementation in IMPLEMENTATIONS:
        index, draw = make(implementation, 8 * MIB), random.Random(seed)
        for _ in range(40):
            index.store(index.add_worker(), draw.sample(keys, draw.randrange(60)))
        index.store(index.add_worker(), keys[:1])
        found.append([index.lookup(PackedKeys(keys[:n]), 0.0) for n in range(61)])
    assert found[0] == found[1]


def test_a_dispatched_prompt_counts_at_each_of_its_workers(index: PrefixIndex) -> None:
    slots = [index.add_worker(), index.add_worker()]
    keys = RoutingKeys(7, b"scope", bytes(range(256)) * 4, 16, num_public_tokens=40)
    index.speculate_prompt(slots, keys, now=0.0)
    assert index.lookup(keys, 1.0) == [Match(16, 3)]
    index.speculate_prompt([], keys, now=30.0)
    assert index.lookup(keys, 30.0) == []


def test_any_slot_can_hold_a_key_with_any_other(index: PrefixIndex) -> None:
    slots = [index.add_worker() for _ in range(130)]
    for slot in slots:
        index.store(slot, [slot, 1000])
    assert index.lookup(PackedKeys([1000]), 0.0) == [Match(1, sum(1 << slot for slot in slots))]
    for slot in slots[1:]:
        index.remove(slot, [1000])
    assert index.lookup(PackedKeys([1000]), 0.0) == [Match(1, 1 << slots[0])]


def test_a_slot_that_is_given_again_has_nothing_of_what_was_expected_of_the_last_one(index: PrefixIndex) -> None:
    gone = index.add_worker()
    index.speculate(gone, keys_of(prefixes(path(3))), now=0.0)
    index.drop_worker(gone)
    sweep(index)

    assert index.add_worker() == gone
    assert lookup(index, path(3)) == []
