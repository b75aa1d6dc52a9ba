from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from index_implementations import IMPLEMENTATIONS, make

from engine.errors import ProtocolError
from kvrelay.v1 import worker_pb2
from router.block_follower import ASK_AGAIN_S, MIN_GAP_S, BlockFollower, FollowerState
from router.prefix_index import MAX_KEYS, NUM_SHARDS, PrefixIndex


class Following:
    def __init__(self, implementation: type[PrefixIndex], max_bytes: int = 8 << 20) -> None:
        self.index = make(implementation, max_bytes)
        self.asked: list[int] = []
        self.now = 0.0
        self.follower = BlockFollower(self.index, self.asked.append, self.now)

    def tell(self, sequence: int, *stored: int, removed: tuple[int, ...] = (), digest: int = 0, **fields: Any) -> None:
        message = worker_pb2.BlockChanges(
            sequence=sequence, digest=digest, stored=pack(*stored), removed=pack(*removed), **fields
        )
        self.follower.apply(message, self.now)

    def known(self) -> set[int]:
        return set(self.index.resident(self.follower.slot))

    def listed(self, *keys: int) -> None:
        """As after a list that was message 1."""
        self.tell(1, *keys, digest=sum(keys), list=self.asked[-1], begins=True, complete=True)
        assert self.follower.state is FollowerState.LIVE


def pack(*keys: int) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)


@pytest.fixture(params=IMPLEMENTATIONS)
def following(request: pytest.FixtureRequest) -> Iterator[Following]:
    following = Following(request.param)
    yield following
    following.follower.check_integrity()
    following.index.check_integrity()


def test_it_asks_for_a_list_at_once_and_notes_nothing_before_that_begins(following: Following) -> None:
    assert following.asked == [1]
    following.tell(1, 5)
    assert following.known() == set()
    following.tell(2, 5, 6, list=1, begins=True)
    following.tell(3, 7, digest=18, list=1, complete=True)
    assert following.known() == {5, 6, 7}
    assert following.follower.state is FollowerState.LIVE


def test_changes_between_the_parts_of_a_list_are_noted(following: Following) -> None:
    following.tell(1, 5, 6, list=1, begins=True)
    following.tell(2, 8, removed=(5,), digest=999)
    following.tell(3, 8, 7, digest=21, list=1, complete=True)
    assert following.known() == {6, 7, 8}
    assert following.asked == [1]


def test_changes_are_noted_in_sequence(following: Following) -> None:
    following.listed(1, 2)
    following.tell(2, 3, removed=(1,), digest=5)
    assert following.known() == {2, 3}
    assert following.follower.counts.lists == 1


def test_a_message_that_comes_again_is_ignored(following: Following) -> None:
    following.listed(1)
    following.tell(2, 2, digest=3)
    following.tell(3, removed=(2,), digest=1)
    following.tell(2, 2, digest=3)
    assert following.known() == {1}
    assert following.follower.counts.repeats == 1


@pytest.mark.parametrize("fault", ["gap", "dropped", "difference"])
def test_a_fault_asks_for_a_list_while_what_is_known_still_serves(following: Following, fault: str) -> None:
    following.listed(1, 2)
    following.now = 1.0
    match fault:
        case "gap":
            following.tell(3, 9, digest=12)
        case "dropped":
            following.tell(2, dropped=True, digest=3)
        case "difference":
            following.tell(2, digest=4)
    counts = following.follower.counts
    assert (counts.gaps, counts.dropped, counts.differences) == (
        fault == "gap",
        fault == "dropped",
        fault == "difference",
    )
    assert following.asked == [1, 2]
    assert following.known() == {1, 2}
    following.tell(8, 5, digest=5, list=2, begins=True, complete=True)
    assert following.known() == {5}


def test_parts_of_an_earlier_list_are_not_noted(following: Following) -> None:
    following.listed(1)
    following.now = 1.0
    following.tell(3)
    following.tell(4, 7, list=1, begins=True)
    assert following.known() == {1}


def test_lists_have_a_pause_between_them(following: Following) -> None:
    following.now = 1.0
    following.listed(1)
    following.tell(2, digest=77)
    following.tell(3, digest=3, list=2, begins=True, complete=True)
    assert following.asked == [1, 2]
    following.now += MIN_GAP_S
    following.tell(4)
    assert following.asked == [1, 2, 3]


def test_a_list_that_does_not_begin_is_asked_for_again(following: Following) -> None:
    following.tell(1)
    following.now = ASK_AGAIN_S
    following.tell(2)
    assert following.asked == [1, 2]


def test_a_list_whose_beginning_was_lost_is_asked_for_at_once(following: Following) -> None:
    following.now = MIN_GAP_S
    following.tell(2, 7, list=1)
    assert following.asked == [1, 2]
    following.tell(3, 8, list=1, complete=True)
    assert following.asked == [1, 2]


def test_a_loss_in_the_middle_of_a_list_begins_it_again(following: Following) -> None:
    following.tell(1, 5, list=1, begins=True)
    following.now = 1.0
    following.tell(3, 7, digest=12, list=1, complete=True)
    assert following.follower.state is FollowerState.ASKED
    assert following.asked == [1, 2]


def test_staleness_grows_from_the_last_message_that_was_right(following: Following) -> None:
    following.now = 2.0
    following.listed(1)
    following.now = 3.0
    assert following.follower.staleness_s(3.5) == 1.5
    following.tell(2, digest=1)
    assert following.follower.staleness_s(3.5) == 0.5
    following.now = 4.0
    following.tell(3, digest=99)
    assert following.follower.staleness_s(4.5) == 1.5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_the_index_evicts_is_no_difference(implementation: type[PrefixIndex]) -> None:
    following = Following(implementation, implementation.least_bytes())
    keys = list(range(1, 4 * NUM_SHARDS))
    following.listed(*keys)
    assert len(following.known()) < len(keys)
    following.now = 1.0
    evicted = min(set(keys) - following.known())
    following.tell(2, removed=(evicted,), digest=sum(keys) - evicted)
    assert following.follower.counts.differences == 0
    following.index.check_integrity()


def test_closed_it_leaves_nothing_in_the_index(following: Following) -> None:
    following.listed(1, 2)
    other = BlockFollower(following.index, following.asked.append, 0.0)
    following.follower.close()
    assert following.known() == set()
    for _ in range(NUM_SHARDS):
        following.index.maintain()
    assert following.index.stats().keys == 0
    following.follower = other


@pytest.mark.parametrize("packed", [b"1234567", pack(2**60), pack(*[1] * (MAX_KEYS + 1))], ids=["torn", "long", "many"])
def test_keys_that_cannot_be_are_refused(following: Following, packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        following.follower.apply(worker_pb2.BlockChanges(sequence=1, list=1, begins=True, stored=packed), 0.0)
