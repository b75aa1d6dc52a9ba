"""Which workers hold which prefix: from short routing keys to sets of workers. Knows no messages and no clock.

A set of workers is an int with one bit for each worker's *slot*. A worker that comes back gets another slot, so all
that it held before is gone with one bit of `_alive`; the bits in the tables are swept later. Everything here is a
prediction: a wrong answer costs a recompute and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from engine.errors import ConfigError

NUM_SHARDS = 1024
"""Tables, by the lowest bits of the key: whatever needs a whole table (growing, sweeping) takes half a millisecond at a
million keys, and requests are placed in between."""
MAX_SLOTS = 512
BYTES_PER_KEY = 208
"""No key takes more, its share of a table grown too wide and a set of workers of its own included. Usual: 70 to 90."""
MAX_MATCHES = 32
"""Depths told by a lookup, deepest first; workers with less count as having nothing. Bounds the cost of a decision."""
MAX_SHARED_SETS = 8192
_SHARD_MASK = NUM_SHARDS - 1
_DROP_SHARE = 8
"""An eviction takes one part in so many of a table."""
PACK_EVERY = 33
"""Turns of `maintain`, of which one may pack. No divisor of the number of tables, so each has its turn."""
_LOOSE_BYTES = 60
"""A table with more bytes a key is packed anew."""


class PrefixKeys(Protocol):
    """The keys of one prompt, worked out when they are asked for: `engine.routing_key.RoutingKeys`."""

    def __len__(self) -> int:
        """Full blocks."""

    def prober(self) -> Callable[[int], int]:
        """From 1 to `len(self)` blocks to their short key."""


class Match(NamedTuple):
    num_blocks: int
    """Of the prompt, from its first one on, that are held."""
    slots: int
    """By whom: one bit for each."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    keys: int
    speculative_keys: int
    num_bytes: int
    """An estimate from above: of tables and keys, not of what the allocator wastes."""
    max_bytes: int
    evictions: int
    """Keys dropped for want of room, since the start."""
    slots: int
    """Taken, those still to be swept included."""


