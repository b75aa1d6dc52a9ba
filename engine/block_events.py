"""Tells whoever follows a pool which contents became resident and which are gone. Knows no blocks.

A content goes by its hash, or by the routing key that stands for it (`block_names`): "hash" below is either.

A follower keeps a set of hashes for each (worker, incarnation). It applies every event whose sequence is its last one
plus 1, and compares `digest` afterwards; `Cleared` needs no predecessor. On a gap before any other event, on a digest
that differs, and on `Cleared(resync=True)` it asks for a `Snapshot`, and goes on with the events after that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import xxhash

_MODULUS = 1 << 128


@dataclass(frozen=True, slots=True)
class Stored:
    """These contents became resident: a piece of one chain, each the child of the one before."""

    sequence: int
    digest: int
    parent: bytes | None
    """Of the first hash; None: the first block of a prompt."""
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These contents are gone; never one without all that continue it."""

    sequence: int
    digest: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Forget all. `resync`: events were dropped, because nobody took them in time; what is resident says a snapshot."""

    sequence: int
    digest: int
    resync: bool


BlockEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one incarnation, in sequence. Each digest is that of the resident set after its event."""

    incarnation: str
    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is resident, after the event `sequence` and before the next one."""

    incarnation: str
    sequence: int
    digest: int
    hashes: tuple[bytes, ...]
    """Every block after its parent."""


def resident_digest(hashes: Iterable[bytes]) -> int:
    """Digest of a set of hashes, below 2^128, whatever their order: the sum of the xxh3-128 of each, modulo 2^128.

    A sum, not an exclusive or: a hash that is counted twice by mistake shows.
    """
    return sum(map(xxhash.xxh3_128_intdigest, hashes)) % _MODULUS


@dataclass(slots=True)
class _Pending:
    """A Stored or Removed that may still grow."""

    kind: type[Stored] | type[Removed]
    sequence: int
    digest: int
    parent: bytes | None
    hashes: list[bytes]

    def freeze(self) -> Stored | Removed:
        if self.kind is Stored:
            return Stored(self.sequence, self.digest, self.parent, tuple(self.hashes))
        return Removed(self.sequence, self.digest, tuple(self.hashes))


class BlockEvents:
    """The events of one pool that were not taken yet, with at most `max_hashes` hashes.

    With one more, all are dropped for one `Cleared(resync=True)`.

    Invariants, checked by `check_integrity`:
      1. The pending events have the sequences up to `_sequence`, without a gap.
      2. `_num_hashes` is the number of hashes in them, and within the limit.
      3. `_digest` is that of the resident set.
    """

    def __init__(self, incarnation: str, max_hashes: int) -> None:
        self._incarnation = incarnation
        self._max_hashes = max_hashes
        self._cleared: Cleared | None = None
        """Pending, before `_pending`."""
        self._pending: list[_Pending] = []
        self._num_hashes = 0
        self._sequence = 0
        """Of the last event, taken or not; the first one has 1."""
        self._digest = 0
        self._may_extend = False
        """Whether the last pending event may grow: no snapshot has its sequence."""
        self.num_overflows = 0

    def stored(self, content_hash: bytes, parent: bytes | None) -> None:
        """Continues the last event if that one ends with the parent, so that a prompt is one event."""
        self._digest = (self._digest + xxhash.xxh3_128_intdigest(content_hash)) % _MODULUS
        last = self._extensible(Stored)
        if last is None or last.hashes[-1] != parent:
            last = self._begin(Stored, parent)
        self._extend(last, (content_hash,))

    def removed(self, hashes: Sequence[bytes]) -> None:
        """Every hash before its parent."""
        self._digest = (self._digest - resident_digest(hashes)) % _MODULUS
        self._extend(self._extensible(Removed) or self._begin(Removed, None), hashes)

    def cleared(self) -> None:
        """Nothing is resident any more."""
        self._digest = 0
        self._start_over(resync=False)

    def take(self) -> EventBatch:
        """Everything since the last call. Drains the queue."""
        first = () if self._cleared is None else (self._cleared,)
        events = (*first, *(pending.freeze() for pending in self._pending))
        self._drop_pending()
        return EventBatch(self._incarnation, events)

    def snapshot(self, resident: Iterable[bytes]) -> Snapshot:
        """`resident`: every hash after its parent. What is pending stays so: the follower skips it by its sequence."""
        self._may_extend = False
        return Snapshot(self._incarnation, self._sequence, self._digest, tuple(resident))

    def check_integrity(self, resident: Collection[bytes]) -> None:
        assert self._digest == resident_digest(resident), "the digest is not that of the resident set"
        sequences = [event.sequence for event in (self._cleared, *self._pending) if event is not None]
        assert sequences == list(range(self._sequence - len(sequences) + 1, self._sequence + 1))
        assert self._num_hashes == sum(len(pending.hashes) for pending in self._pending) <= self._max_hashes
        assert all(pending.hashes for pending in self._pending)

    def _extensible(self, kind: type[Stored] | type[Removed]) -> _Pending | None:
        return self._pending[-1] if self._may_extend and self._pending[-1].kind is kind else None

    def _begin(self, kind: type[Stored] | type[Removed], parent: bytes | None) -> _Pending:
        self._sequence += 1
        self._may_extend = True
        self._pending.append(_Pending(kind, self._sequence, self._digest, parent, []))
        return self._pending[-1]

    def _extend(self, pending: _Pending, hashes: Sequence[bytes]) -> None:
        pending.digest = self._digest
        pending.hashes += hashes
        self._num_hashes += len(hashes)
        if self._num_hashes > self._max_hashes:
            self.num_overflows += 1
            self._start_over(resync=True)

    def _start_over(self, *, resync: bool) -> None:
        self._drop_pending()
        self._sequence += 1
        self._cleared = Cleared(self._sequence, self._digest, resync)

    def _drop_pending(self) -> None:
        self._cleared = None
        self._pending = []
        self._num_hashes = 0
        self._may_extend = False
