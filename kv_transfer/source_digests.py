"""Digests of a prefill worker's own blocks, kept until their slot is handed out again.

A full block never changes while its slot has the same generation. So its digest is taken once, best right behind the
step that filled it, and no sending reads it again; and whatever happens to its bytes from then on is found by the first
receiver, whose digest is another. What is not known is taken when it is first sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kv_transfer.digest import BlockCopier
from kv_transfer.outgoing import OutgoingBlock


class SourceDigests:
    """Of one pool: at most one digest for each of its blocks. Any thread may call; each step is one of a dict."""

    def __init__(self, copier: BlockCopier) -> None:
        self._copier = copier
        self._kept: dict[int, tuple[int, bytes]] = {}
        """Block -> (generation, digest)."""

    def is_kept(self, block: OutgoingBlock) -> bool:
        return self.find(block.source_block, block.generation) is not None

    def kept(self, blocks: Sequence[OutgoingBlock]) -> list[bytes] | None:
        """The digest of each block, or None if one of them is not known."""
        kept = [digest for block in blocks if (digest := self.find(block.source_block, block.generation)) is not None]
        return kept if len(kept) == len(blocks) else None

    def find(self, block: int, generation: int | None) -> bytes | None:
        kept = self._kept.get(block)
        return kept[1] if kept is not None and kept[0] == generation else None

    def take(self, blocks: Iterable[tuple[int, int | None]], sources: Sequence[memoryview]) -> list[bytes]:
        """Read each block, a pair of its id and generation, which is in `sources` as it is in the pool, and keep its
        digest; not without a generation, as it may still change."""
        digests = self._copier.digests(sources)
        for (block, generation), digest in zip(blocks, digests, strict=True):
            if generation is not None:
                self._kept[block] = generation, digest
        return digests
