from __future__ import annotations

from block_follower import BlockFollower

from engine.block_events import BlockEvents, Cleared, EventBatch, Removed, Stored, resident_digest


def store(events: BlockEvents, *hashes: bytes, parent: bytes | None = None) -> None:
    for content_hash in hashes:
        events.stored(content_hash, parent)
        parent = content_hash


def test_a_chain_is_one_event_with_its_parent() -> None:
    events = BlockEvents("i", 10)
    store(events, b"a", b"b")
    store(events, b"c", parent=b"b")
    assert events.take() == EventBatch("i", (Stored(1, resident_digest([b"a", b"b", b"c"]), None, (b"a", b"b", b"c")),))


def test_each_chain_is_an_event_of_its_own() -> None:
    events = BlockEvents("i", 10)
    store(events, b"a", b"b")
    store(events, b"c", parent=b"a")
    assert [(event.sequence, event.parent) for event in events.take().events if isinstance(event, Stored)] == [
        (1, None),
        (2, b"a"),
    ]


def test_taking_drains_the_queue() -> None:
    events = BlockEvents("i", 10)
    store(events, b"a")
    events.take()
    assert events.take().events == ()


def test_what_was_taken_does_not_grow() -> None:
    events = BlockEvents("i", 10)
    store(events, b"a")
    events.take()
    store(events, b"b", parent=b"a")
    assert events.take().events == (Stored(2, resident_digest([b"a", b"b"]), b"a", (b"b",)),)


def test_removals_in_a_row_are_one_event() -> None:
    events = BlockEvents("i", 10)
    store(events, b"a", b"b")
    events.take()
    events.removed([b"b"])
    events.removed([b"a"])
    assert events.take().events == (Removed(2, 0, (b"b", b"a")),)


def test_the_digest_does_not_depend_on_order_and_counts_a_hash_twice() -> None:
    assert resident_digest([b"a", b"b"]) == resident_digest([b"b", b"a"]) < 2**128
    assert resident_digest([b"a", b"a"]) not in (0, resident_digest([b"a"]))


def test_storing_and_removing_leads_back_to_the_same_digest() -> None:
    events = BlockEvents("i", 10)
    store(events, b"a", b"b")
    digest = events.snapshot([]).digest
    store(events, b"c")
    events.removed([b"c"])
    assert events.snapshot([]).digest == digest


def test_a_queue_that_nobody_takes_from_becomes_one_marker() -> None:
    events = BlockEvents("i", 3)
    store(events, b"a", b"b", b"c", b"d")
    assert events.num_overflows == 1
    assert events.take().events == (Cleared(2, resident_digest([b"a", b"b", b"c", b"d"]), resync=True),)


def test_events_go_on_after_the_marker() -> None:
    events = BlockEvents("i", 2)
    follower = BlockFollower()
    store(events, b"a", b"b", b"c", b"d", b"e")
    follower.apply(events.take())
    assert follower.needs_snapshot
    follower.restart(events.snapshot([b"a", b"b", b"c", b"d", b"e"]))
    events.removed([b"e"])
    follower.apply(events.take())
    assert set(follower.resident) == {b"a", b"b", b"c", b"d"}
    assert not follower.needs_snapshot


def test_clearing_says_all_that_there_is_to_say() -> None:
    events = BlockEvents("i", 3)
    store(events, b"a", b"b")
    events.cleared()
    events.cleared()
    assert events.take().events == (Cleared(3, 0, resync=False),)


def test_a_follower_joins_with_a_snapshot_and_skips_what_it_covers() -> None:
    events = BlockEvents("i", 10)
    store(events, b"a", b"b")
    follower = BlockFollower()
    follower.restart(events.snapshot([b"a", b"b"]))
    store(events, b"c", parent=b"b")
    follower.apply(events.take())
    assert list(follower.resident) == [b"a", b"b", b"c"]


def test_batches_and_snapshots_name_the_incarnation() -> None:
    events = BlockEvents("life-7", 10)
    assert events.take().incarnation == events.snapshot([]).incarnation == "life-7"
