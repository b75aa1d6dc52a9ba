"""Which blocks are kept from eviction, under which names, within a limit. Knows neither hashes nor holders."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from engine.errors import PinLimit

MAX_NAMES = 1024


class PinnedPrefixes:
    """Name -> blocks. A block may be pinned under several names; it counts once.

    Invariant: `_count` has, for each block, the number of names that it is pinned under, and no zeros.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._count: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._count

    def __len__(self) -> int:
        """Blocks that are pinned."""
        return len(self._count)

    def replace(self, name: str, blocks: Sequence[int], max_blocks: int | None) -> tuple[list[int], list[int]]:
        """Pin `blocks`, in chain order, under `name` instead of what is pinned under it. No blocks: drop the name.

        `max_blocks`: a limit for now, below the general one.

        Returns the blocks that are pinned now and were not before, and those that were and are not any more. Raises
        `PinLimit` if more would be pinned than may be; then nothing has changed.
        """
        former = self._blocks.get(name, ())
        added = [block for block in blocks if block not in self._count]
        kept = set(blocks)
        dropped = [block for block in former if self._count[block] == 1 and block not in kept]
        count = len(self._count) + len(added) - len(dropped)
        limit = self._max_blocks if max_blocks is None else min(max_blocks, self._max_blocks)
        if added and count > limit:
            raise PinLimit(f"pin {name!r} would make {count} pinned blocks, at most {limit} may be pinned now")
        if blocks and not former and len(self._blocks) >= MAX_NAMES:
            raise PinLimit(f"pin {name!r} would be one more than {MAX_NAMES} names")
        for block in blocks:
            self._count[block] = self._count.get(block, 0) + 1
        for block in former:
            self._count[block] -= 1
        for block in dropped:
            del self._count[block]
        if blocks:
            self._blocks[name] = tuple(blocks)
        else:
            self._blocks.pop(name, None)
        return added, dropped

    def cut(self, gone: Collection[int]) -> list[int]:
        """Every name ends before its first block of `gone`. Returns the blocks that are not pinned any more."""
        dropped: list[int] = []
        for name, blocks in list(self._blocks.items()):
            kept = list(takewhile(lambda block: block not in gone, blocks))
            if len(kept) < len(blocks):
                dropped += self.replace(name, kept, None)[1]
        return dropped

    def clear(self) -> None:
        self._blocks.clear()
        self._count.clear()

    def chains(self) -> list[tuple[int, ...]]:
        """The blocks of each name."""
        return list(self._blocks.values())

    def check_integrity(self) -> None:
        counts: dict[int, int] = {}
        for blocks in self._blocks.values():
            assert blocks, "a name without blocks"
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self._count
        assert len(counts) <= self._max_blocks
        assert len(self._blocks) <= MAX_NAMES
