"""The prefix index in Python: what the native one is compared with, and what runs without a compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice

from router.prefix_index import NUM_SHARDS, IndexStats, PrefixIndex, unpack_keys

MAX_SHARED_SETS = 8192
_SHARD_MASK = NUM_SHARDS - 1
_DROP_SHARE = 8
"""An eviction takes one part in so many of a table."""
_LOOSE_BYTES = 60
"""A table with more bytes a key is packed anew."""
_MASK = (1 << 64) - 1


class ReferenceIndex(PrefixIndex):
    """A table's keys are in the order of their last use, oldest first. `_num_keys` is their number.

    Python's dicts have no secret: who sends keys of their own making can have them meet in one chain. A native index
    mixes them.
    """

    BYTES_PER_KEY = 208
    """Usual: 70 to 90."""

    def __init__(self, max_bytes: int, speculation_s: float = 10.0, why: str = "") -> None:
        """`why` this and not the native one; the rest as in `PrefixIndex`."""
        super().__init__(max_bytes, speculation_s)
        self._why = why
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._sets: dict[int, int] = {}
        """One object for all equal sets."""
        self._num_keys = 0
        self._num_evictions = 0
        self._next_eviction = 0
        self._speculative: dict[int, int] = {}
        self._older: dict[int, int] = {}
        """Speculative keys of the period before."""

    @property
    def implementation(self) -> str:
        return f"python: {self._why}" if self._why else "python"

    @property
    def evictions(self) -> int:
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

    def _apply(self, slot: int, removed: bytes, stored: bytes) -> tuple[int, int]:
        gone, added = unpack_keys(removed), unpack_keys(stored)
        lost, num_lost = self._remove_keys(slot, gone)
        gained, num_gained = self._store_keys(slot, added)
        return (gained - lost) & _MASK, num_gained - num_lost

    def _store_keys(self, slot: int, keys: tuple[int, ...]) -> tuple[int, int]:
        bit, added, again, fresh = 1 << slot, sum(keys), 0, 0
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
                    again += 1
                else:
                    holders = shared(holders | bit)
                del shard[key]
                shard[key] = holders
        self._num_keys += fresh
        if self._num_keys > self._max_keys:
            self._evict()
        return added, len(keys) - again

    def _remove_keys(self, slot: int, keys: tuple[int, ...]) -> tuple[int, int]:
        bit, removed, unknown, gone = 1 << slot, sum(keys), 0, 0
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
                unknown += 1
        self._num_keys -= gone
        return removed, len(keys) - unknown

    def _speculate(self, slot: int, packed: bytes) -> None:
        bit, shards, speculative = 1 << slot, self._shards, self._speculative
        for key in unpack_keys(packed):
            shard = shards[key & _SHARD_MASK]
            holders = shard.pop(key, 0)
            if holders:
                shard[key] = holders
            if len(speculative) >= self._max_speculative:
                self._begin_period()
                speculative = self._speculative
            speculative[key] = speculative.get(key, 0) | bit

    def _begin_period(self) -> None:
        self._older, self._speculative = self._speculative, {}

    def _probe(self) -> Callable[[int], int]:
        shards, alive, newer, older = self._shards, self._alive, self._speculative, self._older
        if newer or older:
            return lambda key: (shards[key & _SHARD_MASK].get(key, 0) | newer.get(key, 0) | older.get(key, 0)) & alive
        return lambda key: shards[key & _SHARD_MASK].get(key, 0) & alive

    def _sweep(self, number: int) -> None:
        shard, alive, shared = self._shards[number], ~self._dead, self._shared
        left = {key: shared(rest) for key, holders in shard.items() if (rest := holders & alive)}
        self._shards[number] = left
        self._num_keys -= len(shard) - len(left)

    def _pack(self, number: int) -> None:
        shard = self._shards[number]
        if sys.getsizeof(shard) > _LOOSE_BYTES * len(shard) + 256:
            self._shards[number] = {key: holders for key, holders in shard.items()}  # noqa: C416  `dict` keeps the width

    def _swept(self, slots: int) -> None:  # whoever gets such a slot next was never asked for what is in these two
        self._speculative, self._older = (
            {key: left for key, holders in table.items() if (left := holders & ~slots)}
            for table in (self._speculative, self._older)
        )

    def _resident(self, slot: int) -> Iterator[int]:
        bit = 1 << slot
        return (key for shard in self._shards for key, holders in shard.items() if holders & bit)

    def _check_tables(self, known: int) -> None:
        for number, shard in enumerate(self._shards):
            for key, holders in shard.items():
                assert holders, f"key {key:x} is held by nobody"
                assert not holders & ~known, f"key {key:x} has bits of unknown slots"
                assert key & _SHARD_MASK == number, f"key {key:x} is in the wrong table"
        for table in (self._speculative, self._older):
            assert all(holders and not holders & ~known for holders in table.values()), "speculation for unknown slots"
        assert self._num_keys == sum(map(len, self._shards)) <= self._max_keys
        assert max(len(self._speculative), len(self._older)) <= self._max_speculative

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
