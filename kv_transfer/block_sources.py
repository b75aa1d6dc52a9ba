"""Where the bytes of blocks are that leave: in the pool, in pinned memory if the pool is on a GPU, or put together for
a receiver with another layout. One writer's thread uses it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_layout import KvLayout
from kv_transfer.conversion import Staging
from kv_transfer.identity import MAPPING
from kv_transfer.outgoing import OutgoingBlock
from kv_transfer.pool import KvPool


class BlockSources:
    """Of one link. `target`: the layout of the blocks that leave."""

    def __init__(self, kv: KvPool, target: KvLayout, max_unacked_bytes: int) -> None:
        self._kv = kv
        self._target = target
        self.converts = target != kv.layout
        self._staging: Staging | None = None
        # Places for all blocks that may be unanswered: a peer on this host copies them from there, in their order. And
        # for those of ours that make one of theirs.
        in_flight = max_unacked_bytes // kv.layout.block_bytes
        parts = 1 + -(-target.block_size // kv.layout.block_size)
        self.memory = kv.link_memory(max(1, in_flight, parts))
        """If the pool is on a GPU."""

    def open(self, group_blocks: int) -> None:
        """The link is there; its groups have up to `group_blocks`."""
        if self.converts:
            self._staging = Staging(self._kv.layout, self._target, group_blocks)

    def wanted(self, transport: str) -> bool:
        """Whether blocks must be read over `transport`, also those whose digest is known."""
        return transport not in MAPPING or self.memory is not None

    def get(self, blocks: Sequence[OutgoingBlock]) -> tuple[list[memoryview], list[int]]:
        """The bytes of each, and its place in what a peer on this host maps.

        From a GPU, they have arrived when this returns, and stay until as many more were got as may be unanswered.
        """
        if self._staging is not None:
            made = [self._converted(self._staging, place, block) for place, block in enumerate(blocks)]
            return made, list(range(len(blocks)))
        places = [block.source_block for block in blocks]
        if self.memory is not None:
            places = self.memory.fetch(places)
        return [self._bytes(place) for place in places], places

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()

    def _converted(self, staging: Staging, place: int, block: OutgoingBlock) -> memoryview:
        ours: Sequence[int] = (block.source_block, *block.more_blocks)
        if self.memory is not None:
            ours = self.memory.fetch(ours)
        return staging.put(place, block.ordinal, [self._bytes(each) for each in ours])

    def _bytes(self, place: int) -> memoryview:
        return self._kv.block(place) if self.memory is None else self.memory.place(place)
