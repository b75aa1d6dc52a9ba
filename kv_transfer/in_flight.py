"""Blocks of one link that were sent and are not answered yet, in the groups and the order in which they left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

B = TypeVar("B")


@dataclass(slots=True)
class _Group(Generic[B]):
    ticket_id: str
    left: dict[int, B]
    """By ordinal; the first is the next to be answered."""


class InFlight(Generic[B]):
    """Knows when the block that is due became due: answers come in order, and others' do not excuse its lack."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group[B]] = {}
        self._num_added = 0
        self._num_blocks = 0
        self.progress_at = 0.0
        """When the first block became the first."""

    def __len__(self) -> int:
        return self._num_blocks

    def add(self, ticket_id: str, blocks: dict[int, B], now: float) -> None:
        """A group, by ordinal."""
        if not self._groups:
            self.progress_at = now
        self._num_added += 1
        self._groups[self._num_added] = _Group(ticket_id, blocks)
        self._num_blocks += len(blocks)

    def answered(self, ticket_id: str, ordinals: Sequence[int], now: float) -> set[int]:
        """Take blocks out. Returns those that were in flight."""
        wanted, answered = set(ordinals), set[int]()
        first = next(iter(self._groups), None)
        for number, group in list(self._groups.items()):
            if group.ticket_id != ticket_id or not (hits := group.left.keys() & wanted):
                continue
            if number == first and next(iter(group.left)) in hits:
                self.progress_at = now
            if len(hits) == len(group.left):
                del self._groups[number]
            else:
                for ordinal in hits:
                    del group.left[ordinal]
            answered |= hits
        self._num_blocks -= len(answered)
        return answered

    def get(self, ticket_id: str, ordinal: int) -> B | None:
        groups = (group for group in self._groups.values() if group.ticket_id == ticket_id)
        return next((group.left[ordinal] for group in groups if ordinal in group.left), None)

    def clear(self) -> None:
        self._groups.clear()
        self._num_blocks = 0
