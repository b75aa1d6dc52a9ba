"""What becomes of a block whose bytes are not those that were written, and of who computes from it."""

from __future__ import annotations

from collections.abc import Collection

from engine.block_manager import BlockManager
from engine.block_table_checks import NO_BLOCK
from engine.errors import DigestMismatch, EngineError, InternalError, NotFinite
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


def suspects(request: Request, error: Exception) -> list[int]:
    """The first block of a request that no token can be drawn for, if it began from KV that it did not compute: some of
    that may be damaged, and would fail whoever finds it again."""
    if not isinstance(error, NotFinite) or not _began_from_found(request):
        return []
    return [block for block in request.block_table if block != NO_BLOCK][:1]


def error_of(request: Request, cause: Exception) -> EngineError:
    """What a failed request ends with. A router may try again where the KV that it found may be to blame."""
    if isinstance(cause, DigestMismatch):
        return cause
    text = f"request {request.request_id}: {type(cause).__name__}: {cause}"
    found = isinstance(cause, NotFinite) and _began_from_found(request)
    error = DigestMismatch(f"{text}; it began from KV that it found") if found else InternalError(text)
    error.__cause__ = cause
    return error


def _began_from_found(request: Request) -> bool:
    return request.num_cached_tokens > 0 or request.adoption is not None
