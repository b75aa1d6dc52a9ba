"""Which blocks of one prompt its ticket asks for, and which of them are complete. Knows no link and no engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from engine.errors import RequestError
from kv_transfer.sender import BlockColumns, OutgoingBlock


class Shipment:
    """The blocks that one ticket asks for, in the order in which computing completes them.

    Where the decode worker's blocks have another size than ours, one of its blocks is made of several of ours, or
    several of one. Invariant: every wanted block is handed out once, and only after ours are full, or hold the end of
    the prompt: until then the engine may put another block in the place of one of them.
    """

    def __init__(
        self,
        ordinals: Sequence[int],
        chain: Sequence[bytes],
        num_tokens: int,
        block_size: int,
        source_block_size: int,
        *,
        same_layout: bool = False,
    ) -> None:
        """`ordinals`, `chain` and `block_size` are the decode worker's. `chain` holds the content hash of every block
        of the `num_tokens` tokens, the last one perhaps partial. `same_layout`: their blocks are laid out as ours.

        Raises `RequestError` (field `ticket`) if `ordinals` are not ascending positions in it.
        """
        bounds = [-1, *ordinals, len(chain)]
        if any(left >= right for left, right in pairwise(bounds)):
            raise RequestError("ticket", f"ordinals must ascend within the {len(chain)} blocks of the prompt")
        self._ordinals = ordinals
        self._chain = chain
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._source_block_size = source_block_size
        self._same_layout = same_layout
        self._next = 0
        self.handed_out: list[int] = []
        """Source blocks handed out so far."""

    def take_complete(
        self, num_computed_tokens: int, block_table: Sequence[int], generation: Callable[[int], int]
    ) -> list[OutgoingBlock]:
        """Wanted blocks that became complete since the last call. `generation`: of a block of ours."""
        complete: list[OutgoingBlock] = []
        while self._next < len(self._ordinals):
            ordinal = self._ordinals[self._next]
            sources = self._sources(ordinal)
            if min(sources.stop * self._source_block_size, self._num_tokens) > num_computed_tokens:
                break
            first, *more = (block_table[n] for n in sources)
            lasting = generation(first) if self._is_whole(ordinal) else None
            complete.append(OutgoingBlock(ordinal, first, self._chain[ordinal], tuple(more), lasting))
            # The last one may go into two of theirs.
            self.handed_out += [block for block in (first, *more) if block not in self.handed_out[-1:]]
            self._next += 1
        return complete

    def _is_whole(self, ordinal: int) -> bool:
        """Whether theirs is one full block of ours."""
        return self._block_size == self._source_block_size and (ordinal + 1) * self._block_size <= self._num_tokens

    def full(self, num_computed_tokens: int) -> Sequence[int]:
        """Ordinals of the next wanted blocks that are each a full one of ours. The last of the prompt is not among
        them, as the decode worker goes on writing in it."""
        if not self._same_layout:
            return ()
        num_full = min(num_computed_tokens // self._block_size, len(self._chain) - 1)
        return self._ordinals[self._next : bisect_left(self._ordinals, num_full)]

    def take_full(
        self, ordinals: Sequence[int], block_table: Sequence[int], generation: Callable[[int], int], lendable: bool
    ) -> BlockColumns:
        """Hand out what `full` said. `generation`: of a block of ours."""
        sources = [block_table[ordinal] for ordinal in ordinals]
        hashes = b"".join([self._chain[ordinal] for ordinal in ordinals])
        self.handed_out += sources
        self._next += len(ordinals)
        generations = np.fromiter(map(generation, sources), dtype=np.uint64, count=len(sources))
        return BlockColumns(np.array(ordinals), np.array(sources), generations, hashes, lendable)

    def _sources(self, ordinal: int) -> range:
        """Which of our blocks, by ordinal, hold the tokens of theirs."""
        stop = min((ordinal + 1) * self._block_size, self._num_tokens)
        return range(ordinal * self._block_size // self._source_block_size, -(-stop // self._source_block_size))
