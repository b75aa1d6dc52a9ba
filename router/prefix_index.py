"""Which workers hold which prefix: from short routing keys to sets of workers. Knows no messages and no clock.

A set of workers is an int with one bit for each worker's *slot*. A worker that comes back gets another slot, so all
that it held before is gone with one bit of `_alive`; the bits in the tables are swept later. Everything here is a
prediction: a wrong answer costs a recompute and nothing else.

Tables are native (`router.native.index`), or Python's (`router.reference_index`); what both share is here.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from engine.errors import ConfigError, ProtocolError
from engine.routing_key import SHORT_BITS, SHORT_BYTES, RoutingKeys

NUM_SHARDS = 1024
"""Tables, by the lowest bits of what a key is hashed to: whatever needs a whole table (growing, sweeping) takes half a
millisecond at most, and requests are placed in between."""
MAX_SLOTS = 512
MAX_MATCHES = 32
"""Depths told by a lookup, deepest first; workers with less count as having nothing. Bounds the cost of a decision."""
MAX_KEYS = 65_536
"""Of each kind in one call of `apply`. Each takes half a microsecond at most."""
PACK_EVERY = 33
"""Turns of `maintain`, of which one may pack. No divisor of the number of tables, so each has its turn."""
_MASK = (1 << 64) - 1


class PrefixKeys(Protocol):
    """The keys of one prompt, worked out when they are asked for: `engine.routing_key.RoutingKeys`, or others."""

    def __len__(self) -> int:
        """Full blocks."""

    def prober(self) -> Callable[[int], int]:
        """From 1 to `len(self)` blocks to their short key."""


class PackedKeys:
    """The keys of one prompt, worked out before."""

    def __init__(self, keys: Sequence[int]) -> None:
        """Short keys, of 1, 2, ... blocks."""
        self.packed = pack_keys(keys)

    def __len__(self) -> int:
        return len(self.packed) // SHORT_BYTES

    def prober(self) -> Callable[[int], int]:
        keys = struct.unpack(f"<{len(self)}Q", self.packed)
        return lambda num_blocks: keys[num_blocks - 1]


class Match(NamedTuple):
    num_blocks: int
    """Of the prompt, from its first one on, that are held."""
    slots: int
    """By whom: one bit for each."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    keys: int
    speculative_keys: int
    num_bytes: int
    """An estimate from above: of tables and keys, not of what the allocator wastes."""
    max_bytes: int
    evictions: int
    """Keys dropped for want of room, since the start."""
    slots: int
    """Taken, those still to be swept included."""


