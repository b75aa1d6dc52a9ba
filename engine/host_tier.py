"""KV blocks in host memory: those that were evicted from the pool, and those of preempted requests. Knows no tensors.

On a worker without a GPU host memory is just another pool, and a copy is done when the call returns. Nothing here
relies on that: a copy is in flight until `settle`, and what it reads or writes on this side is pinned until then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import InternalError


class BlockMover(Protocol):
    """Copies whole blocks between pool and host memory, in the order of the calls, and in that of compute."""

    def to_host(self, block: int, slot: int) -> None: ...

    def to_pool(self, slot: int, block: int) -> None: ...

    def wait(self) -> None:
        """Until all copies are done: anybody may write what they read, and read what they wrote."""


@dataclass(frozen=True, slots=True)
class HostStats:
    """Every slot is in exactly one state: free, cached or held."""

    free: int = 0
    cached: int = 0
    """Found by hash; given up, least recently used first, when room is wanted."""
    held: int = 0
    """By preempted requests, or by copies in flight."""
    total: int = 0
    bytes_used: int = 0
    """Of those that are not free."""
    stored: int = 0
    """Blocks copied out of the pool since the start."""
    restored: int = 0
    """Blocks copied back since the start."""
    evictions: int = 0
    """Cached slots given up since the start."""


@dataclass(frozen=True, slots=True)
class ParkedKv:
    """The KV of a preempted request."""

    num_computed_tokens: int
    num_released_blocks: int
    """Blocks that had left the sliding window: not here."""
    slots: tuple[int, ...]
    """Of the blocks after those, in order. The last may be partial."""


class HostTier:
    """Slots 0 to `num_slots - 1` of host memory, one block each.

    Invariants, checked by `check_integrity`:
      1. A slot is free, in `_cached`, or held (`_holds > 0`): exactly one of the three.
      2. `_holds` counts the parked requests that a slot belongs to, its copies in flight, and those to come.
      3. `_slot_of` and `_hash_of` are inverse; free slots have no hash, cached ones have one.
      4. The contents of a slot with a hash are those of the hash: nothing here can check that.

    Full blocks keep the identity that they had in the pool, so that any request finds them; a block that has no hash,
    as the partial one at the end, is the parked request's alone.
    """

    def __init__(self, num_slots: int, block_bytes: int, mover: BlockMover) -> None:
        self._num_slots = num_slots
        self._block_bytes = block_bytes
        self._mover = mover
        self._free = list(reversed(range(num_slots)))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """In the order in which they are given up."""
        self._holds = [0] * num_slots
        self._slot_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._parked: dict[str, ParkedKv] = {}
        self._in_flight: list[int] = []
        """Slots that copies read or write; one entry, and one hold, for each copy."""
        self._to_restore: Counter[int] = Counter()
        """Slots that are going to be copied back, with a hold for each time."""
        self._num_stored = 0
        self._num_restored = 0
        self._num_evictions = 0

    def store(self, block: int, content_hash: bytes) -> None:
        """A block of the pool is about to be evicted: keep its contents, unless all slots are held.

        The block may be overwritten by whatever comes after this in the order of compute, and by others after
        `settle`.
        """
        slot = self._slot_of.get(content_hash)
        if slot is not None:
            if slot in self._cached:
                self._cached.move_to_end(slot)
        else:
            if not self._num_allocatable:
                self._wait_for_copies()
            if self._num_allocatable:
                self._copy_out(block, self._take_slot(content_hash))

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Slots of the longest prefix of `hashes` that is here. Keeps nothing: `hold` before anything is stored."""
        slots: list[int] = []
        for content_hash in hashes:
            slot = self._slot_of.get(content_hash)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def hold(self, slots: Iterable[int]) -> None:
        """Pin slots that are to be copied back, until `settle`."""
        for slot in slots:
            self._hold(slot)
            self._to_restore[slot] += 1

    def restore(self, slot: int, block: int) -> None:
        """Copy a slot, held for this, into a block of the pool. The slot keeps its contents."""
        if not self._to_restore[slot]:
            raise InternalError(f"host slot {slot} may be given up at any moment: hold it first")
        self._mover.to_pool(slot, block)
        self._num_restored += 1
        self._to_restore[slot] -= 1
        self._in_flight.append(slot)

    def settle(self) -> None:
        """Wait for all copies, and unpin all that was pinned for them. Cheap if there were none."""
        self._wait_for_copies()
        for slot in self._to_restore.elements():  # a fault came between
            self._let_go(slot)
        self._to_restore.clear()

    def park(
        self, request_id: str, blocks: Sequence[tuple[int, bytes | None]], num_computed_tokens: int, num_released: int
    ) -> bool:
        """Keep the KV of a request that is to be preempted: its blocks, with their hashes if they have one.

        All or nothing: on False, for want of slots, nothing has changed.
        """
        present = {self._slot_of[h] for _, h in blocks if h is not None and h in self._slot_of}
        num_new = sum(content_hash is None or content_hash not in self._slot_of for _, content_hash in blocks)
        if num_new > self._num_allocatable - sum(slot in self._cached for slot in present):
            return False
        for slot in present:
            self._hold(slot)  # before a new one can take its place
        slots: list[int] = []
        for block, content_hash in blocks:
            if content_hash is not None and content_hash in self._slot_of:
                slots.append(self._slot_of[content_hash])
                continue
            slot = self._take_slot(content_hash)
            self._hold(slot)
            self._copy_out(block, slot)
            slots.append(slot)
        self._parked[request_id] = ParkedKv(num_computed_tokens, num_released, tuple(slots))
        return True

    def parked(self, request_id: str) -> ParkedKv | None:
        return self._parked.get(request_id)

    def unpark(self, request_id: str) -> None:
        """The request runs again, or is gone. Slots with a hash stay cached. An unknown id is ignored."""
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            for slot in reversed(parked.slots):  # of a chain the deepest goes first
                self._let_go(slot)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Contents that nobody may find any more, if they are here. Parked KV stays with its requests."""
        for content_hash in hashes:
            slot = self._slot_of.pop(content_hash, None)
            if slot is not None:
                del self._hash_of[slot]
                if slot in self._cached:
                    del self._cached[slot]
                    self._free.append(slot)

    def clear(self) -> None:
        """Forget what can be found by hash. Parked KV stays with its requests."""
        for slot in self._hash_of:
            if slot in self._cached:
                self._free.append(slot)
        self._cached.clear()
        self._slot_of.clear()
        self._hash_of.clear()

    def stats(self) -> HostStats:
        free, cached = len(self._free), len(self._cached)
        return HostStats(
            free=free,
            cached=cached,
            held=self._num_slots - free - cached,
            total=self._num_slots,
            bytes_used=(self._num_slots - free) * self._block_bytes,
            stored=self._num_stored,
            restored=self._num_restored,
            evictions=self._num_evictions,
        )

    def check_integrity(self, waiting: Collection[str]) -> None:
        """`waiting`: ids of all requests that wait; only they may have parked KV. For tests and idle moments."""
        free, cached = set(self._free), set(self._cached)
        held = {slot for slot in range(self._num_slots) if self._holds[slot]}
        assert len(free) == len(self._free), "a slot is free twice"
        assert len(free) + len(cached) + len(held) == self._num_slots, "a slot was lost"
        assert free | cached | held == set(range(self._num_slots)), "a slot is in two states"
        assert self._slot_of == {content_hash: slot for slot, content_hash in self._hash_of.items()}
        assert free.isdisjoint(self._hash_of), f"free with a hash: {free & self._hash_of.keys()}"
        assert cached <= self._hash_of.keys(), f"cached without a hash: {cached - self._hash_of.keys()}"
        holds = Counter(self._in_flight) + self._to_restore
        for parked in self._parked.values():
            holds.update(parked.slots)
        assert holds == Counter({slot: self._holds[slot] for slot in held}), "a hold is nobody's"
        assert self._parked.keys() <= set(waiting), f"parked for nobody: {self._parked.keys() - set(waiting)}"

    @property
    def _num_allocatable(self) -> int:
        return len(self._free) + len(self._cached)

    def _wait_for_copies(self) -> None:
        if self._in_flight:
            self._mover.wait()
            slots, self._in_flight = self._in_flight, []
            for slot in slots:
                self._let_go(slot)

    def _take_slot(self, content_hash: bytes | None) -> int:
        """A slot without holds, on the way to one."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, _ = self._cached.popitem(last=False)
            del self._slot_of[self._hash_of.pop(slot)]
            self._num_evictions += 1
        if content_hash is not None:
            self._slot_of[content_hash] = slot
            self._hash_of[slot] = content_hash
        return slot

    def _copy_out(self, block: int, slot: int) -> None:
        self._hold(slot)
        self._in_flight.append(slot)
        self._mover.to_host(block, slot)
        self._num_stored += 1

    def _hold(self, slot: int) -> None:
        self._holds[slot] += 1
        self._cached.pop(slot, None)

    def _let_go(self, slot: int) -> None:
        self._holds[slot] -= 1
        if self._holds[slot] == 0:
            if slot in self._hash_of:
                self._cached[slot] = None
            else:
                self._free.append(slot)
