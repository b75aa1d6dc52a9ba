from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.block_events import BlockEvents, Removed
from engine.prefix_index import PrefixIndex

# A tree:  0:a - 1:ab - 2:abc
#               \ 3:abd
#          4:x
TREE = {0: (b"a", None), 1: (b"ab", b"a"), 2: (b"abc", b"ab"), 3: (b"abd", b"ab"), 4: (b"x", None)}


@pytest.fixture
def events() -> BlockEvents:
    return BlockEvents("i", 100)


@pytest.fixture
def index(events: BlockEvents) -> Iterator[PrefixIndex]:
    index = PrefixIndex(events)
    for block, (content_hash, parent) in TREE.items():
        assert index.add(block, content_hash, parent)
    yield index
    index.check_integrity()


def test_a_prefix_is_found_up_to_the_first_gap(index: PrefixIndex) -> None:
    assert index.longest_prefix([b"a", b"ab", b"abe", b"abc"]) == [0, 1]
    assert index.longest_prefix([b"z", b"a"]) == []


def test_nothing_is_entered_without_its_parent(index: PrefixIndex) -> None:
    assert not index.add(5, b"yz", b"y")
    assert 5 not in index
    assert index.block_of(b"yz") is None


def test_with_an_entry_goes_all_that_continues_it_deepest_first(index: PrefixIndex, events: BlockEvents) -> None:
    events.take()
    assert index.remove(1) == [3, 2, 1]
    assert [index.block_of(content_hash) for content_hash, _ in TREE.values()] == [0, None, None, None, 4]
    (event,) = events.take().events
    assert isinstance(event, Removed)
    assert event.hashes == (b"abd", b"abc", b"ab")


def test_a_block_can_be_entered_again_elsewhere(index: PrefixIndex) -> None:
    index.remove(1)
    assert index.add(1, b"xy", b"x")
    assert index.parent(1) == 4
    assert index.hash_of(1) == b"xy"
    assert index.remove(4) == [1, 4]


def test_a_snapshot_has_parents_first(index: PrefixIndex) -> None:
    hashes = index.snapshot().hashes
    assert set(hashes) == {content_hash for content_hash, _ in TREE.values()}
    for content_hash, parent in TREE.values():
        assert parent is None or hashes.index(parent) < hashes.index(content_hash)


def test_clearing_leaves_nothing(index: PrefixIndex) -> None:
    index.clear()
    assert len(index) == 0
    assert index.snapshot().hashes == ()
