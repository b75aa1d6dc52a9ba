"""Keeps the prefix index equal to what one worker says is resident. Pure: messages in, questions out.

What is noted is a function of (incarnation, sequence, digest). A follower belongs to one session, so to one
incarnation. It notes changes whose sequence is one more than that of the last; a gap, dropped changes, or a digest that
differs from that of what is noted are healed by a list of all that is resident, which comes in parts with changes in
between. Until it begins the worker counts as holding what was noted so far, then what has been listed: nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine.routing_key import SHORT_BYTES
from kvrelay.v1 import worker_pb2
from router.prefix_index import PrefixIndex

ASK_AGAIN_S = 5.0
"""A list that does not begin for so long is asked for anew."""
MIN_GAP_S = 0.1
"""Between two questions: a worker whose digest never agrees costs no more than that."""
_MASK = (1 << 64) - 1


class FollowerState(StrEnum):
    ASKED = "asked"
    """Nothing is noted; a list was asked for."""
    LISTING = "listing"
    LIVE = "live"
    """What is noted is what was resident at the last message."""


_ASKED, _LISTING, _LIVE = FollowerState  # looked up once: an attribute of an enum costs as much as a call


@dataclass(slots=True)
class FollowerCounts:
    """Since the session began."""

    messages: int = 0
    keys: int = 0
    lists: int = 0
    """Asked for; the first one is no fault."""
    gaps: int = 0
    repeats: int = 0
    """Messages that had been noted; ignored."""
    dropped: int = 0
    """Times that the worker dropped changes."""
    differences: int = 0
    """Digests that differed."""


class BlockFollower:
    """Invariant: what the index has under `slot` is what `digest` says, unless keys were evicted there."""

    def __init__(self, index: PrefixIndex, ask: Callable[[int], None], now: float) -> None:
        """`ask(number)` sends for a list; it is called here too. `now`: monotonic seconds, as everywhere."""
        self.counts = FollowerCounts()
        self.state = _ASKED
        self.slot = index.add_worker()
        """In the index. Changes with every list."""
        self.num_keys = 0
        """Noted under `slot`, those that were evicted since included."""
        self._index = index
        self._ask = ask
        self.digest = 0
        """Their sum, modulo 2^64."""
        self._sequence = 0
        """Of the last message noted."""
        self._evictions = index.evictions
        """Of the index, when the list began: with more, digests say nothing."""
        self._number = 0
        """Of the last list asked for."""
        self._asked_at = now
        self._ask_due = False
        self._current_at = now
        """When what is noted was last known to be right."""
        self._ask_for_list(now)

    def staleness_s(self, now: float) -> float:
        """How old what is noted may be. Live, it is the time since the worker's last message."""
        return now - self._current_at

    def apply(self, message: worker_pb2.BlockChanges, now: float) -> None:
        """Raises `ProtocolError` for keys that cannot be, `CapacityError` without memory; nothing may follow then."""
        self.counts.messages += 1
        self._index.maintain()
        sequence = message.sequence
        if self.state is _ASKED:
            if not message.begins or message.list != self._number:
                self._ask_due |= message.list == self._number  # its beginning was lost
                self._ask_again(now)
                return
            self._forget()
            self.state = _LISTING
        elif sequence <= self._sequence:
            self.counts.repeats += 1
            return
        elif sequence != self._sequence + 1 or message.dropped:
            self.counts.dropped += message.dropped
            self.counts.gaps += sequence != self._sequence + 1
            self._start_over(now)
            return
        self._sequence = sequence
        self._note(message)
        if message.complete:
            self.state = _LIVE
        if self.state is _LIVE:
            self._check(message.digest, now)

    def close(self) -> None:
        """The worker is gone, and with it all that was noted. Nothing may follow."""
        self._index.drop_worker(self.slot)

    def check_integrity(self) -> None:
        if self._evictions == self._index.evictions:
            assert sum(self._index.resident(self.slot)) & _MASK == self.digest, "not what the digest says"
            assert sum(1 for _ in self._index.resident(self.slot)) == self.num_keys, "not as many keys as counted"

    def _note(self, message: worker_pb2.BlockChanges) -> None:
        removed, stored = message.removed, message.stored
        self.counts.keys += (len(removed) + len(stored)) // SHORT_BYTES
        change, num_more = self._index.apply(self.slot, removed, stored)
        self.digest = (self.digest + change) & _MASK
        self.num_keys += num_more

    def _check(self, digest: int, now: float) -> None:
        if digest == self.digest or self._index.evictions != self._evictions:
            self._current_at = now
        else:
            self.counts.differences += 1
            self._start_over(now)

    def _start_over(self, now: float) -> None:
        """What is noted stays, as the best that is known, until a list begins."""
        self.state = _ASKED
        self._ask_due = True
        self._ask_again(now)

    def _ask_again(self, now: float) -> None:
        if now - self._asked_at >= (MIN_GAP_S if self._ask_due else ASK_AGAIN_S):
            self._ask_for_list(now)

    def _ask_for_list(self, now: float) -> None:
        self._asked_at, self._ask_due = now, False
        self._number += 1
        self.counts.lists += 1
        self._ask(self._number)

    def _forget(self) -> None:
        self._index.drop_worker(self.slot)
        self.slot = self._index.add_worker()
        self.digest, self.num_keys, self._evictions = 0, 0, self._index.evictions
