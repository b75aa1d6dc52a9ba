"""Which blocks a decode worker may be reading in this pool, seen from one link. Decides only; its link holds the lock.

A block that may be lent is held by the engine from the moment it was handed over, and goes back to it exactly once:

    held --offered--> offered --ACK--> lent --RELEASE--> over
      \\                  \\--NACK--> over
       \\--sent as a copy, or its transfer failed--> over            and all of them with the link
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.errors import LinkClosed, ProtocolError
from kv_transfer.frames import AskLoans, Release


class OutgoingLoans:
    """Invariant: a block is counted in exactly one of `_held` (handed over, not answered), `_lent` and what was over.

    While anything is lent the peer is asked every `ask_s` whether it lives, and given up after `lease_s`.
    """

    def __init__(self, ask_s: float, lease_s: float) -> None:
        self._ask_s = ask_s
        self._lease_s = lease_s
        self._held: dict[str, set[int]] = {}
        """Ticket -> ordinals."""
        self._lent: Counter[str] = Counter()
        """Ticket -> blocks."""
        self._requests: dict[str, str] = {}
        """Ticket -> request, of all that are held or lent."""
        self._over: Counter[str] = Counter()
        """Request -> blocks that go back, and nobody was told yet."""
        self._number = 0
        self._asked_at: float | None = None
        self._heard_at = 0.0

    def hold(self, ticket_id: str, request_id: str, ordinals: Iterable[int]) -> None:
        """They were handed over, and may be lent."""
        self._held.setdefault(ticket_id, set()).update(ordinals)
        self._requests[ticket_id] = request_id

    def refuse(self, request_id: str, count: int) -> None:
        """So many were handed over, and nobody wants them."""
        if count:
            self._over[request_id] += count

    def drop(self, ticket_id: str, ordinals: Iterable[int]) -> None:
        """They were refused, or will not be offered, whatever else becomes of them. Others than held ones are
        ignored."""
        if count := self._take(ticket_id, ordinals):
            self._over[self._requests[ticket_id]] += count
            self._forget_if_over(ticket_id)

    def acked(self, ticket_id: str, ordinals: Iterable[int], now: float) -> None:
        """The peer has them. Those that were not held are ignored."""
        if count := self._take(ticket_id, ordinals):
            if not self._lent:
                self._heard_at, self._asked_at = now, now
            self._lent[ticket_id] += count

    def released(self, frame: Release, now: float) -> None:
        """Raises `ProtocolError` if the peer gives back what it has not."""
        if len(frame.ticket_ids) != len(frame.counts) or frame.number > self._number:
            raise ProtocolError("a release without a count for each ticket, or in answer to nothing")
        for ticket_id, count in zip(frame.ticket_ids, frame.counts, strict=True):
            if not 0 < count <= self._lent[ticket_id]:
                raise ProtocolError(
                    f"{count} blocks of ticket {ticket_id} are given back, {self._lent[ticket_id]} lent"
                )
            self._lent[ticket_id] -= count
            self._over[self._requests[ticket_id]] += count
            if not self._lent[ticket_id]:
                del self._lent[ticket_id]
                self._forget_if_over(ticket_id)
        if frame.number == self._number:
            self._heard_at = now

    def end_all(self) -> None:
        """The link is over: whoever still reads finds out by the generations."""
        for ticket_id, ordinals in self._held.items():
            self._over[self._requests[ticket_id]] += len(ordinals)
        for ticket_id, count in self._lent.items():
            self._over[self._requests[ticket_id]] += count
        self._held.clear()
        self._lent.clear()
        self._requests.clear()

    def next_question(self, now: float) -> AskLoans | None:
        """Raises `LinkClosed` if the peer has not answered for too long."""
        if not self._lent or self._asked_at is None:
            return None
        if now >= self._heard_at + self._lease_s:
            raise LinkClosed(f"who reads our blocks has not answered for {self._lease_s:g} s")
        if now < self._asked_at + self._ask_s:
            return None
        self._asked_at = now
        self._number += 1
        return AskLoans(number=self._number)

    def next_wake(self) -> float | None:
        if not self._lent or self._asked_at is None:
            return None
        return min(self._asked_at + self._ask_s, self._heard_at + self._lease_s)

    def take_over(self) -> Sequence[tuple[str, int]]:
        """What goes back to the engine: requests, with the number of blocks; each once."""
        over, self._over = self._over, Counter()
        return list(over.items())

    def has_over(self) -> bool:
        return bool(self._over)

    @property
    def num_lent(self) -> int:
        return self._lent.total()

    def _take(self, ticket_id: str, ordinals: Iterable[int]) -> int:
        """Out of what is held. Returns how many were."""
        held = self._held.get(ticket_id)
        if held is None:
            return 0
        taken = held.intersection(ordinals)
        held -= taken
        if not held:
            del self._held[ticket_id]
        return len(taken)

    def _forget_if_over(self, ticket_id: str) -> None:
        if ticket_id not in self._held and ticket_id not in self._lent:
            del self._requests[ticket_id]
