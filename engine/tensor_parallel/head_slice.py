"""A rank's heads of the pool, which all ranks share."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from engine.kv_cache import kv_views
from engine.kv_layout import KvLayout
from engine.tensor_parallel.shards import Shard


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Views. See `KvCache`, whose `pool` and `scales` have all heads."""

    layout: KvLayout
    pool: torch.Tensor  # [blocks, layers, 2 (K, V), kv_heads of the rank, block_size, head_dim]
    scales: torch.Tensor | None  # [blocks, layers, 2, kv_heads of the rank] float32, in a quantized type

    @classmethod
    def of(cls, shard: Shard, layout: KvLayout, pool: torch.Tensor, scales: torch.Tensor | None) -> HeadSlice:
        part = layout.shard(shard.rank, shard.size)
        heads = slice(part.heads.start, part.heads.stop)
        return cls(part, pool[:, :, :, heads], None if scales is None else scales[:, :, :, heads])

    @classmethod
    def map(cls, shard: Shard, layout: KvLayout, num_blocks: int, fd: int) -> HeadSlice:
        """Of the pool in the memory file `fd`, which stays the caller's. The memory stays until the views are gone."""
        memory = mmap.mmap(fd, num_blocks * layout.block_bytes)
        by_block = torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, layout.block_bytes)
        return cls.of(shard, layout, *kv_views(by_block, layout))