class PrefixIndex:
    """Invariants, checked by `check_integrity`:
      1. A bit of a slot that is neither alive nor dead is in no set, a speculative one included; a key without any bit
         is in no table.
      2. `_num_keys` is the number of keys, and at most `_max_keys` after every call; each of the two tables of
         speculative keys has at most `_max_speculative`.

    Residency is prefix-closed: a worker that holds a block holds those before it. So a lookup searches by halves, and
    works out only the keys that it asks for. A table's keys are in the order of their last use, oldest first.
    """

    def __init__(self, max_bytes: int, speculation_s: float = 10.0) -> None:
        """`speculation_s`: how long dispatched work counts as resident, at least; at most twice as long.

        Raises `ConfigError` if `max_bytes` cannot hold a key in each table.
        """
        room = max_bytes // BYTES_PER_KEY
        if room < NUM_SHARDS:
            raise ConfigError(f"the index needs at least {NUM_SHARDS * BYTES_PER_KEY} bytes, got {max_bytes}")
        self._max_speculative = room // 10
        """In each of two periods."""
        self._max_keys = room - 2 * self._max_speculative
        self._max_bytes = max_bytes
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._sets: dict[int, int] = {}
        """One object for all equal sets."""
        self._num_keys = 0
        self._num_evictions = 0
        self._alive = 0
        self._dead = 0
        """Slots that must not be given away before all tables are swept."""
        self._sweep_left: dict[int, int] = {}
        """Dead slot -> tables that may have its bit."""
        self._next_shard = 0
        """To be swept and packed."""
        self._num_turns = 0
        """Of `maintain`."""
        self._next_eviction = 0
        self._speculation_s = speculation_s
        self._speculative: dict[int, int] = {}
        self._older: dict[int, int] = {}
        """Speculative keys of the period before."""
        self._period_ends = 0.0

    def add_worker(self) -> int:
        """A slot that holds nothing. If there is none, the oldest dead one is swept at once."""
        taken = self._alive | self._dead
        slot = (~taken & (taken + 1)).bit_length() - 1
        if slot >= MAX_SLOTS:
            while not (~(self._alive | self._dead)) & ((1 << MAX_SLOTS) - 1):
                self.maintain()
            return self.add_worker()
        self._alive |= 1 << slot
        return slot

    def drop_worker(self, slot: int) -> None:
        """Forget all that the worker holds, in no time. The slot must not be used again by the caller."""
        self._alive &= ~(1 << slot)
        self._dead |= 1 << slot
        self._sweep_left[slot] = NUM_SHARDS

    def store(self, slot: int, keys: Sequence[int]) -> int:
        """The worker holds these. Returns the sum of those that it was not known to hold; a key may come again."""
        bit, added, fresh = 1 << slot, sum(keys), 0
        shards, shared = self._shards, self._shared
        for key in keys:
            shard = shards[key & _SHARD_MASK]
            holders = shard.get(key)
            if holders is None:
                shard[key] = bit
                fresh += 1
            else:
                if holders & bit:
                    added -= key
                else:
                    holders = shared(holders | bit)
                del shard[key]
                shard[key] = holders
        self._num_keys += fresh
        if self._num_keys > self._max_keys:
            self._evict()
        return added

    def remove(self, slot: int, keys: Sequence[int]) -> int:
        """The worker holds these no more. Returns the sum of those that it was known to hold."""
        bit, removed, gone = 1 << slot, sum(keys), 0
        shards, shared = self._shards, self._shared
        for key in keys:
            shard = shards[key & _SHARD_MASK]
            holders = shard.get(key, 0)
            if holders == bit:
                del shard[key]
                gone += 1
            elif holders & bit:
                shard[key] = shared(holders & ~bit)
            else:
                removed -= key
        self._num_keys -= gone
        return removed

    def speculate(self, slot: int, keys: Sequence[int], now: float) -> None:
        """The worker was asked to compute these; they count as resident until it tells, or for a while.

        `now`: seconds of one monotonic clock, as in every call. What is resident already counts as just used.
        """
        self._turn_period(now)
        bit, shards, speculative = 1 << slot, self._shards, self._speculative
        for key in keys:
            shard = shards[key & _SHARD_MASK]
            holders = shard.pop(key, 0)
            if holders:
                shard[key] = holders
            if len(speculative) >= self._max_speculative:
                self._older = speculative
                speculative = self._speculative = {}
            speculative[key] = speculative.get(key, 0) | bit

    def lookup(self, keys: PrefixKeys, now: float) -> list[Match]:
        """Which slots hold how much of the prompt: deepest first, each slot once, at most `MAX_MATCHES` depths."""
        self._turn_period(now)
        num_blocks = len(keys)
        if not num_blocks:
            return []
        probe, short = self._probe(), keys.prober()
        probed: dict[int, int] = {}
        rest = probe(short(1))
        found: list[Match] = []
        limit = num_blocks + 1
        while rest and len(found) < MAX_MATCHES:
            low, high, holders = 1, limit, rest
            for depth, there in probed.items():
                if not there & rest:
                    if depth < high:
                        high = depth
                elif depth > low:
                    low, holders = depth, there & rest
            while high - low > 1:
                middle = (low + high) >> 1
                there = probed[middle] = probe(short(middle)) & rest
                if there:
                    low, holders = middle, there
                else:
                    high = middle
            found.append(Match(low, holders))
            rest &= ~holders
            limit = low
        return found

    def maintain(self) -> None:
        """Sweep one table of the bits of dead slots and pack it if it grew too wide. To be called again and again."""
        self._num_turns += 1
        number = self._next_shard
        self._next_shard = (number + 1) % NUM_SHARDS
        shard = self._shards[number]
        if self._dead:
            alive, before = ~self._dead, len(shard)
            shared = self._shared
            shard = {key: shared(left) for key, holders in shard.items() if (left := holders & alive)}
            self._shards[number] = shard
            self._num_keys -= before - len(shard)
        elif self._num_turns % PACK_EVERY == 0 and sys.getsizeof(shard) > _LOOSE_BYTES * len(shard) + 256:
            self._shards[number] = {key: holders for key, holders in shard.items()}  # noqa: C416  `dict` keeps the width
        swept = 0
        for slot in list(self._sweep_left):
            self._sweep_left[slot] -= 1
            if not self._sweep_left[slot]:
                del self._sweep_left[slot]
                swept |= 1 << slot
        if swept:  # whoever gets such a slot next was never asked for what is in these two
            self._speculative, self._older = (
                {key: left for key, holders in table.items() if (left := holders & ~swept)}
                for table in (self._speculative, self._older)
            )
            self._dead &= ~swept

    def resident(self, slot: int) -> Iterator[int]:
        """All keys of a worker, speculation aside. O(keys): for tests and idle moments."""
        bit = (1 << slot) & self._alive
        return (key for shard in self._shards for key, holders in shard.items() if holders & bit)

    @property
    def evictions(self) -> int:
        """Keys dropped for want of room, since the start."""
        return self._num_evictions

    def stats(self) -> IndexStats:
        speculative = len(self._speculative) + len(self._older)
        return IndexStats(
            keys=self._num_keys,
            speculative_keys=speculative,
            num_bytes=self._num_bytes(speculative),
            max_bytes=self._max_bytes,
            evictions=self._num_evictions,
            slots=(self._alive | self._dead).bit_count(),
        )

    def check_integrity(self) -> None:
        known = self._alive | self._dead
        assert not self._alive & self._dead, "a slot is alive and dead"
        assert {slot for slot in range(MAX_SLOTS) if self._dead >> slot & 1} == self._sweep_left.keys()
        for number, shard in enumerate(self._shards):
            for key, holders in shard.items():
                assert holders, f"key {key:x} is held by nobody"
                assert not holders & ~known, f"key {key:x} has bits of unknown slots"
                assert key & _SHARD_MASK == number, f"key {key:x} is in the wrong table"
        for table in (self._speculative, self._older):
            assert all(holders and not holders & ~known for holders in table.values()), "speculation for unknown slots"
        assert self._num_keys == sum(map(len, self._shards)) <= self._max_keys
        assert max(len(self._speculative), len(self._older)) <= self._max_speculative

    def _probe(self) -> Callable[[int], int]:
        """Who holds a key; for one lookup."""
        shards, alive, newer, older = self._shards, self._alive, self._speculative, self._older
        if newer or older:
            return lambda key: (shards[key & _SHARD_MASK].get(key, 0) | newer.get(key, 0) | older.get(key, 0)) & alive
        return lambda key: shards[key & _SHARD_MASK].get(key, 0) & alive

    def _num_bytes(self, speculative: int) -> int:
        tables = (*self._shards, self._speculative, self._older, self._sets)
        return sum(map(sys.getsizeof, tables)) + 32 * (self._num_keys + speculative) + 64 * len(self._sets)

    def _shared(self, holders: int) -> int:
        if len(self._sets) > MAX_SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)

    def _evict(self) -> None:
        """Drop the keys that were used longest ago, table after table."""
        while self._num_keys > self._max_keys:
            shard = self._shards[self._next_eviction]
            self._next_eviction = (self._next_eviction + 1) % NUM_SHARDS
            oldest = list(islice(shard, len(shard) // _DROP_SHARE + 1)) if shard else []
            for key in oldest:
                del shard[key]
            self._num_keys -= len(oldest)
            self._num_evictions += len(oldest)

    def _turn_period(self, now: float) -> None:
        if now < self._period_ends:
            return
        late = now - self._period_ends >= self._speculation_s
        self._older = {} if late else self._speculative
        self._speculative = {}
        self._period_ends = now + self._speculation_s
