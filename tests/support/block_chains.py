"""Chains of made-up content hashes in a block manager."""

from __future__ import annotations

from engine.block_manager import BlockManager


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def register(pool: BlockManager, blocks: list[int], hashes: list[bytes]) -> None:
    for block, content_hash, parent in zip(blocks, hashes, [None, *hashes], strict=False):
        assert pool.register(block, content_hash, parent) == block


def cached_chain(pool: BlockManager, name: str, length: int) -> list[int]:
    blocks = pool.allocate(length)
    register(pool, blocks, chain(name, length))
    pool.release(blocks)
    return blocks
