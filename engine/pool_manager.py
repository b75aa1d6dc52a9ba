"""Which managers of blocks go with a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.block_copy import copy_block, host_copies
from engine.block_manager import BlockManager
from engine.borrowing import BorrowingBlockManager
from engine.config import CacheConfig
from engine.host_tier import HostTier
from engine.kv_cache import KvCache
from engine.lending import LendingBlockManager


def pool_manager(
    kv: KvCache, config: CacheConfig, on_evict: Callable[[int, bytes], None] | None, incarnation: str
) -> BlockManager:
    copy = partial(copy_block, kv)
    if kv.windows is not None:
        return BorrowingBlockManager(
            config, copy_block=copy, on_evict=on_evict, incarnation=incarnation, fence=kv.fence
        )
    if kv.lends and kv.generations is not None:
        return LendingBlockManager(
            config,
            copy_block=copy,
            on_evict=on_evict,
            incarnation=incarnation,
            generations=kv.generations,
            fence=kv.fence,
            max_lent=kv.max_lent_blocks,
        )
    return BlockManager(config, copy_block=copy, on_evict=on_evict, incarnation=incarnation)


def host_tier(kv: KvCache) -> HostTier | None:
    copies = host_copies(kv)
    return None if copies is None else HostTier(kv.num_host_blocks, kv.layout.block_bytes, copies)
