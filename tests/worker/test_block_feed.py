from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import pytest

from engine.block_events import BlockEvent, Cleared, Removed, Snapshot, Stored
from kvrelay.v1 import worker_pb2
from worker.block_feed import KEYS_PER_PART, MAX_WAITING_KEYS, BlockFeed, BlockOutbox


def names(keys: Iterable[int]) -> tuple[bytes, ...]:
    return tuple(struct.pack("<Q", key) for key in keys)


def stored(*keys: int) -> BlockEvent:
    return Stored(0, 0, None, names(keys))


def removed(*keys: int) -> BlockEvent:
    return Removed(0, 0, names(keys))


def unpack(packed: bytes) -> set[int]:
    return set(struct.unpack(f"<{len(packed) // 8}Q", packed))


def take(outbox: BlockOutbox) -> list[worker_pb2.BlockChanges]:
    """All that is to be written now."""
    return list(iter(outbox.next_message, None))


@pytest.fixture
def feed() -> Iterator[BlockFeed]:
    feed = BlockFeed(4 * KEYS_PER_PART, lambda seed: None)
    yield feed
    feed.check_integrity()


@pytest.fixture
def outbox(feed: BlockFeed) -> BlockOutbox:
    return feed.open(lambda: None)


def test_changes_of_one_turn_are_told_once_and_only_what_remains_of_them(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(1, 2)])
    feed.apply([stored(3, 4), removed(4, 2), stored(2), removed(1)])
    first, second = take(outbox)
    assert (unpack(first.stored), unpack(first.removed), first.digest, first.sequence) == ({1, 2}, set(), 3, 1)
    assert (unpack(second.stored), unpack(second.removed), second.digest, second.sequence) == ({3}, {1}, 5, 2)
    assert feed.resident() == {2, 3}


def test_a_list_has_all_that_is_resident_in_parts(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(*range(100))])
    take(outbox)
    outbox.list_blocks(7)
    parts = take(outbox)
    assert len(parts) == feed.num_parts > 1
    assert {part.list for part in parts} == {7}
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.complete for part in parts] == [False] * (len(parts) - 1) + [True]
    assert set().union(*(unpack(part.stored) for part in parts)) == set(range(100))
    assert [part.sequence for part in parts] == list(range(2, 2 + len(parts)))


def test_changes_go_before_the_next_part_of_a_list_and_are_in_it(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(*range(64))])
    take(outbox)
    outbox.list_blocks(1)
    outbox.next_message()
    feed.apply([removed(63), stored(1000)])
    change, *parts = take(outbox)
    assert (unpack(change.removed), unpack(change.stored), change.list) == ({63}, {1000}, 0)
    assert 63 not in set().union(*(unpack(part.stored) for part in parts))


def test_a_router_that_does_not_read_is_told_that_it_missed_changes(feed: BlockFeed, outbox: BlockOutbox) -> None:
    for start in range(0, 2 * MAX_WAITING_KEYS, KEYS_PER_PART):
        feed.apply([stored(*range(start, start + KEYS_PER_PART))])
    (message,) = take(outbox)
    assert message.dropped
    assert not message.stored
    feed.apply([stored(2**40)])
    assert [unpack(message.stored) for message in take(outbox)] == [{2**40}]


def test_a_large_change_is_cut_and_each_piece_has_its_digest(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(*range(3 * KEYS_PER_PART))])
    pieces = take(outbox)
    assert len(pieces) == 3
    known: set[int] = set()
    for piece in pieces:
        known |= unpack(piece.stored)
        assert piece.digest == sum(known)


def test_forgotten_contents_are_gone_and_the_router_has_to_ask(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(1, 2)])
    feed.apply([Cleared(0, 0, resync=False), stored(5)])
    assert [(message.dropped, message.digest) for message in take(outbox)] == [(True, 5)]
    assert feed.resident() == {5}


def test_events_that_the_pool_dropped_are_made_up_for_by_its_snapshot(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(1, 2)])
    feed.apply([Cleared(0, 0, resync=True)], Snapshot("i", 0, 0, names([2, 3])))
    assert [message.dropped for message in take(outbox)] == [True]
    assert feed.resident() == {2, 3}


def test_a_beat_says_that_nothing_has_changed(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(9)])
    take(outbox)
    outbox.beat()
    assert [(message.digest, message.stored, message.sequence) for message in take(outbox)] == [(9, b"", 2)]
    assert take(outbox) == []


def test_a_closed_outbox_gets_nothing_more(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.close(outbox)
    feed.apply([stored(1)])
    assert take(outbox) == []


def test_the_first_seed_is_kept() -> None:
    seeds: list[int] = []
    feed = BlockFeed(16, seeds.append)
    assert not feed.has_seed
    assert feed.accept_seed(7)
    assert feed.accept_seed(7)
    assert not feed.accept_seed(8)
    assert seeds == [7]


def test_blocks_that_have_no_routing_key_are_left_out(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([Stored(0, 0, None, (bytes(32), *names([4])))])
    assert [unpack(message.stored) for message in take(outbox)] == [{4}]


def test_two_blocks_with_one_key_are_one(feed: BlockFeed, outbox: BlockOutbox) -> None:
    feed.apply([stored(4)])
    feed.apply([stored(4)])
    feed.apply([removed(4)])
    feed.apply([removed(4)])
    assert [(unpack(message.stored), unpack(message.removed)) for message in take(outbox)] == [
        ({4}, set()),
        (set(), {4}),
    ]
