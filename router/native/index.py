"""The prefix index with its tables in native code (`index.c`): one call for an event, a lookup or a prompt.

Calls take microseconds and keep the interpreter lock: to give it up would cost more, and another thread may keep it.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from engine.errors import CapacityError, NativeUnavailable, ProtocolError
from engine.native import build
from engine.routing_key import SHORT_BYTES, RoutingKeys
from router.prefix_index import (
    LONG_KEY,
    MAX_MATCHES,
    MAX_SLOTS,
    IndexStats,
    Match,
    PackedKeys,
    PrefixIndex,
    PrefixKeys,
    pack_keys,
)
from router.reference_index import ReferenceIndex

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_FLAGS = (*build.C_FLAGS, build.THIS_CPU)
_INCLUDES = ("prefix_keys.h", "key_sets.h", "index_check.h")
_NO_MEMORY, _BAD_KEY = 1, 2
_SET_BYTES = MAX_SLOTS // 8
_MATCH = struct.Struct(f"<Q{_SET_BYTES}s")
_MIN_HASHED = 17
"""Bytes: shorter inputs have other rules, which `prefix_keys.h` does not know."""
_PROMPT = (c_char_p, c_size_t, c_size_t, c_size_t, c_char_p, c_size_t, c_size_t, c_uint64, c_void_p)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new": (c_void_p, (c_uint64, c_uint64, POINTER(c_uint64))),
    "free": (None, (c_void_p,)),
    "set_alive": (None, (c_void_p, c_char_p)),
    "apply": (c_int, (c_void_p, c_uint32, c_char_p, c_size_t, c_char_p, c_size_t, c_void_p)),
    "turn_period": (None, (c_void_p,)),
    "speculate": (c_int, (c_void_p, c_uint32, c_char_p, c_size_t)),
    "lookup_packed": (c_int, (c_void_p, c_char_p, c_size_t, c_void_p)),
    "lookup": (c_int, (c_void_p, *_PROMPT)),
    "keys": (c_int, (c_void_p, *_PROMPT)),
    "sweep": (None, (c_void_p, c_uint32, c_char_p)),
    "pack": (None, (c_void_p, c_uint32)),
    "stats": (None, (c_void_p, c_void_p)),
    "resident": (c_uint64, (c_void_p, c_uint32, c_void_p, c_uint64)),
    "check": (c_char_p, (c_void_p, c_char_p)),
}


class NativeLibrary:
    """The functions of `index.c`, by their names without `kvrelay_index_`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        held = ctypes.PyDLL(library._name, handle=library._handle)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(held, f"kvrelay_index_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"index.c has no {name}")


def load_library(cache: Path, flags: Sequence[str] = _FLAGS) -> NativeLibrary:
    """Built if `cache` lacks it. Raises `NativeUnavailable` saying why there is none, or that it hashes wrongly."""
    library = NativeLibrary(build.load("index.c", cache, folder=SOURCES, flags=flags, includes=_INCLUDES))
    prompt = RoutingKeys(2**63 + 7, b"scope", bytes(range(256)) * 16, 16, num_public_tokens=200)
    index = NativeIndex(library, NativeIndex.least_bytes())
    if index._packed(prompt) != pack_keys(prompt.all_short()):
        raise NativeUnavailable("its routing keys are not those of the xxhash package")
    return library


def make_index(max_bytes: int, speculation_s: float, cache: str) -> PrefixIndex:
    """The native index if it can be had, else the one in Python; its `implementation` says which, and why."""
    if not cache:
        return ReferenceIndex(max_bytes, speculation_s, "no native_cache is set")
    try:
        return NativeIndex(load_library(Path(cache)), max_bytes, speculation_s)
    except NativeUnavailable as error:
        logger.warning("no native code, so the prefix index is Python's, slower and larger: %s", error)
        return ReferenceIndex(max_bytes, speculation_s, str(error))


class NativeIndex(PrefixIndex):
    """Owns the memory of its tables until it is collected."""

    BYTES_PER_KEY = 144
    """Usual: 22 to 43."""
    FIXED_BYTES = 256 * 1024

    def __init__(self, library: NativeLibrary, max_bytes: int, speculation_s: float = 10.0) -> None:
        """As `PrefixIndex`; also raises `CapacityError` without memory."""
        super().__init__(max_bytes, speculation_s)
        self._library = library
        random = (c_uint64 * 4)(*(secrets.randbits(64) | 1 for _ in range(4)))
        self._handle = library.new(self._max_keys, self._max_speculative, random)
        if not self._handle:
            raise _no_memory()
        self._apply_keys, self._lookup, self._lookup_packed = library.apply, library.lookup, library.lookup_packed
        self._change = (c_uint64 * 2)()
        self._change_at = ctypes.addressof(self._change)
        self._found = bytearray(_MATCH.size * MAX_MATCHES)
        self._found_at = ctypes.addressof(ctypes.c_char.from_buffer(self._found))
        self._numbers = (c_uint64 * 5)()

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._handle = None
            self._library.free(handle)

    @property
    def implementation(self) -> str:
        return "native"

    @property
    def evictions(self) -> int:
        return self._stats()[4]

    def stats(self) -> IndexStats:
        keys, newer, older, num_bytes, evictions = self._stats()
        return IndexStats(
            keys=keys,
            speculative_keys=newer + older,
            num_bytes=num_bytes,
            max_bytes=self._max_bytes,
            evictions=evictions,
            slots=(self._alive | self._dead).bit_count(),
        )

    def lookup(self, keys: PrefixKeys, now: float) -> list[Match]:
        self._turn_period(now)
        if isinstance(keys, PackedKeys):
            count = self._lookup_packed(self._handle, keys.packed, len(keys), self._found_at)
        elif isinstance(keys, RoutingKeys) and keys.num_first_bytes >= _MIN_HASHED:
            count = self._lookup(self._handle, *keys.native_arguments(), self._found_at)
            if count < 0:
                raise _no_memory()
        else:
            return super().lookup(keys, now)
        found = _MATCH.iter_unpack(self._found[: count * _MATCH.size])
        return [Match(num_blocks, int.from_bytes(slots, "little")) for num_blocks, slots in found]

    def _set_alive(self, slots: int) -> None:
        super()._set_alive(slots)
        self._library.set_alive(self._handle, slots.to_bytes(_SET_BYTES, "little"))

    def _packed(self, prompt: RoutingKeys) -> bytes:
        if prompt.num_first_bytes < _MIN_HASHED:
            return super()._packed(prompt)
        keys = ctypes.create_string_buffer(max(1, len(prompt) * SHORT_BYTES))
        if self._library.keys(self._handle, *prompt.native_arguments(), ctypes.addressof(keys)) < 0:
            raise _no_memory()
        return keys.raw[: len(prompt) * SHORT_BYTES]

    def _apply(self, slot: int, removed: bytes, stored: bytes) -> tuple[int, int]:
        outcome = self._apply_keys(
            self._handle,
            slot,
            removed,
            len(removed) // SHORT_BYTES,
            stored,
            len(stored) // SHORT_BYTES,
            self._change_at,
        )
        if outcome == _BAD_KEY:
            raise ProtocolError(LONG_KEY)
        if outcome == _NO_MEMORY:
            raise _no_memory()
        change = self._change
        return change[0], change[1] - (change[1] >> 63 << 64)

    def _speculate(self, slot: int, packed: bytes) -> None:
        if self._library.speculate(self._handle, slot, packed, len(packed) // SHORT_BYTES) == _NO_MEMORY:
            raise _no_memory()

    def _begin_period(self) -> None:
        self._library.turn_period(self._handle)

    def _probe(self) -> Callable[[int], int]:
        call, handle, found_at, found = self._lookup_packed, self._handle, self._found_at, self._found

        def probe(key: int) -> int:
            if not call(handle, key.to_bytes(SHORT_BYTES, "little"), 1, found_at):
                return 0
            return int.from_bytes(found[8 : _MATCH.size], "little")

        return probe

    def _sweep(self, number: int) -> None:
        self._library.sweep(self._handle, number, self._dead.to_bytes(_SET_BYTES, "little"))

    def _pack(self, number: int) -> None:
        self._library.pack(self._handle, number)

    def _resident(self, slot: int) -> Iterator[int]:
        count = self._library.resident(self._handle, slot, None, 0)
        keys = (c_uint64 * count)()
        self._library.resident(self._handle, slot, keys, count)
        return iter(keys)

    def _stats(self) -> tuple[int, int, int, int, int]:
        self._library.stats(self._handle, self._numbers)
        keys, newer, older, num_bytes, evictions = self._numbers
        return keys, newer, older, num_bytes, evictions

    def _check_tables(self, known: int) -> None:
        wrong = self._library.check(self._handle, known.to_bytes(_SET_BYTES, "little"))
        assert wrong is None, wrong.decode()


def _no_memory() -> CapacityError:
    return CapacityError("no memory for the prefix index")
