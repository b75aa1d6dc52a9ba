"""What routers are told of the blocks that are resident here: changes as they come, and a list of all when asked for.

`BlockFeed` keeps the set of resident routing keys, `BlockOutbox` what one router has not been told yet. Both belong to
the event loop. A list is never stored: its parts are made when there is room for them in the stream, from the set as it
is then, after all changes that came before. So it may take its time, and whoever notes parts and changes in their order
ends with what is resident.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.block_events import BlockEvent, Cleared, Snapshot, Stored
from engine.routing_key import SHORT_BYTES
from kvrelay.v1 import worker_pb2

KEYS_PER_PART = 4096
"""Of a list, about, and at most of a message of changes: 32 KiB, and a millisecond or two of the router's time."""
MAX_WAITING_KEYS = 131_072
"""In changes that wait for one router; with more, all are dropped and it has to ask for a list."""
_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class _Changes:
    """Packed keys, and the digest of the resident set after them."""

    removed: bytes
    stored: bytes
    digest: int

    @property
    def num_keys(self) -> int:
        return (len(self.removed) + len(self.stored)) // SHORT_BYTES


class BlockFeed:
    """Invariant: `_parts` hold exactly the keys that are resident after the last events taken, each in the part that
    its lowest bits say; `digest` is their sum modulo 2^64."""

    def __init__(self, num_blocks: int, use_seed: Callable[[int], None]) -> None:
        """`use_seed` is told, once, under which seed block events are to name blocks."""
        self._parts: list[set[int]] = [set() for _ in range(1 << (num_blocks // KEYS_PER_PART).bit_length())]
        self.digest = 0
        self._seed: int | None = None
        self._use_seed = use_seed
        self._outboxes: set[BlockOutbox] = set()

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def part(self, number: int) -> Iterable[int]:
        return self._parts[number]

    @property
    def has_seed(self) -> bool:
        """Whether events name blocks by routing keys."""
        return self._seed is not None

    def accept_seed(self, seed: int) -> bool:
        """Whether a router with this seed can be told. The first one decides, for the life of this worker."""
        if self._seed is None:
            self._seed = seed
            self._use_seed(seed)
        return seed == self._seed

    def open(self, changed: Callable[[], None]) -> BlockOutbox:
        """For one router. `changed` is called when there is something to be written."""
        outbox = BlockOutbox(self, changed)
        self._outboxes.add(outbox)
        return outbox

    def close(self, outbox: BlockOutbox) -> None:
        """Idempotent."""
        self._outboxes.discard(outbox)

    def apply(self, events: Iterable[BlockEvent], snapshot: Snapshot | None = None) -> None:
        """Take the pool's events in order. `snapshot`, of after them, is needed if one is a `Cleared` with `resync`."""
        removed: set[int] = set()
        stored: set[int] = set()
        for event in events:
            if isinstance(event, Cleared):
                self._clear()
                removed, stored = set(), set()
                continue
            keys = _keys(event.hashes)
            gained, lost = (stored, removed) if isinstance(event, Stored) else (removed, stored)
            gained.update(keys)
            lost.difference_update(keys)
        if snapshot is not None:
            removed, stored = set(), set(_keys(snapshot.hashes))
        self._change(removed, stored)

    def check_integrity(self) -> None:
        for number, part in enumerate(self._parts):
            assert all(key % len(self._parts) == number for key in part)
        assert self.digest == sum(map(sum, self._parts)) % _MODULUS

    def resident(self) -> set[int]:
        return set().union(*self._parts)

    def _change(self, removed: Iterable[int], stored: Iterable[int]) -> None:
        """Two blocks may have one key, if rarely: then the key goes with the first of them."""
        mask = len(self._parts) - 1
        removed = [key for key in removed if key in self._parts[key & mask]]
        stored = [key for key in stored if key not in self._parts[key & mask]]
        for key in removed:
            self._parts[key & mask].remove(key)
        for key in stored:
            self._parts[key & mask].add(key)
        for start in range(0, max(len(removed), len(stored)), KEYS_PER_PART):
            gone, new = removed[start : start + KEYS_PER_PART], stored[start : start + KEYS_PER_PART]
            self.digest = (self.digest + sum(new) - sum(gone)) % _MODULUS
            changes = _Changes(_packed(gone), _packed(new), self.digest)
            for outbox in self._outboxes:
                outbox.put(changes)

    def _clear(self) -> None:
        for part in self._parts:
            part.clear()
        self.digest = 0
        for outbox in self._outboxes:
            outbox.drop()


class BlockOutbox:
    """What one router is still to be told.

    Invariants: at most `MAX_WAITING_KEYS` keys wait; a part of a list is made only when none does.
    """

    def __init__(self, feed: BlockFeed, changed: Callable[[], None]) -> None:
        self._feed = feed
        self._changed = changed
        self._waiting: deque[_Changes] = deque()
        self._num_waiting_keys = 0
        self._sequence = 0
        self._dropped = False
        """And the router was not told yet."""
        self._list_number = 0
        """0: no list is under way."""
        self._next_part = 0
        self._beat_due = False

    def put(self, changes: _Changes) -> None:
        if self._dropped:
            return
        if self._num_waiting_keys + changes.num_keys > MAX_WAITING_KEYS:
            self.drop()
            return
        self._num_waiting_keys += changes.num_keys
        self._waiting.append(changes)
        self._changed()

    def drop(self) -> None:
        """The router cannot know any more what is resident, and is told so. Ends a list."""
        self._waiting.clear()
        self._num_waiting_keys = self._list_number = 0
        self._dropped = True
        self._changed()

    def list_blocks(self, number: int) -> None:
        """Begin a list."""
        self._dropped = False
        self._list_number, self._next_part = number, 0
        self._changed()

    def beat(self) -> None:
        """Say something soon, if only that nothing has changed."""
        self._beat_due = True
        self._changed()

    def next_message(self) -> worker_pb2.BlockChanges | None:
        """To be written now; None if there is nothing to be said."""
        if self._waiting:
            changes = self._waiting.popleft()
            self._num_waiting_keys -= changes.num_keys
            message = worker_pb2.BlockChanges(removed=changes.removed, stored=changes.stored, digest=changes.digest)
        elif self._list_number:
            message = self._next_of_list()
        elif self._beat_due or self._dropped:
            message = worker_pb2.BlockChanges(digest=self._feed.digest, dropped=self._dropped)
            self._dropped = False
        else:
            return None
        self._beat_due = False
        self._sequence += 1
        message.sequence = self._sequence
        return message

    def _next_of_list(self) -> worker_pb2.BlockChanges:
        number, part = self._list_number, self._next_part
        self._next_part += 1
        complete = self._next_part == self._feed.num_parts
        if complete:
            self._list_number = 0
        return worker_pb2.BlockChanges(
            stored=_packed(list(self._feed.part(part))),
            digest=self._feed.digest,
            list=number,
            begins=part == 0,
            complete=complete,
        )


def _keys(names: Iterable[bytes]) -> Sequence[int]:
    """Blocks that were named before there was a seed go by their hashes, which no router knows: they are left out."""
    packed = b"".join(name for name in names if len(name) == SHORT_BYTES)
    return struct.unpack(f"<{len(packed) // SHORT_BYTES}Q", packed)


def _packed(keys: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)
