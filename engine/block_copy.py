"""Copies one block of a KV pool onto another. Knows layouts only by their size."""

from __future__ import annotations

from engine.kv_cache import KvCache


def copy_block(kv: KvCache, source: int, target: int) -> None:
    """All layers, and scales where there are any: a block is one piece of memory."""
    kv.block(target)[:] = kv.block(source)
