"""Owns the block ids of one KV pool: who holds each, which are cached under a content hash. Knows no requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack

from engine.block_events import BlockEvents, EventBatch, Snapshot
from engine.block_manager_checks import check_manager
from engine.block_stats import BlockStats
from engine.config import CacheConfig
from engine.errors import InternalError, NoFreeBlocks
from engine.lru_list import LruList
from engine.pinned_prefixes import PinnedPrefixes
from engine.prefix_index import PrefixIndex

MAX_PENDING_HASHES_PER_BLOCK = 4
"""Events wait until the pool has turned over twice; from there on a snapshot is much the shorter answer."""

__all__ = ["BlockManager", "BlockStats"]


class BlockManager:
    """References, hashes and states of the blocks 0 to `num_blocks - 1`.

    A block is referred to by requests (`_holders`) and by quarantines (`_quarantines`). Invariants, re-derived by
    `check_integrity`:
      1. A block with neither is free, in `_cached`, or pinned: exactly one of the three. With one of them, none.
      2. Free blocks have no hash; `_cached` and pinned ones have one.
      3. A leased block has one holder, no quarantine and no hash: nobody can find it before its KV is there.
      4. What is pinned is whole prefixes. Residency is prefix-closed (`PrefixIndex`): evicting a block takes the hash
         from all that continue it.
      5. Without a sliding window `_cached` has every block before its parent, so that nothing continues what is
         evicted.
      6. The contents of a block with a hash are those of the hash: nothing here can check that.

    Only this class changes these tables; others hold block ids and hand them back. Each block costs O(1) in every
    call. Misuse (a block that the caller cannot hold, or no block of this pool) raises `InternalError` before anything
    has changed.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        copy_block: Callable[[int, int], None] | None = None,
        on_evict: Callable[[int, bytes], None] | None = None,
        incarnation: str = "",
    ) -> None:
        """`copy_block(source, target)` copies contents; needed for `copy_on_write` alone. `on_evict(block, hash)` is
        called while the contents are still there, and must not raise. `incarnation` of the worker: for its events."""
        self._config = config
        self._num_blocks = config.num_blocks
        self._copy_block = copy_block
        self._on_evict = on_evict
        # Last in, first out: a small working set touches few pages of the pool.
        self._free = list(reversed(range(config.num_blocks)))
        self._cached = LruList(config.num_blocks)
        """Blocks that can be evicted, the next one first."""
        self._holders = [0] * config.num_blocks
        self._quarantines = [0] * config.num_blocks
        self._generation = [0] * config.num_blocks
        self._leased: set[int] = set()
        self._events = BlockEvents(incarnation, max_hashes=MAX_PENDING_HASHES_PER_BLOCK * config.num_blocks)
        self._index = PrefixIndex(self._events)
        self._pins = PinnedPrefixes(config.max_pinned_blocks)
        self._num_idle_pinned = 0
        """Pinned blocks that nobody refers to."""
        self._num_quarantined = 0
        """Blocks that only quarantines refer to."""
        self._num_shares = 0
        """Holders of each block beyond its first, all together."""
        self._num_copies = 0
        self._num_evictions = 0
        self._num_damaged = 0

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can give, the cached ones included."""
        return len(self._free) + len(self._cached)

    def can_allocate(self, count: int, keeping: Collection[int] = ()) -> bool:
        """Whether `allocate(count)` will do after `acquire(keeping)`."""
        self._check_inside(keeping)
        return count + sum(block in self._cached for block in keeping) <= self.num_allocatable

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one holder, no hash, and a new generation; contents are arbitrary.

        Cached blocks are given up only when no free ones are left, least recently released first. All or nothing: on
        `NoFreeBlocks` the pool is unchanged.
        """
        if count > self.num_allocatable:
            raise NoFreeBlocks(f"need {count} blocks, {self.num_allocatable} of {self._config.num_blocks} free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            self._generation[block] += 1
        return blocks

    def generation(self, block: int) -> int:
        """How often `block` was handed out by `allocate`, or discarded. Tells a late write to its former life apart."""
        self._check_inside((block,))
        return self._generation[block]

    def references(self, block: int) -> int:
        """Requests and quarantines that refer to `block`."""
        self._check_inside((block,))
        return self._holders[block] + self._quarantines[block]

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a holder to each block: found by `lookup`, or held already, as when a request forks.

        A cached one cannot be evicted any more."""
        self._check_inside(blocks)
        holders, quarantines = self._holders, self._quarantines
        for block in blocks:
            if block in self._leased or not (holders[block] or quarantines[block] or block in self._index):
                raise InternalError(f"block {block} cannot be acquired: free, or its KV is still to arrive")
        for block in blocks:
            if holders[block]:
                self._num_shares += 1
            elif quarantines[block]:
                self._num_quarantined -= 1
            elif block in self._pins:
                self._num_idle_pinned -= 1
            else:
                self._cached.remove(block)
            holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder from each block, given in chain order. Without any it is cached, or free.

        Works from the last to the first, so that of a chain released together the deepest block is evicted first.
        """
        self._check_held(blocks)
        if not self._leased.isdisjoint(blocks):
            raise InternalError(f"blocks {sorted(self._leased.intersection(blocks))} are leased to a link")
        for block in reversed(blocks):
            if self._drop_holder(block):
                self._put_away(block)

    def is_writable(self, block: int) -> bool:
        """Whether nobody but the one holder reads `block`, or can find it: it may be written in place."""
        if not 0 <= block < self._num_blocks:  # in line: this is asked for every token
            self._check_inside((block,))
        return self._holders[block] == 1 and not self._quarantines[block] and block not in self._index

    def copy_on_write(self, block: int) -> int:
        """Exchange the caller's hold on `block` for a writable block with the same contents. Returns that one.

        It is `block` itself if that is writable; so of all that share a block, the last one keeps it. All or nothing:
        on `NoFreeBlocks`, and if copying fails, the pool is unchanged but for evictions.
        """
        self._check_has_holder(block)
        if block in self._leased:
            raise InternalError(f"block {block} is leased: its KV is still to arrive")
        if self.is_writable(block):
            return block
        if self._copy_block is None:
            raise InternalError("this pool was built without a way to copy blocks")
        with ExitStack() as undo:
            (copy,) = self.allocate(1)
            undo.callback(self.release, (copy,))
            self._copy_block(block, copy)
            undo.pop_all()
        self.release((block,))
        self._num_copies += 1
        return copy

    def register(self, block: int, content_hash: bytes, parent: bytes | None, name: bytes = b"") -> int:
        """Let `lookup` find a held block whose KV is complete. Returns the block to use for this content from now on.

        That is another block if one with this content was registered first; `block` then stays without a hash, and
        its holder does best to change over. It stays so too if its parent, by hash, is not resident (any more).
        `parent` is None for the first block of a chain. Events call the block by `name`, if it is not empty.
        """
        self._check_has_holder(block)
        if block in self._leased or self._index.hash_of(block) not in (None, content_hash):
            raise InternalError(f"block {block} cannot be registered: leased, or under another hash already")
        resident = self._index.block_of(content_hash)
        if resident is not None:
            return resident
        self._index.add(block, content_hash, parent, name)
        return block

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest resident prefix of the chain `hashes`. Keeps nothing: `acquire` before `allocate`."""
        return self._index.longest_prefix(hashes)

    def is_own(self, block: int) -> bool:
        """Whether it is of this pool, and not lent to us: see `engine.borrowing`."""
        return True

    def is_registered(self, block: int) -> bool:
        """Whether `lookup` can find it."""
        return block in self._index

    def is_pinned(self, block: int) -> bool:
        """Whether a name keeps it from eviction."""
        return block in self._pins

    def lease(self, blocks: Sequence[int]) -> None:
        """Note that a link may write into these freshly allocated blocks."""
        self._check_distinct(blocks)
        for block in blocks:
            if not self.is_writable(block) or block in self._leased:
                raise InternalError(f"block {block} cannot be leased: not held exactly once, shared, or leased already")
        self._leased.update(blocks)

    def unlease(self, blocks: Sequence[int]) -> None:
        """Note that no link writes into these blocks any more. Their one holder keeps them."""
        for block in blocks:
            if block not in self._leased:
                raise InternalError(f"block {block} is not leased")
        self._leased.difference_update(blocks)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Pass the caller's hold on each block to the quarantine: the memory is not reused before it is quiet.

        Ends the lease of leased blocks. Blocks with a hash can be found still: reading them is safe.
        """
        self._check_held(blocks)
        for block in blocks:
            self._drop_holder(block)
            self._quarantines[block] += 1
            self._num_quarantined += self._holders[block] == 0 and self._quarantines[block] == 1
        self._leased.difference_update(blocks)

    def unquarantine(self, blocks: Sequence[int]) -> None:
        """Drop one quarantine from each block, given in chain order, as `release` does."""
        self._check_distinct(blocks)
        for block in blocks:
            if not self._quarantines[block]:
                raise InternalError(f"block {block} is not in quarantine")
        for block in reversed(blocks):
            self._quarantines[block] -= 1
            if not self._holders[block] and not self._quarantines[block]:
                self._num_quarantined -= 1
                self._put_away(block)

    def pin(self, name: str, hashes: Sequence[bytes], max_blocks: int | None = None) -> int:
        """Keep the longest resident prefix of a chain from eviction until `unpin(name)`. Returns its number of blocks.

        `hashes` begin with the first block of the chain. A name that is in use changes over to these blocks. Raises
        `PinLimit` if all names together would pin more than `max_pinned_share` allows, or more than `max_blocks`;
        then nothing has changed.
        """
        blocks = self._index.longest_prefix(hashes)
        if [self._index.parent(block) for block in blocks] != [None, *blocks][: len(blocks)]:
            raise InternalError(f"the hashes of pin {name!r} are no chain from its first block on")
        added, dropped = self._pins.replace(name, blocks, max_blocks)
        for block in added:
            if not self._holders[block] and not self._quarantines[block]:
                self._cached.remove(block)
                self._num_idle_pinned += 1
        self._unpinned(dropped)
        return len(blocks)

    def unpin(self, name: str) -> None:
        """An unknown name is ignored."""
        self._unpinned(self._pins.replace(name, (), None)[1])

    def discard(self, block: int) -> dict[int, bytes | None]:
        """The contents of `block` are not what was written: it and all that continues it, which may have been computed
        from it, are found no more, pinned or not, and get new generations. Who holds them, holds them still.

        Returns them, `block` among them, with the hashes that they had.
        """
        self._check_inside((block,))
        discarded = self._index.subtree(block) if block in self._index else [block]
        hashes = {member: self._index.hash_of(member) for member in discarded}
        self._unpinned(self._pins.cut(hashes))
        if block in self._index:
            self._free_cached(self._index.remove(block))
        for member in discarded:
            self._generation[member] += 1
        self._num_damaged += 1
        return hashes

    def reset_prefix_cache(self) -> bool:
        """Forget all contents, the pinned ones and the names of pins too, with one event.

        False, and nothing has changed, while anybody refers to any block.
        """
        if any(self._holders) or any(self._quarantines):
            return False
        self._pins.clear()
        self._num_idle_pinned = 0
        self._cached = LruList(self._config.num_blocks)
        self._free = list(reversed(range(self._config.num_blocks)))
        self._index.clear()
        return True

    def take_events(self) -> EventBatch:
        """What became resident and what was evicted since the last call."""
        return self._events.take()

    def snapshot(self) -> Snapshot:
        """All that is resident. O(blocks)."""
        return self._index.snapshot()

    def stats(self) -> BlockStats:
        free, cached, leased = len(self._free), len(self._cached) + self._num_idle_pinned, len(self._leased)
        total, quarantined = self._config.num_blocks, self._num_quarantined
        owned = total - free - cached - leased - quarantined
        return BlockStats(
            free=free,
            cached=cached,
            owned=owned,
            leased=leased,
            quarantined=quarantined,
            total=total,
            pinned=len(self._pins),
            copies_avoided=self._num_shares,
            copies=self._num_copies,
            evictions=self._num_evictions,
            event_overflows=self._events.num_overflows,
            damaged=self._num_damaged,
        )

    def check_integrity(self) -> None:
        """Re-derive every invariant and every count from the tables. O(blocks); for tests and idle moments."""
        check_manager(self, BlockManager.stats(self))

    def check_holders(self, holders: Counter[int]) -> None:
        """`holders`: how many references each block must have, by id."""
        for block in range(self._num_blocks):
            assert self.references(block) == holders[block], f"block {block} has {holders[block]} holders"

    def _evict(self) -> int:
        evicted = self._cached.pop_oldest()
        content_hash = self._index.hash_of(evicted)
        if self._on_evict is not None and content_hash is not None:
            self._on_evict(evicted, content_hash)
        *followers, _ = self._index.remove(evicted)
        self._free_cached(followers)
        self._num_evictions += 1
        return evicted

    def _free_cached(self, unregistered: Iterable[int]) -> None:
        """Those that somebody holds stay with them; the rest has lost what made it worth keeping."""
        for block in unregistered:
            if block in self._cached:
                self._cached.remove(block)
                self._free.append(block)

    def _drop_holder(self, block: int) -> bool:
        """Whether nobody refers to `block` any more."""
        self._holders[block] -= 1
        if self._holders[block]:
            self._num_shares -= 1
            return False
        if self._quarantines[block]:
            self._num_quarantined += 1
            return False
        return True

    def _put_away(self, block: int) -> None:
        """Nobody refers to `block` any more."""
        if block not in self._index:
            self._free.append(block)
        elif block in self._pins:
            self._num_idle_pinned += 1
        else:
            # Only blocks that leave a window go after their parents. The deeper of the two is evicted first.
            parent = self._index.parent(block) if self._config.sliding_window else None
            if parent is not None and parent in self._cached:
                self._cached.insert_before(block, parent)
            else:
                self._cached.append(block)

    def _unpinned(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if not self._holders[block] and not self._quarantines[block]:
                self._num_idle_pinned -= 1
                self._put_away(block)

    def _check_held(self, blocks: Collection[int]) -> None:
        self._check_distinct(blocks)
        if not all(map(self._holders.__getitem__, blocks)):
            raise InternalError(f"block {next(b for b in blocks if not self._holders[b])} has no holder")

    def _check_has_holder(self, block: int) -> None:
        if not 0 <= block < self._num_blocks or not self._holders[block]:
            raise InternalError(f"block {block} has no holder")

    def _check_distinct(self, blocks: Collection[int]) -> None:
        self._check_inside(blocks)
        if len(set(blocks)) != len(blocks):
            raise InternalError(f"a block is named twice: {list(blocks)}")

    def _check_inside(self, blocks: Collection[int]) -> None:
        # A negative id would find the last blocks.
        if blocks and (min(blocks) < 0 or max(blocks) >= self._num_blocks):
            raise InternalError(f"blocks {list(blocks)}: the pool has 0 to {self._num_blocks - 1}")
