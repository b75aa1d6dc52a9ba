"""An order of block ids whose every operation takes O(1), in the middle too. Knows not what the order means."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.errors import InternalError

_ABSENT = -1


class LruList:
    """Ids 0 to `capacity - 1`, each at most once, oldest first: a linked list that lives in two arrays.

    Invariant: following `_next` from the anchor visits each member once and comes back to the anchor, and `_previous`
    is its inverse; an id that is no member has `_next` absent.
    """

    def __init__(self, capacity: int) -> None:
        self._anchor = capacity
        """One entry more than there are ids: the oldest follows it, the newest precedes it."""
        self._next = [_ABSENT] * capacity + [capacity]
        self._previous = [_ABSENT] * capacity + [capacity]
        self._length = 0

    def append(self, item: int) -> None:
        """Make `item` the newest. Raises `InternalError` if it is a member."""
        if self._next[item] != _ABSENT:
            raise InternalError(f"{item} is in the list already")
        anchor, newest = self._anchor, self._previous[self._anchor]
        self._next[newest] = self._previous[anchor] = item
        self._previous[item], self._next[item] = newest, anchor
        self._length += 1

    def insert_before(self, item: int, newer: int) -> None:
        """Put `item` right before the member `newer`. Raises `InternalError` if it is a member, or `newer` is none."""
        if self._next[item] != _ABSENT or self._next[newer] == _ABSENT:
            raise InternalError(f"cannot put {item} before {newer}: the one is in the list, or the other is not")
        older = self._previous[newer]
        self._next[older] = self._previous[newer] = item
        self._previous[item], self._next[item] = older, newer
        self._length += 1

    def remove(self, item: int) -> None:
        """Raises `InternalError` if `item` is no member."""
        after, before = self._next, self._previous
        newer, older = after[item], before[item]
        if newer == _ABSENT:
            raise InternalError(f"{item} is not in the list")
        after[older], before[newer] = newer, older
        after[item] = before[item] = _ABSENT
        self._length -= 1

    def pop_oldest(self) -> int:
        """Raises `InternalError` if the list is empty."""
        oldest = self._next[self._anchor]
        if oldest == self._anchor:
            raise InternalError("the list is empty")
        self.remove(oldest)
        return oldest

    def __contains__(self, item: int) -> bool:
        return self._next[item] != _ABSENT

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Oldest first. The list must not change meanwhile."""
        item = self._next[self._anchor]
        while item != self._anchor:
            yield item
            item = self._next[item]

    def check_integrity(self) -> None:
        members = list(self)
        assert len(members) == self._length == len(set(members))
        assert [self._previous[self._next[item]] for item in members] == members
        absent = set(range(self._anchor)) - set(members)
        assert all(self._next[item] == self._previous[item] == _ABSENT for item in absent)

    def check_before(self, parent: Callable[[int], int | None]) -> None:
        """That no member comes after its parent."""
        seen: set[int] = set()
        for item in self:
            assert parent(item) not in seen, f"{item} comes after its parent"
            seen.add(item)
