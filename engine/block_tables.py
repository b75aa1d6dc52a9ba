"""Moves blocks between the pool and the requests' block tables. Knows what a request needs, not whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.adoption import Adoption, MissingBlock
from engine.block_hash import BlockIdentity, extend_chain, pack_tokens
from engine.block_manager import BlockManager
from engine.config import CacheConfig
from engine.request import Request


@dataclass(slots=True)
class _Quarantine:
    """Blocks of a request that is gone, kept until none of `busy` is touched by a link."""

    blocks: list[int]  # in chain order
    busy: set[int]


class BlockTables:
    """The only writer of `Request.block_table`, `block_hashes` and `num_published_blocks`.

    Invariants, checked by `check_integrity`:
      1. A block has one reference for each table that it is in, and one for each quarantine.
      2. The first `num_published_blocks` of a table hold complete KV, never written again, and (prefix caching on)
         each is the one that is registered under its hash.
      3. A block is leased exactly while a request waits for its KV.

    By 2, whoever holds a published block holds the published blocks before it; released together, deepest first,
    they leave a cache in which every resident block's ancestors are resident.
    """

    def __init__(self, config: CacheConfig, blocks: BlockManager, identity: BlockIdentity) -> None:
        self._config = config
        self._blocks = blocks
        self._identity = identity
        self._quarantines: list[_Quarantine] = []

    def blocks_to_begin(self, request: Request) -> int:
        """For all known tokens, and one more to grow into unless the request can never fill it."""
        return min(
            self._config.blocks_for(len(request.token_ids)) + 1,
            self._config.blocks_for(request.max_kv_tokens),
        )

    def admit(self, request: Request) -> bool:
        """Pin the cached prefix and allocate the rest of `blocks_to_begin`; those tokens count as computed.

        All or nothing: on False, request and pool are unchanged.
        """
        cached = self._cached_prefix(request)
        count = self.blocks_to_begin(request) - len(cached)
        if not self._blocks.can_allocate(count, keeping=cached):
            return False
        self._blocks.acquire(cached)
        request.block_table = cached + self._blocks.allocate(count)
        request.num_published_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self._config.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        return True

    def grow(self, request: Request) -> bool:
        """Make room for the KV of all known tokens. All or nothing: on False, request and pool are unchanged."""
        count = self._config.blocks_for(len(request.token_ids)) - len(request.block_table)
        if count <= 0:
            return True
        if not self._blocks.can_allocate(count):
            return False
        request.block_table += self._blocks.allocate(count)
        return True

    def publish(self, request: Request) -> None:
        """Register the blocks that are full of computed KV, so that other requests find them.

        Where another block has the same content already, the request changes over to that one: it may be shared,
        ours becomes free. Nobody but the request can know of ours.
        """
        if not self._config.enable_prefix_caching:
            return
        self._hash_full_blocks(request)
        for i in range(request.num_published_blocks, request.num_computed_tokens // self._config.block_size):
            own = request.block_table[i]
            first = self._blocks.register(own, request.block_hashes[i])
            if first != own:
                self._blocks.acquire([first])
                self._blocks.release([own])
                request.block_table[i] = first
            request.num_published_blocks = i + 1

    def open_transfer(self, request: Request, adoption: Adoption) -> tuple[MissingBlock, ...]:
        """Lease every block of the reservation that is not resident, and say what belongs into each.

        Leases nothing and returns nothing if the transfer was given up before it began: the KV is missing all the
        same.
        """
        ordinals = range(request.num_published_blocks, self._config.blocks_for(adoption.num_tokens))
        adoption.expect(ordinals)
        if adoption.given_up:
            return ()
        hashes = self._reservation_hashes(request, adoption.num_tokens)
        slots = request.block_table
        self._blocks.lease([slots[i] for i in ordinals])
        return tuple(MissingBlock(i, slots[i], self._blocks.generation(slots[i]), hashes[i]) for i in ordinals)

    def close_transfer(self, request: Request, ordinals: Iterable[int]) -> None:
        """No link writes into these blocks of the request any more."""
        self._blocks.unlease([request.block_table[i] for i in ordinals])

    def free(self, request: Request, busy_slots: Collection[int] = ()) -> None:
        """Let go of the request's blocks. Those that a link may touch still stay in quarantine until `quiet`.

        With a busy block that is published the ones before it stay too, so that none is evicted before it.
        """
        adoption = request.adoption
        if adoption is not None and not adoption.given_up:
            self.close_transfer(request, adoption.missing)
        table, request.block_table = request.block_table, []
        busy = set(busy_slots).intersection(table)
        prefix = max((i + 1 for i in range(request.num_published_blocks) if table[i] in busy), default=0)
        kept = [block for i, block in enumerate(table) if i < prefix or block in busy]
        self._blocks.release([block for i, block in enumerate(table) if i >= prefix and block not in busy])
        request.num_published_blocks = 0
        if kept:
            self._blocks.quarantine(kept)
            self._quarantines.append(_Quarantine(kept, busy))

    def quiet(self, slots: Iterable[int]) -> None:
        """Nothing touches these slots any more on behalf of one request that was freed with them busy.

        A slot may be busy for several such requests; each needs its own call. Slots that are not busy are ignored.
        """
        for slot in slots:
            for quarantine in self._quarantines:
                if slot in quarantine.busy:
                    quarantine.busy.remove(slot)
                    break
        for quarantine in self._quarantines:
            if not quarantine.busy:
                self._blocks.unquarantine(quarantine.blocks)
        self._quarantines = [quarantine for quarantine in self._quarantines if quarantine.busy]

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """`requests`: all that hold blocks."""
        self._blocks.check_integrity()
        holders: Counter[int] = Counter()
        leased = 0
        for request in requests:
            assert len(set(request.block_table)) == len(request.block_table), f"{request.request_id} has a block twice"
            holders.update(request.block_table)
            if request.adoption is not None and not request.adoption.given_up:
                leased += len(request.adoption.missing)
            if self._config.enable_prefix_caching:
                published = request.num_published_blocks
                assert self._blocks.lookup(request.block_hashes[:published]) == request.block_table[:published]
        for quarantine in self._quarantines:
            assert quarantine.busy, "a quarantine without a busy block"
            holders.update(quarantine.blocks)
        for block in range(self._config.num_blocks):
            assert self._blocks.references(block) == holders[block], f"block {block} has {holders[block]} holders"
        assert self._blocks.stats().leased == leased

    def _cached_prefix(self, request: Request) -> list[int]:
        """Never the block of the last token: its logits are wanted, and a block that others share is not written."""
        if not self._config.enable_prefix_caching:
            return []
        self._hash_full_blocks(request)
        return self._blocks.lookup(request.block_hashes[: (len(request.token_ids) - 1) // self._config.block_size])

    def _hash_full_blocks(self, request: Request) -> None:
        size, hashes = self._config.block_size, request.block_hashes
        for i in range(len(hashes), len(request.token_ids) // size):
            parent = hashes[-1] if hashes else self._identity.root(request.scope)
            hashes.append(extend_chain(parent, pack_tokens(request.token_ids[i * size : (i + 1) * size])))

    def _reservation_hashes(self, request: Request, num_tokens: int) -> list[bytes]:
        """Of the blocks of the first `num_tokens` tokens; the last one may be partial, as it is at the sender."""
        self._hash_full_blocks(request)
        num_full = num_tokens // self._config.block_size
        hashes = request.block_hashes[:num_full]
        tail = request.token_ids[num_full * self._config.block_size : num_tokens]
        if tail:
            parent = hashes[-1] if hashes else self._identity.root(request.scope)
            hashes.append(extend_chain(parent, pack_tokens(tail)))
        return hashes
