"""Digests of a prefill worker's own blocks, kept until their slot is handed out again.

A full block never changes while its slot has the same generation. So its digest is taken once, best right behind the
step that filled it, and no sending reads it again; and whatever happens to its bytes from then on is found by the first
receiver, whose digest is another. What is not known is taken when it is first sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.digest import DIGEST_BYTES, BlockCopier
from kv_transfer.outgoing import BlockColumns, OutgoingBlock

_NONE = np.iinfo(np.uint64).max


class SourceDigests:
    """Of one pool: at most one digest for each of its blocks. Any thread may call: a digest is written before the
    generation that it is found by."""

    def __init__(self, copier: BlockCopier, num_blocks: int) -> None:
        self._copier = copier
        self._generations = np.full(num_blocks, _NONE, dtype=np.uint64)
        self._digests = np.zeros(num_blocks, dtype=f"V{DIGEST_BYTES}")

    def is_kept(self, block: OutgoingBlock) -> bool:
        return self.find(block.source_block, block.generation) is not None

    def kept(self, blocks: Sequence[OutgoingBlock]) -> list[bytes] | None:
        """The digest of each block, or None if one of them is not known."""
        kept = [digest for block in blocks if (digest := self.find(block.source_block, block.generation)) is not None]
        return kept if len(kept) == len(blocks) else None

    def num_kept(self, blocks: BlockColumns) -> int:
        """How many of the first of these are known."""
        known = self._generations[blocks.sources] == blocks.generations
        return len(blocks) if known.all() else int(known.argmin())

    def of(self, blocks: BlockColumns) -> npt.NDArray[np.void]:  # [blocks]
        """Of blocks that are known."""
        return self._digests[blocks.sources]

    def find(self, block: int, generation: int | None) -> bytes | None:
        if generation is None or int(self._generations[block]) != generation:
            return None
        return bytes(self._digests[block])

    def take(self, blocks: Iterable[tuple[int, int | None]], sources: Sequence[memoryview]) -> list[bytes]:
        """Read each block, a pair of its id and generation, which is in `sources` as it is in the pool, and keep its
        digest; not without a generation, as it may still change."""
        digests = self._copier.digests(sources)
        for (block, generation), digest in zip(blocks, digests, strict=True):
            if generation is not None:
                self._generations[block] = _NONE
                self._digests[block] = digest
                self._generations[block] = generation
        return digests
