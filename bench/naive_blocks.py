"""The baseline: a block manager as nano-vllm has one, written plainly. One reference count and one hash a block.

What it leaves out, and ours has: a hash that tells different contents apart for sure (it compares tokens instead),
tenants, blocks that links write into, quarantine, copy on write, eviction of the deepest block first, events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import xxhash


@dataclass(slots=True, eq=False)
class NaiveSequence:
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    references: int = 0
    content_hash: int | None = None
    token_ids: list[int] = field(default_factory=list)


class NaiveBlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = deque(range(num_blocks))
        self._block_of: dict[int, int] = {}

    def lookup(self, token_ids: list[int]) -> list[int]:
        """Blocks of the longest cached prefix."""
        found: list[int] = []
        content_hash: int | None = None
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            tokens = token_ids[start : start + self._block_size]
            content_hash = _hash(tokens, content_hash)
            block = self._block_of.get(content_hash)
            if block is None or self._blocks[block].token_ids != tokens:
                break
            found.append(block)
        return found

    def allocate(self, sequence: NaiveSequence) -> None:
        """Blocks for all tokens, cached ones where there are any."""
        content_hash: int | None = None
        for start in range(0, len(sequence.token_ids), self._block_size):
            tokens = sequence.token_ids[start : start + self._block_size]
            full = len(tokens) == self._block_size
            block = None
            if full:
                content_hash = _hash(tokens, content_hash)
                block = self._block_of.get(content_hash)
            if block is None or self._blocks[block].token_ids != tokens:
                block = self._take()
            elif self._blocks[block].references == 0:
                self._free.remove(block)
            self._blocks[block].references += 1
            if full and content_hash is not None:
                self._name(block, content_hash, tokens)
            sequence.block_table.append(block)

    def append(self, sequence: NaiveSequence) -> None:
        """The sequence has one more token."""
        position = len(sequence.token_ids) % self._block_size
        if position == 1:
            block = self._take()
            self._blocks[block].references = 1
            sequence.block_table.append(block)
        elif position == 0:
            tokens = sequence.token_ids[-self._block_size :]
            parent = self._blocks[sequence.block_table[-2]].content_hash if len(sequence.block_table) > 1 else None
            self._name(sequence.block_table[-1], _hash(tokens, parent), tokens)

    def free(self, sequence: NaiveSequence) -> None:
        for block in reversed(sequence.block_table):
            self._blocks[block].references -= 1
            if self._blocks[block].references == 0:
                self._free.append(block)
        sequence.block_table.clear()

    def _take(self) -> int:
        block = self._free.popleft()
        old = self._blocks[block]
        if old.content_hash is not None and self._block_of.get(old.content_hash) == block:
            del self._block_of[old.content_hash]
        self._blocks[block] = _Block()
        return block

    def _name(self, block: int, content_hash: int, tokens: list[int]) -> None:
        self._blocks[block].content_hash = content_hash
        self._blocks[block].token_ids = tokens
        self._block_of[content_hash] = block


def _hash(token_ids: list[int], parent: int | None) -> int:
    digest = xxhash.xxh64()
    if parent is not None:
        digest.update(parent.to_bytes(8, "little"))
    digest.update(np.array(token_ids).tobytes())
    return digest.intdigest()