class PrefixIndex(ABC):
    """Invariants, checked by `check_integrity`:
      1. A bit of a slot that is neither alive nor dead is in no set, a speculative one included; a key without any bit
         is in no table.
      2. The number of keys is at most `_max_keys` after every call; each of the two tables of speculative keys has at
         most `_max_speculative`.

    Residency is prefix-closed: a worker that holds a block holds those before it. So a lookup searches by halves, and
    works out only the keys that it asks for. The order of keys' last uses in a table is known: the oldest go first.
    """

    BYTES_PER_KEY: ClassVar[int]
    """No key takes more, its share of a table grown too wide and a set of workers of its own included."""
    FIXED_BYTES: ClassVar[int] = 0
    """That an index takes without any key."""

    def __init__(self, max_bytes: int, speculation_s: float = 10.0) -> None:
        """`speculation_s`: how long dispatched work counts as resident, at least; at most twice as long.

        Raises `ConfigError` if `max_bytes` cannot hold a key in each table.
        """
        if max_bytes < self.least_bytes():
            raise ConfigError(f"the index needs at least {self.least_bytes()} bytes, got {max_bytes}")
        room = (max_bytes - self.FIXED_BYTES) // self.BYTES_PER_KEY
        self._max_speculative = room // 10
        """In each of two periods."""
        self._max_keys = room - 2 * self._max_speculative
        self._max_bytes = max_bytes
        self._alive = 0
        self._dead = 0
        """Slots that must not be given away before all tables are swept."""
        self._sweep_left: dict[int, int] = {}
        """Dead slot -> tables that may have its bit."""
        self._next_shard = 0
        """To be swept and packed."""
        self._num_turns = 0
        """Of `maintain`."""
        self._speculation_s = speculation_s
        self._period_ends = 0.0

    @classmethod
    def least_bytes(cls) -> int:
        return NUM_SHARDS * cls.BYTES_PER_KEY + cls.FIXED_BYTES

    @property
    @abstractmethod
    def implementation(self) -> str:
        """ "native", or "python" and why."""

    def add_worker(self) -> int:
        """A slot that holds nothing. If there is none, the oldest dead one is swept at once."""
        taken = self._alive | self._dead
        slot = (~taken & (taken + 1)).bit_length() - 1
        if slot >= MAX_SLOTS:
            while not (~(self._alive | self._dead)) & ((1 << MAX_SLOTS) - 1):
                self.maintain()
            return self.add_worker()
        self._set_alive(self._alive | 1 << slot)
        return slot

    def drop_worker(self, slot: int) -> None:
        """Forget all that the worker holds, in no time. The slot must not be used again by the caller."""
        self._set_alive(self._alive & ~(1 << slot))
        self._dead |= 1 << slot
        self._sweep_left[slot] = NUM_SHARDS

    def apply(self, slot: int, removed: bytes, stored: bytes) -> tuple[int, int]:
        """The worker holds some keys no more, and others from now on; a key may come again. Keys are packed as on the
        wire: 8 bytes each, little-endian.

        Returns what that changed: the sum of the keys that the worker was not known to hold, less that of those that it
        was known to hold, modulo 2^64; and their number. Raises `ProtocolError` for keys that cannot be, and has then
        changed nothing; `CapacityError` without memory, in the middle.
        """
        for packed in (removed, stored):
            if len(packed) % SHORT_BYTES or len(packed) > MAX_KEYS * SHORT_BYTES:
                raise ProtocolError(
                    f"block changes with {len(packed)} bytes of keys: {SHORT_BYTES} each, at most {MAX_KEYS}"
                )
        return self._apply(slot, removed, stored)

    def store(self, slot: int, keys: Sequence[int]) -> int:
        """The worker holds these. Returns the sum of those that it was not known to hold, modulo 2^64."""
        return self.apply(slot, b"", pack_keys(keys))[0]

    def remove(self, slot: int, keys: Sequence[int]) -> int:
        """The worker holds these no more. Returns the sum of those that it was known to hold, modulo 2^64."""
        return -self.apply(slot, pack_keys(keys), b"")[0] & _MASK

    def speculate(self, slot: int, keys: Sequence[int], now: float) -> None:
        """The worker was asked to compute these; they count as resident until it tells, or for a while.

        `now`: seconds of one monotonic clock, as in every call. What is resident already counts as just used.
        """
        self._turn_period(now)
        self._speculate(slot, pack_keys(keys))

    def speculate_prompt(self, slots: Sequence[int], prompt: RoutingKeys, now: float) -> None:
        """`speculate` for all keys of a prompt, at each of `slots`."""
        self._turn_period(now)
        packed = self._packed(prompt) if slots else b""
        for slot in slots:
            self._speculate(slot, packed)

    def lookup(self, keys: PrefixKeys, now: float) -> list[Match]:
        """Which slots hold how much of the prompt: deepest first, each slot once, at most `MAX_MATCHES` depths."""
        self._turn_period(now)
        return search(keys, self._probe())

    def maintain(self) -> None:
        """Sweep one table of the bits of dead slots, or pack it if it grew too wide. To be called again and again."""
        self._num_turns += 1
        number = self._next_shard
        self._next_shard = (number + 1) % NUM_SHARDS
        if not self._dead:
            if self._num_turns % PACK_EVERY == 0:
                self._pack(number)
            return
        self._sweep(number)
        swept = 0
        for slot in list(self._sweep_left):
            self._sweep_left[slot] -= 1
            if not self._sweep_left[slot]:
                del self._sweep_left[slot]
                swept |= 1 << slot
        if swept:
            self._swept(swept)
            self._dead &= ~swept

    def resident(self, slot: int) -> Iterator[int]:
        """All keys of a worker, speculation aside. O(keys): for tests and idle moments."""
        return self._resident(slot) if self._alive >> slot & 1 else iter(())

    @property
    @abstractmethod
    def evictions(self) -> int:
        """Keys dropped for want of room, since the start."""

    @abstractmethod
    def stats(self) -> IndexStats: ...

    def check_integrity(self) -> None:
        assert not self._alive & self._dead, "a slot is alive and dead"
        assert {slot for slot in range(MAX_SLOTS) if self._dead >> slot & 1} == self._sweep_left.keys()
        self._check_tables(self._alive | self._dead)

    def _set_alive(self, slots: int) -> None:
        self._alive = slots

    def _turn_period(self, now: float) -> None:
        if now < self._period_ends:
            return
        late = now - self._period_ends >= self._speculation_s
        for _ in range(2 if late else 1):
            self._begin_period()
        self._period_ends = now + self._speculation_s

    def _packed(self, prompt: RoutingKeys) -> bytes:
        return pack_keys(prompt.all_short())

    def _swept(self, slots: int) -> None:
        """No table has bits of these dead slots any more."""
        del slots

    @abstractmethod
    def _apply(self, slot: int, removed: bytes, stored: bytes) -> tuple[int, int]: ...

    @abstractmethod
    def _speculate(self, slot: int, packed: bytes) -> None: ...

    @abstractmethod
    def _begin_period(self) -> None:
        """What was dispatched lately is old now, what was old is forgotten."""

    @abstractmethod
    def _probe(self) -> Callable[[int], int]:
        """Who holds a key, or is expected to; for one lookup."""

    @abstractmethod
    def _sweep(self, number: int) -> None:
        """Take the bits of all dead slots out of a table."""

    @abstractmethod
    def _pack(self, number: int) -> None: ...

    @abstractmethod
    def _resident(self, slot: int) -> Iterator[int]: ...

    @abstractmethod
    def _check_tables(self, known: int) -> None:
        """`known`: the slots that may be in sets."""


def search(keys: PrefixKeys, probe: Callable[[int], int]) -> list[Match]:
    """See `PrefixIndex.lookup`. `probe`: from a key to the slots that have it."""
    num_blocks = len(keys)
    if not num_blocks:
        return []
    short = keys.prober()
    probed: dict[int, int] = {}
    rest = probe(short(1))
    found: list[Match] = []
    limit = num_blocks + 1
    while rest and len(found) < MAX_MATCHES:
        low, high, holders = 1, limit, rest
        for depth, there in probed.items():
            if not there & rest:
                if depth < high:
                    high = depth
            elif depth > low:
                low, holders = depth, there & rest
        while high - low > 1:
            middle = (low + high) >> 1
            there = probed[middle] = probe(short(middle)) & rest
            if there:
                low, holders = middle, there
            else:
                high = middle
        found.append(Match(low, holders))
        rest &= ~holders
        limit = low
    return found


def pack_keys(keys: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """Raises `ProtocolError` for more bits than short keys have."""
    keys = struct.unpack(f"<{len(packed) // SHORT_BYTES}Q", packed)
    if keys and max(keys) >> SHORT_BITS:
        raise ProtocolError(LONG_KEY)
    return keys


LONG_KEY = f"a routing key of more than {SHORT_BITS} bits"
