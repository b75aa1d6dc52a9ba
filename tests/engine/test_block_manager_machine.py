"""The block manager against a model that works everything out anew from lists of holders, in whatever time it takes."""

from __future__ import annotations

from block_chains import chain
from block_follower import BlockFollower
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_manager import BlockManager, BlockStats
from engine.config import CacheConfig
from engine.errors import InternalError, NoFreeBlocks, PinLimit

NUM_BLOCKS = 6
MAX_PINNED = 3
BLOCKS = range(NUM_BLOCKS)
names = st.sampled_from("ab")


def raised(error: type[Exception], call: object, *arguments: object) -> bool:
    assert callable(call)
    try:
        call(*arguments)
    except error:
        return True
    return False


class ObviousPool(RuleBasedStateMachine):
    """Chains are a0 a1 a2 and b0 b1 b2, so a hash says what it continues."""

    @initialize(begun=st.lists(st.tuples(names, st.integers(0, 2), st.booleans()), max_size=3))
    def build(self, begun: list[tuple[str, int, bool]]) -> None:
        # A window, because here anybody may give back any block before those that continue it.
        config = CacheConfig(num_blocks=NUM_BLOCKS, sliding_window=1, max_pinned_share=0.5)
        self.contents = list(range(NUM_BLOCKS))
        self.pool = BlockManager(config, copy_block=self.copy)
        self.holders: list[list[int]] = []
        self.quarantines: list[list[int]] = []
        self.leased: set[int] = set()
        self.hash_of: dict[int, bytes] = {}
        self.pins: dict[str, list[int]] = {}
        self.evictable: list[int] = []  # the next one first
        self.handed_out = [0] * NUM_BLOCKS
        self.follower = BlockFollower()
        for name, count, computed in begun:
            self.begin(name, count, computed)

    def copy(self, source: int, target: int) -> None:
        self.contents[target] = self.contents[source]

    def holds(self, block: int) -> int:
        return sum(block in blocks for blocks in self.holders)

    def refs(self, block: int) -> int:
        return self.holds(block) + sum(block in blocks for blocks in self.quarantines)

    def pinned(self) -> set[int]:
        return {block for blocks in self.pins.values() for block in blocks}

    def free(self) -> set[int]:
        return {block for block in BLOCKS if self.refs(block) == 0 and block not in self.hash_of}

    def block_of(self, content_hash: bytes) -> int | None:
        return next((block for block, other in self.hash_of.items() if other == content_hash), None)

    def resident_prefix(self, name: str) -> list[int]:
        blocks: list[int] = []
        for content_hash in chain(name, 3):
            block = self.block_of(content_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def put_away(self, blocks: list[int]) -> None:
        """After somebody let go of `blocks`, a chain from its beginning."""
        for block in reversed(blocks):
            if self.refs(block) == 0 and block in self.hash_of and block not in self.pinned() | {*self.evictable}:
                depth = self.hash_of[block][1] - ord("0")
                parent = self.resident_prefix(chr(self.hash_of[block][0]))[depth - 1] if depth else None
                place = self.evictable.index(parent) if parent in self.evictable else len(self.evictable)
                self.evictable.insert(place, block)

    def take_one(self, block: int) -> None:
        """`block` was allocated: it was free, or nothing was and it was the next to be evicted."""
        if free := self.free():
            assert block in free
        else:
            assert block == self.evictable.pop(0)
            name, depth = self.hash_of[block][:1], self.hash_of[block][1]
            self.hash_of = {b: h for b, h in self.hash_of.items() if h[:1] != name or h[1] < depth}
            self.evictable = [b for b in self.evictable if b in self.hash_of]
        self.handed_out[block] += 1

    def allocate_into(self, blocks: list[int], count: int) -> None:
        for block in self.pool.allocate(count):
            self.take_one(block)
            blocks.append(block)

    @precondition(lambda self: len(self.holders) < 4)
    @rule(name=names, count=st.integers(0, 3), computed=st.booleans())
    def begin(self, name: str, count: int, computed: bool) -> None:
        """A holder of what is resident of a chain, and of so many new blocks, with the chain's KV if `computed`."""
        blocks = self.resident_prefix(name)
        assert self.pool.lookup(chain(name, 3)) == blocks
        self.pool.acquire(blocks)
        self.evictable = [block for block in self.evictable if block not in blocks]
        self.holders.append(blocks)
        if count > len(self.free()) + len(self.evictable):
            assert raised(NoFreeBlocks, self.pool.allocate, count)
            return
        self.allocate_into(blocks, count)
        if computed:
            self.register_as(name, blocks)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), name=names)
    def register(self, data: st.DataObject, name: str) -> None:
        self.register_as(name, data.draw(st.sampled_from([blocks for blocks in self.holders if blocks])))

    def register_as(self, name: str, blocks: list[int]) -> None:
        """A holder's blocks turn out to hold chain `name` from its beginning."""
        for i, (block, content_hash) in enumerate(zip(blocks, chain(name, 3), strict=False)):
            if block in self.leased or block in self.hash_of:
                break
            parent = chain(name, i)[-1] if i else None
            first = self.block_of(content_hash)
            if first is None and (parent is None or self.block_of(parent) is not None):
                self.hash_of[block] = content_hash
            assert self.pool.register(block, content_hash, parent) == (block if first is None else first)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), cancelled=st.booleans())
    def fork(self, data: st.DataObject, cancelled: bool) -> None:
        """A second holder; if it is cancelled at once, a link may still read on its behalf."""
        blocks = list(data.draw(st.sampled_from([blocks for blocks in self.holders if blocks])))
        if self.leased & set(blocks):
            assert raised(InternalError, self.pool.acquire, blocks)
        else:
            self.pool.acquire(blocks)
            if cancelled:
                self.pool.quarantine(blocks)
            (self.quarantines if cancelled else self.holders).append(blocks)

    @precondition(lambda self: self.evictable)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Somebody takes more than is free, for a moment."""
        blocks: list[int] = []
        self.holders.append(blocks)
        self.allocate_into(blocks, len(self.free()) + data.draw(st.integers(1, len(self.evictable))))
        self.holders.pop()
        self.pool.release(blocks)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), value=st.integers(100, 999))
    def write(self, data: st.DataObject, value: int) -> None:
        """A holder writes into one of its blocks: nobody else may see it, and it keeps what it had."""
        blocks = data.draw(st.sampled_from([blocks for blocks in self.holders if blocks]))
        i = data.draw(st.integers(0, len(blocks) - 1))
        block = blocks[i]
        shared = self.refs(block) > 1 or block in self.hash_of
        if block in self.leased or (shared and not self.free() and not self.evictable):
            assert raised((InternalError if block in self.leased else NoFreeBlocks), self.pool.copy_on_write, block)
            return
        before = self.contents[block]
        written = self.pool.copy_on_write(block)
        assert (written != block) == shared
        assert self.contents[written] == before
        if shared:
            self.take_one(written)
            blocks[i] = written
            self.put_away([block])
        self.contents[written] = value

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if leased := self.leased.intersection(blocks):
            assert raised(InternalError, self.pool.release, blocks)
            self.pool.unlease(sorted(leased))
            self.leased -= leased
        self.pool.release(blocks)
        self.put_away(blocks)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def leave_window(self, data: st.DataObject) -> None:
        """A holder gives back its first block, and keeps those that continue it."""
        blocks = data.draw(st.sampled_from([blocks for blocks in self.holders if blocks]))
        if blocks[0] not in self.leased:
            first = blocks.pop(0)
            self.pool.release([first])
            self.put_away([first])

    def leasable(self) -> list[int]:
        held = {block for blocks in self.holders for block in blocks}
        return sorted(b for b in held - self.leased if self.refs(b) == 1 and b not in self.hash_of)

    @precondition(lambda self: self.leasable())
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.leasable()))
        self.pool.lease([block])
        self.leased.add(block)

    @precondition(lambda self: self.leased)
    @rule()
    def unlease(self) -> None:
        self.pool.unlease(sorted(self.leased))
        self.leased.clear()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.quarantine(blocks)
        self.leased -= set(blocks)
        self.quarantines.append(blocks)

    @precondition(lambda self: self.quarantines)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        blocks = self.quarantines.pop(data.draw(st.integers(0, len(self.quarantines) - 1)))
        self.pool.unquarantine(blocks)
        self.put_away(blocks)

    @precondition(lambda self: self.hash_of)
    @rule(pin=st.sampled_from("xy"), name=names, length=st.integers(1, 3))
    def pin(self, pin: str, name: str, length: int) -> None:
        blocks = self.resident_prefix(name)[:length]
        former = self.pins.pop(pin, [])
        if len(self.pinned() | set(blocks)) > MAX_PINNED:
            self.pins[pin] = former
            assert raised(PinLimit, self.pool.pin, pin, chain(name, length))
            return
        assert self.pool.pin(pin, chain(name, length)) == len(blocks)
        if blocks:
            self.pins[pin] = blocks
        self.evictable = [block for block in self.evictable if block not in blocks]
        self.put_away(former)

    @precondition(lambda self: self.pins)
    @rule(pin=st.sampled_from("xy"))
    def unpin(self, pin: str) -> None:
        self.pool.unpin(pin)
        self.put_away(self.pins.pop(pin, []))

    @precondition(lambda self: self.hash_of and len(self.holders) + len(self.quarantines) < 2)
    @rule()
    def reset(self) -> None:
        idle = not any(self.refs(block) for block in BLOCKS)
        assert self.pool.reset_prefix_cache() == idle
        if idle:
            self.hash_of, self.pins, self.evictable = {}, {}, []

    @rule(restarts=st.booleans())
    def follow(self, restarts: bool) -> None:
        if restarts:
            self.follower.restart(self.pool.snapshot())
        else:
            self.follower.apply(self.pool.take_events())
            if self.follower.needs_snapshot:
                self.follower.restart(self.pool.snapshot())
        assert set(self.follower.resident) == set(self.hash_of.values())

    @invariant()
    def states_agree(self) -> None:
        self.pool.check_integrity()
        held = {block for block in BLOCKS if self.holds(block)}
        stats = self.pool.stats()
        assert stats == BlockStats(
            free=len(self.free()),
            cached=sum(self.refs(block) == 0 for block in self.hash_of),
            owned=len(held - self.leased),
            leased=len(self.leased),
            quarantined=len([block for block in BLOCKS if self.refs(block)]) - len(held),
            total=NUM_BLOCKS,
            pinned=len(self.pinned()),
            copies_avoided=sum(max(0, self.holds(block) - 1) for block in BLOCKS),
            copies=stats.copies,
            evictions=stats.evictions,
            event_overflows=stats.event_overflows,
        )
        assert stats.free + stats.cached + stats.owned + stats.leased + stats.quarantined == NUM_BLOCKS
        assert self.pool.num_allocatable == len(self.free()) + len(self.evictable)
        assert [self.pool.generation(block) for block in BLOCKS] == self.handed_out
        assert [self.pool.references(block) for block in BLOCKS] == [self.refs(block) for block in BLOCKS]


ObviousPool.TestCase.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAgainstAnObviousPool = ObviousPool.TestCase
