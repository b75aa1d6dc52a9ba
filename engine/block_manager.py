"""Owns the block ids of one KV pool: who holds each, which are cached under a content hash. Knows no requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.config import CacheConfig
from engine.errors import InternalError, NoFreeBlocks


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Every block is in exactly one state, so the first five add up to `total`."""

    free: int
    """Without content."""
    cached: int
    """Held by nobody, found by hash, given up when memory is wanted."""
    owned: int
    """Held by at least one request."""
    leased: int
    """Held by one request, and a link may write into it."""
    quarantined: int
    """Held by nobody but the quarantine: a link may still read or write it."""
    total: int


class BlockManager:
    """Reference counts, hashes and states of the blocks 0 to `num_blocks - 1`.

    Invariants, re-derived by `check_integrity`:
      1. A block is free, cached, or held (`_refs > 0`): exactly one of the three.
      2. `_hash_of` and `_block_of` are inverse; free blocks have no hash, cached blocks have one.
      3. A leased block has one reference and no hash: nobody can find it before its KV is there.
      4. The quarantine holds one reference for each of its entries.
      5. The contents of a block with a hash are those of the hash: nothing here can check that.

    Only this class changes these tables; others hold block ids and hand them back. Each block costs O(1) in every
    call. Misuse (a block that the caller cannot hold) raises `InternalError` before anything has changed.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._num_blocks = config.num_blocks
        # Last in, first out: a small working set touches few pages of the pool.
        self._free = list(reversed(range(config.num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """In the order in which they are given up."""
        self._refs = [0] * config.num_blocks
        self._generation = [0] * config.num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._leased: set[int] = set()
        self._quarantine: dict[int, int] = {}
        """Block -> references that the quarantine holds."""

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can give, the cached ones included."""
        return len(self._free) + len(self._cached)

    def can_allocate(self, count: int, keeping: Iterable[int] = ()) -> bool:
        """Whether `allocate(count)` will do after `acquire(keeping)`."""
        return count + sum(block in self._cached for block in keeping) <= self.num_allocatable

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference, no hash, and a new generation; contents are arbitrary.

        Cached blocks are given up only when no free ones are left, least recently released first. All or nothing: on
        `NoFreeBlocks` the pool is unchanged.
        """
        if count > self.num_allocatable:
            raise NoFreeBlocks(f"need {count} blocks, {self.num_allocatable} of {self._num_blocks} free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self._generation[block] += 1
        return blocks

    def generation(self, block: int) -> int:
        """How often `block` was handed out by `allocate`. Tells a late write to its former life apart."""
        return self._generation[block]

    def references(self, block: int) -> int:
        return self._refs[block]

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block: cached (`lookup`) or held already. A cached one cannot be evicted any more."""
        for block in blocks:
            if block in self._leased or (self._refs[block] == 0 and block not in self._cached):
                raise InternalError(f"block {block} cannot be acquired: free, or its KV is still to arrive")
        for block in blocks:
            self._refs[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block, given in chain order. Without references it is cached, or free.

        Works from the last to the first, so that of a chain released together the deepest block is evicted first:
        a resident block's ancestors are resident too.
        """
        self._check_held(blocks)
        for block in blocks:
            if block in self._leased:
                raise InternalError(f"block {block} is leased: a link may write into it")
        for block in reversed(blocks):
            self._drop_reference(block)

    def register(self, block: int, content_hash: bytes) -> int:
        """Let `lookup` find a held block whose KV is complete. Returns the block that has the hash from now on.

        That is another block if one with this content was registered first; `block` then stays without a hash, and
        its holder does best to change over.
        """
        self._check_held((block,))
        if block in self._leased or self._hash_of.get(block, content_hash) != content_hash:
            raise InternalError(f"block {block} cannot be registered: leased, or under another hash already")
        holder = self._block_of.setdefault(content_hash, block)
        if holder == block:
            self._hash_of[block] = content_hash
        return holder

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest resident prefix of the chain `hashes`. Pins nothing: `acquire` before `allocate`."""
        blocks: list[int] = []
        for content_hash in hashes:
            block = self._block_of.get(content_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def lease(self, blocks: Sequence[int]) -> None:
        """Note that a link may write into these freshly allocated blocks."""
        _check_distinct(blocks)
        for block in blocks:
            if self._refs[block] != 1 or block in self._hash_of or block in self._leased:
                raise InternalError(f"block {block} cannot be leased: not held exactly once, shared, or leased already")
        self._leased.update(blocks)

    def unlease(self, blocks: Sequence[int]) -> None:
        """Note that no link writes into these blocks any more. Their one holder keeps them."""
        for block in blocks:
            if block not in self._leased:
                raise InternalError(f"block {block} is not leased")
        self._leased.difference_update(blocks)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Pass the caller's reference to each block to the quarantine: the memory is not reused before it is quiet.

        Ends the lease of leased blocks. Blocks with a hash can be found still: reading them is safe.
        """
        self._check_held(blocks)
        for block in blocks:
            self._quarantine[block] = self._quarantine.get(block, 0) + 1
        self._leased.difference_update(blocks)

    def unquarantine(self, blocks: Sequence[int]) -> None:
        """Drop one reference of the quarantine from each block, given in chain order, as `release` does."""
        _check_distinct(blocks)
        for block in blocks:
            if block not in self._quarantine:
                raise InternalError(f"block {block} is not in quarantine")
        for block in reversed(blocks):
            self._quarantine[block] -= 1
            if self._quarantine[block] == 0:
                del self._quarantine[block]
            self._drop_reference(block)

    def stats(self) -> BlockStats:
        free, cached, leased = len(self._free), len(self._cached), len(self._leased)
        quarantined = sum(self._refs[block] == count for block, count in self._quarantine.items())
        owned = self._num_blocks - free - cached - leased - quarantined
        return BlockStats(free, cached, owned, leased, quarantined, self._num_blocks)

    def check_integrity(self) -> None:
        """Re-derive every invariant from the tables. O(blocks); for tests and idle moments."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block in range(self._num_blocks) if self._refs[block] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(cached), f"free and cached: {free & cached}"
        assert free.isdisjoint(held), f"free and held: {free & held}"
        assert cached.isdisjoint(held), f"cached and held: {cached & held}"
        assert len(free) + len(cached) + len(held) == self._num_blocks, "a block was lost"
        assert all(refs >= 0 for refs in self._refs)
        assert self._block_of == {content_hash: block for block, content_hash in self._hash_of.items()}
        assert free.isdisjoint(self._hash_of), f"free with a hash: {free & self._hash_of.keys()}"
        assert cached <= self._hash_of.keys(), f"cached without a hash: {cached - self._hash_of.keys()}"
        for block in self._leased:
            assert self._refs[block] == 1, f"leased block {block} has {self._refs[block]} references"
            assert block not in self._hash_of, f"leased block {block} has a hash"
            assert block not in self._quarantine, f"block {block} is leased and in quarantine"
        for block, count in self._quarantine.items():
            assert 1 <= count <= self._refs[block], f"the quarantine holds {count} of {self._refs[block]} references"
        owned = {block for block in held - self._leased if self._refs[block] > self._quarantine.get(block, 0)}
        assert self.stats().owned == len(owned), f"{len(owned)} blocks are owned, {self.stats()}"

    def __repr__(self) -> str:
        return f"BlockManager({self.stats()})"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def _drop_reference(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _check_held(self, blocks: Collection[int]) -> None:
        """Held by somebody other than the quarantine."""
        _check_distinct(blocks)
        for block in blocks:
            if self._refs[block] <= self._quarantine.get(block, 0):
                raise InternalError(f"block {block} has no holder")


def _check_distinct(blocks: Collection[int]) -> None:
    if len(set(blocks)) != len(blocks):
        raise InternalError(f"a block is named twice: {list(blocks)}")
