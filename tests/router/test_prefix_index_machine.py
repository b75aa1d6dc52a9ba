"""Both prefix indexes against each other and a set of paths for each worker, over any order of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from index_implementations import IMPLEMENTATIONS, make
from key_trees import Path, PathKeys, key_of, keys_of, prefixes

from router.prefix_index import NUM_SHARDS, PackedKeys, PrefixIndex

Result = TypeVar("Result")
SPECULATION_S = 10.0
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


class PrefixIndexMachine(RuleBasedStateMachine):
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.indexes = [make(implementation, 8 << 20, SPECULATION_S) for implementation in IMPLEMENTATIONS]
        self.held: dict[int, set[Path]] = {}
        self.dispatched: dict[int, list[tuple[float, Path]]] = {}
        self.now = 0.0

    def same(self, call: Callable[[PrefixIndex], Result]) -> Result:
        """What both answer."""
        first, second = (call(index) for index in self.indexes)
        assert first == second, "the indexes differ"
        return first

    @initialize(target=workers)
    def begin(self) -> object:
        return multiple(self.add(), self.add())

    @rule(target=workers)
    def add(self) -> int:
        slot = self.same(lambda index: index.add_worker())
        assert slot not in self.held, "two workers share a slot"
        self.held[slot], self.dispatched[slot] = set(), []
        return slot

    @rule(slot=consumes(workers))
    def drop(self, slot: int) -> None:
        self.same(lambda index: index.drop_worker(slot))
        del self.held[slot], self.dispatched[slot]

    @rule(slot=workers, path=PATHS)
    def store(self, slot: int, path: Path) -> None:
        new = [prefix for prefix in prefixes(path) if prefix not in self.held[slot]]
        assert self.same(lambda index: index.store(slot, keys_of(prefixes(path)))) == sum(keys_of(new))
        self.held[slot].update(new)

    @rule(slot=workers, path=PATHS)
    def remove(self, slot: int, path: Path) -> None:
        gone = [held for held in self.held[slot] if held[: len(path)] == path]
        assert self.same(lambda index: index.remove(slot, keys_of(gone))) == sum(keys_of(gone))
        self.held[slot].difference_update(gone)

    @rule(slot=workers, path=PATHS)
    def speculate(self, slot: int, path: Path) -> None:
        self.same(lambda index: index.speculate(slot, keys_of(prefixes(path)), self.now))
        self.dispatched[slot].append((self.now, path))

    @rule(seconds=st.sampled_from([1.0, 4.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(times=st.sampled_from([1, NUM_SHARDS]))
    def maintain(self, times: int) -> None:
        for _ in range(times):
            self.same(lambda index: index.maintain())

    @rule(path=PATHS)
    def lookup(self, path: Path) -> None:
        found: dict[int, int] = {}
        matches = self.same(lambda index: index.lookup(PathKeys(path), self.now))
        assert matches == self.same(lambda index: index.lookup(PackedKeys(keys_of(prefixes(path))), self.now))
        depths = [match.num_blocks for match in matches]
        assert depths == sorted(set(depths), reverse=True)
        for match in matches:
            for slot in range(match.slots.bit_length()):
                if match.slots >> slot & 1:
                    assert slot not in found, "a worker is told twice"
                    found[slot] = match.num_blocks
        for slot in self.held:
            at_least = self.depth(slot, path, SPECULATION_S)
            assert at_least <= found.pop(slot, 0) <= self.depth(slot, path, 2 * SPECULATION_S)
        assert not found, "a worker that is gone is told"

    def depth(self, slot: int, path: Path, max_age: float) -> int:
        fresh = (sent for at, sent in self.dispatched[slot] if self.now - at < max_age)
        there = self.held[slot].union(*map(prefixes, fresh))
        return next((n for n in range(len(path), 0, -1) if path[:n] in there), 0)

    @invariant()
    def holds(self) -> None:
        for slot, held in self.held.items():
            assert self.same(lambda index: sorted(index.resident(slot))) == sorted(map(key_of, held))  # noqa: B023
        self.same(lambda index: (index.stats().keys, index.stats().speculative_keys, index.stats().slots))

    def teardown(self) -> None:
        self.same(lambda index: index.check_integrity())


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
