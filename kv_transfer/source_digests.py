"""Digests of a prefill worker's own blocks, kept until their slot is handed out again.

A full block never changes while its slot has the same generation, and a prefix is sent to many: only the first time
costs a reading. A digest that is kept covers more than one that is taken anew: damage since the first sending too.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.digest import BlockCopier
from kv_transfer.transfers import OutgoingBlock


class SourceDigests:
    """Of one pool: at most one digest for each of its blocks. Any thread may call; each step is one of a dict."""

    def __init__(self, copier: BlockCopier) -> None:
        self._copier = copier
        self._kept: dict[int, tuple[int, bytes]] = {}
        """Block -> (generation, digest)."""

    def is_kept(self, block: OutgoingBlock) -> bool:
        return self._find(block) is not None

    def kept(self, blocks: Sequence[OutgoingBlock]) -> list[bytes] | None:
        """The digest of each block, or None if one of them is not known."""
        kept = [digest for block in blocks if (digest := self._find(block)) is not None]
        return kept if len(kept) == len(blocks) else None

    def take(self, blocks: Sequence[OutgoingBlock], sources: Sequence[memoryview]) -> list[bytes]:
        """Read each block, which is in `sources` as it is in the pool, and keep its digest."""
        digests = self._copier.digests(sources)
        for block, digest in zip(blocks, digests, strict=True):
            if block.generation is not None:
                self._kept[block.source_block] = block.generation, digest
        return digests

    def forget(self) -> None:
        """A receiver found other bytes than were announced: take all anew, in case that one of ours is to blame."""
        self._kept.clear()

    def _find(self, block: OutgoingBlock) -> bytes | None:
        kept = self._kept.get(block.source_block)
        return kept[1] if kept is not None and kept[0] == block.generation else None
