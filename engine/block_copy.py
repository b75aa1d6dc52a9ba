"""Copies blocks within a KV pool, and between it and host memory. Knows layouts only by their size."""

from __future__ import annotations

from engine.kv_cache import KvCache


def copy_block(kv: KvCache, source: int, target: int) -> None:
    """All layers, and scales where there are any: a block is one piece of memory."""
    kv.block(target)[:] = kv.block(source)


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
