"""Copies blocks within a KV pool, and between it and host memory. Knows layouts only by their size."""

from __future__ import annotations

from engine.cuda.memory import CudaHostCopies, CudaKvCache
from engine.host_tier import BlockMover
from engine.kv_cache import KvCache


def copy_block(kv: KvCache, source: int, target: int) -> None:
    """All layers, and scales where there are any: a block is one piece of memory."""
    if isinstance(kv, CudaKvCache):
        kv.copy_block(source, target)
    else:
        kv.block(target)[:] = kv.block(source)


def host_copies(kv: KvCache) -> BlockMover | None:
    """What moves blocks between the pool and its host memory; None if it has none."""
    if isinstance(kv, CudaKvCache):
        return CudaHostCopies(kv) if kv.num_host_blocks else None
    return None if kv.host is None else HostCopies(kv, kv.host)


class HostCopies:
    """Moves blocks between a pool and its host memory. Each copy is done when the call returns."""

    def __init__(self, kv: KvCache, host: KvCache) -> None:
        self._kv = kv
        self._host = host

    def to_host(self, block: int, slot: int) -> None:
        self._host.block(slot)[:] = self._kv.block(block)

    def to_pool(self, slot: int, block: int) -> None:
        self._kv.block(block)[:] = self._host.block(slot)

    def wait(self) -> None:
        """Nothing is in flight."""
