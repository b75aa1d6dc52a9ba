"""What must hold of all block tables together. For tests and idle moments; see `engine.block_tables`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from engine.block_manager import BlockManager
from engine.config import CacheConfig
from engine.request import Request

NO_BLOCK = -1
"""Stands in a block table for a block that left the sliding window: whoever reads it reads too far back."""


def check_tables(
    config: CacheConfig, pool: BlockManager, requests: Collection[Request], quarantined: Sequence[int]
) -> None:
    """`quarantined`: blocks that quarantines hold, once for each."""
    holders: Counter[int] = Counter(quarantined)
    leased = 0
    for request in requests:
        holders.update(_check_table(config, pool, request))
        if request.adoption is not None and not request.adoption.given_up:
            leased += len(request.adoption.missing)
            holders.update(request.adoption.borrowed.values())
    _check_shared_blocks(config, pool, requests)
    pool.check_holders(holders)
    assert pool.stats().leased == leased


def _check_table(config: CacheConfig, pool: BlockManager, request: Request) -> list[int]:
    """Returns its blocks."""
    released, published = request.num_released_blocks, request.num_published_blocks
    blocks = request.block_table[released:]
    assert request.block_table[:released] == [NO_BLOCK] * released, f"{request.request_id} lacks a block"
    assert NO_BLOCK not in blocks, f"{request.request_id} lacks a block"
    assert len(set(blocks)) == len(blocks), f"{request.request_id} has a block twice"
    if config.sliding_window is None:
        assert released == 0
        # What follows a borrowed block has no hash, and a borrowed one that is lost has none any more.
        if config.enable_prefix_caching and all(map(pool.is_own, blocks)):
            assert pool.lookup(request.block_hashes[:published]) == request.block_table[:published]
    for i in range(released, published):
        block = request.block_table[i]
        found = pool.lookup([request.block_hashes[i]])
        assert found == [block] or not pool.is_registered(block), f"block {block} has another's hash"
    num_begun = config.blocks_for(request.num_computed_tokens)
    for block in request.block_table[num_begun:]:
        assert pool.references(block) == 1, f"empty block {block} is shared"
    return blocks


def _check_shared_blocks(config: CacheConfig, pool: BlockManager, requests: Iterable[Request]) -> None:
    """Invariant 4. A hash says of a published block what the tokens say of the others."""
    size = config.block_size
    seen: dict[int, tuple[int, list[int]]] = {}
    for request in requests:
        for i in range(request.num_released_blocks, config.blocks_for(request.num_computed_tokens)):
            block = request.block_table[i]
            if pool.references(block) == 1 or pool.is_registered(block):
                continue
            tokens = request.token_ids[: min(request.num_computed_tokens, (i + 1) * size)]
            ordinal, others = seen.setdefault(block, (i, tokens))
            common = min(len(tokens), len(others))
            assert (ordinal, others[:common]) == (i, tokens[:common]), f"block {block} is shared by mistake"
