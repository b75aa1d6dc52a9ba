"""What a router has noted of a worker's blocks against what is resident there, over a wire that loses, repeats and
reorders 5 % of the messages each, changes and lists alike."""

from __future__ import annotations

import random
import struct

import pytest
from index_implementations import IMPLEMENTATIONS, make

from engine.block_events import BlockEvent, Cleared, Removed, Snapshot, Stored
from kvrelay.v1 import worker_pb2
from router.block_follower import BlockFollower, FollowerState
from router.prefix_index import PrefixIndex
from worker.block_feed import KEYS_PER_PART, BlockFeed

FAULT = 0.05
BEAT_EVERY = 5


def names(keys: list[int]) -> tuple[bytes, ...]:
    return tuple(struct.pack("<Q", key) for key in keys)


class Wire:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._held: list[worker_pb2.BlockChanges] = []
        self.faults = 0

    def carry(self, message: worker_pb2.BlockChanges) -> list[worker_pb2.BlockChanges]:
        """What arrives now."""
        arriving, self._held = [message, *self._held], []
        draw = self._rng.random()
        self.faults += draw < 3 * FAULT
        if draw < FAULT:
            return arriving[1:]
        if draw < 2 * FAULT:
            return [message, *arriving]
        if draw < 3 * FAULT:
            self._held = [message]
            return arriving[1:]
        return arriving


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(10))
def test_lost_repeated_and_reordered_messages_leave_no_difference(seed: int, implementation: type[PrefixIndex]) -> None:
    rng = random.Random(seed)
    index, wire, now = make(implementation, 64 << 20), Wire(rng), 0.0
    feed = BlockFeed(4 * KEYS_PER_PART, lambda _: None)
    outbox = feed.open(lambda: None)
    follower = BlockFollower(index, outbox.list_blocks, now)
    resident: set[int] = set()

    def turn(events: list[BlockEvent], snapshot: Snapshot | None = None, *, faults: bool = True) -> None:
        nonlocal now
        now += 0.05
        feed.apply(events, snapshot)
        for _ in range(rng.randrange(1, 8)):
            message = outbox.next_message()
            if message is None:
                break
            for arrived in wire.carry(message) if faults else [message]:
                follower.apply(arrived, now)

    for number in range(600):
        new = [rng.getrandbits(60) for _ in range(rng.randrange(4))]
        gone = rng.sample(sorted(resident), min(len(resident), rng.randrange(3)))
        events: list[BlockEvent] = [Stored(0, 0, None, names(new)), Removed(0, 0, names(gone))]
        resident = resident.union(new).difference(gone)
        snapshot = None
        if rng.random() < 0.01:
            events, snapshot = [Cleared(0, 0, resync=True)], Snapshot("i", 0, 0, names(sorted(resident)))
        if number % BEAT_EVERY == 0:
            outbox.beat()
        turn(events, snapshot)

    assert wire.faults > 50
    assert follower.counts.lists > 1
    for _ in range(600):  # beats alone, until it is heard that it missed something
        outbox.beat()
        turn([], faults=False)
    assert follower.state is FollowerState.LIVE
    assert set(index.resident(follower.slot)) == resident == feed.resident()
    feed.check_integrity()
    follower.check_integrity()
    index.check_integrity()
