"""What becomes of a block whose bytes are not those that were written, and of who computes from it."""

from __future__ import annotations

from collections.abc import Collection

from engine.block_manager import BlockManager
from engine.host_tier import HostTier
from engine.request import Request, RequestStatus


def discard(block: int, pool: BlockManager, host: HostTier | None, live: Collection[Request]) -> list[Request]:
    """Let nobody find `block` any more, or what continues it, in the pool or in host memory.

    Live requests keep their blocks, as links may be reading them, but not as published ones. Returns those that would
    go on computing from one of them: what they draw may be wrong.
    """
    hashes = pool.discard(block)
    if host is not None:
        host.forget(content_hash for content_hash in hashes.values() if content_hash is not None)
    for request in live:
        published = request.block_table[: request.num_published_blocks]
        request.num_published_blocks = next((i for i, b in enumerate(published) if b in hashes), len(published))
    return [r for r in live if r.status is RequestStatus.RUNNING and not hashes.keys().isdisjoint(r.block_table)]
