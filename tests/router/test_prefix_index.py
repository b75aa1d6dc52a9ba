from __future__ import annotations

from collections.abc import Iterator

import pytest
from key_trees import Path, PathKeys, keys_of, prefixes

from engine.errors import ConfigError
from router.prefix_index import BYTES_PER_KEY, MAX_MATCHES, NUM_SHARDS, PACK_EVERY, Match, PrefixIndex

MIB = 1 << 20


@pytest.fixture
def index() -> Iterator[PrefixIndex]:
    index = PrefixIndex(8 * MIB, speculation_s=10.0)
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
    max_keys = index.stats().max_bytes // BYTES_PER_KEY
    slot, hot = index.add_worker(), list(range(2**40, 2**40 + 2 * NUM_SHARDS))
    index.store(slot, hot)
    for start in range(0, 3 * max_keys, 1000):
        index.store(slot, range(start, start + 1000))
        index.store(slot, hot)
        assert index.stats().keys <= max_keys
    stats = index.stats()
    assert stats.evictions > 2 * max_keys
    assert stats.num_bytes < stats.max_bytes
    assert set(hot) <= set(index.resident(slot))
    assert 0 not in set(index.resident(slot))


def test_what_a_dispatched_prompt_uses_is_not_evicted(index: PrefixIndex) -> None:
    max_keys = index.stats().max_bytes // BYTES_PER_KEY
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
    room = index.stats().max_bytes // BYTES_PER_KEY
    index.speculate(slot, range(room), now=0.0)
    assert 0 < index.stats().speculative_keys <= room // 5


def test_tables_that_grew_wide_are_packed(index: PrefixIndex) -> None:
    slot = index.add_worker()
    keys = list(range(24_000))
    index.store(slot, keys)
    filled = index.stats().num_bytes
    for start in range(0, 24_000, 1000):  # other keys in their place, again and again
        for generation in range(1, 8):
            index.remove(slot, [key + (generation - 1) * 2**30 for key in keys[start : start + 1000]])
            index.store(slot, [key + generation * 2**30 for key in keys[start : start + 1000]])
    loose = index.stats().num_bytes
    for _ in range(PACK_EVERY):
        sweep(index)
    packed = index.stats().num_bytes
    assert packed < loose
    assert packed <= 1.05 * filled


def test_a_budget_without_room_for_the_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least"):
        PrefixIndex(NUM_SHARDS * BYTES_PER_KEY - 1)


def test_a_slot_that_is_given_again_has_nothing_of_what_was_expected_of_the_last_one(index: PrefixIndex) -> None:
    gone = index.add_worker()
    index.speculate(gone, keys_of(prefixes(path(3))), now=0.0)
    index.drop_worker(gone)
    sweep(index)

    assert index.add_worker() == gone
    assert lookup(index, path(3)) == []
