"""Which blocks of one prompt its ticket asks for, and which of them are complete. Knows no link and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from engine.errors import RequestError
from kv_transfer.sender import OutgoingBlock


class Shipment:
    """The blocks that one ticket asks for, in the order in which computing completes them.

    Invariant: every wanted block is handed out once, and only after the KV of all its tokens was computed.
    """

    def __init__(self, ordinals: Sequence[int], chain: Sequence[bytes], num_tokens: int, block_size: int) -> None:
        """`chain` holds the content hash of every block of the `num_tokens` tokens, the last one perhaps partial.

        Raises `RequestError` (field `ticket`) if `ordinals` are not ascending positions in it.
        """
        bounds = [-1, *ordinals, len(chain)]
        if any(left >= right for left, right in pairwise(bounds)):
            raise RequestError("ticket", f"ordinals must ascend within the {len(chain)} blocks of the prompt")
        self._ordinals = ordinals
        self._chain = chain
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._next = 0
        self.handed_out: list[int] = []
        """Source blocks handed out so far."""

    def take_complete(self, num_computed_tokens: int, block_table: Sequence[int]) -> list[OutgoingBlock]:
        """Wanted blocks that became complete since the last call."""
        complete: list[OutgoingBlock] = []
        while self._next < len(self._ordinals):
            ordinal = self._ordinals[self._next]
            if min((ordinal + 1) * self._block_size, self._num_tokens) > num_computed_tokens:
                break
            complete.append(OutgoingBlock(ordinal, block_table[ordinal], self._chain[ordinal]))
            self._next += 1
        self.handed_out += [block.source_block for block in complete]
        return complete
