"""Copies and digests of KV blocks by `blocks.c`: many blocks a call, each byte read once, without the GIL."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from engine.errors import InternalError, NativeUnavailable
from engine.kv_layout import KvLayout
from engine.native import build

LEVELS = ("portable", "avx2", "avx512")
"""Ways to do the same; the number of each in `blocks.c` is its place here."""
DIGEST_BYTES = 16
MIN_DIGESTED = 241
"""Bytes: shorter inputs have other rules, which `blocks.c` does not know."""
STREAMED_BYTES = 1024 * 1024
"""A call that copies as much writes past the caches: what does not fit into them anyway would push out the rest, and
needs not be read before it is written. Past L3 this is 1.5 times as fast as memcpy."""


class TargetPool(Protocol):
    """Whose blocks are written."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def address(self) -> int: ...

    def block(self, block: int) -> memoryview: ...


class SharedPool:
    """Another process's pool, mapped here."""

    def __init__(self, whole: memoryview) -> None:
        self.bytes = whole
        self.address = _address(whole)


class NativeBlockCopier:
    """xxh3-128 digests, bit-equal to the `xxhash` package's. Any thread may call; nothing is kept between calls."""

    def __init__(self, library: ctypes.CDLL, level: int | None = None) -> None:
        """`level`: of `LEVELS`; by default the best that this machine has."""
        self._pass = library.kvrelay_pass
        self._pass.restype = None
        self._pass.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._level = best_level(library) if level is None else level

    @property
    def name(self) -> str:
        return LEVELS[self._level]

    def digests(self, blocks: Sequence[memoryview]) -> list[bytes]:
        """Of blocks that are all of one length."""
        length = _common_length(blocks)
        if length < MIN_DIGESTED:
            return [xxhash.xxh3_128_digest(block) for block in blocks]
        return self._run(None, [_address(block) for block in blocks], length)

    def copy(self, slots: Sequence[memoryview], pool: memoryview, offsets: Sequence[int]) -> list[bytes]:
        """Copy what is in `pool` at each offset into its slot; the slots are all of one length and lie outside `pool`.

        Returns the digest of what each slot got, whatever the pool holds by then.
        """
        length = _common_length(slots)
        if not all(0 <= offset <= len(pool) - length for offset in offsets) or len(offsets) != len(slots):
            raise InternalError(f"blocks of {length} bytes at {list(offsets)[:8]} are not {len(slots)} of the pool")
        if length < MIN_DIGESTED:
            for slot, offset in zip(slots, offsets, strict=True):
                slot[:] = pool[offset : offset + length]
            return self.digests(slots)
        base = _address(pool)
        return self._run([_address(slot) for slot in slots], [base + offset for offset in offsets], length)

    def copy_blocks(
        self, source: SharedPool, sources: Sequence[int], target: TargetPool, slots: Sequence[int]
    ) -> bytes:
        """Block `sources[i]` of `source` into block `slots[i]` of `target`, both of the target's layout.

        Returns the digest of what each slot got, one after the other.
        """
        length, count = target.layout.block_bytes, len(slots)
        if not 0 <= min(sources) <= max(sources) < len(source.bytes) // length or count != len(sources):
            raise InternalError(f"blocks {sources[:8]} of {length} bytes are not {count} of the pool")
        if length < MIN_DIGESTED:
            offsets = [length * block for block in sources]
            return b"".join(self.copy([target.block(slot) for slot in slots], source.bytes, offsets))
        into, out_of = target.address, source.address
        targets = array("Q", [into + length * slot for slot in slots])
        addresses = array("Q", [out_of + length * block for block in sources])
        digests = ctypes.create_string_buffer(DIGEST_BYTES * count)
        self._native(count, length, targets.buffer_info()[0], addresses.buffer_info()[0], digests)
        return digests.raw

    def _native(
        self, count: int, length: int, targets: int, sources: int, digests: ctypes.Array[ctypes.c_char] | None
    ) -> None:
        """`targets`, `sources`: where their addresses stand."""
        self._pass(self._level, count * length >= STREAMED_BYTES, count, length, targets, sources, digests)

    def _run(self, targets: Sequence[int] | None, sources: Sequence[int], length: int) -> list[bytes]:
        digests = ctypes.create_string_buffer(DIGEST_BYTES * len(sources))
        self._call(targets, sources, length, digests)
        raw = digests.raw
        return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]

    def _call(
        self,
        targets: Sequence[int] | None,
        sources: Sequence[int],
        length: int,
        digests: ctypes.Array[ctypes.c_char] | None,
    ) -> None:
        count = len(sources)
        addresses = ctypes.c_void_p * count
        streamed = targets is not None and count * length >= STREAMED_BYTES
        to = None if targets is None else addresses(*targets)
        self._pass(self._level, streamed, count, length, to, addresses(*sources), digests)


def load_block_copier(cache: Path) -> NativeBlockCopier:
    """Built if `cache` lacks it. Raises `NativeUnavailable` saying why there is none, or that it computes wrongly."""
    library = build.load("blocks.c", cache)
    copier = NativeBlockCopier(library)
    probe = memoryview(bytes(range(256)) * 9)
    if copier.digests([probe]) != [xxhash.xxh3_128_digest(probe)]:
        raise NativeUnavailable(f"the {copier.name} digest is not the one of the xxhash package")
    return copier


def best_level(library: ctypes.CDLL) -> int:
    level: int = library.kvrelay_level()
    return level


def _common_length(blocks: Sequence[memoryview]) -> int:
    length = len(blocks[0]) if blocks else 0
    if any(len(block) != length for block in blocks):
        raise InternalError(f"blocks of {sorted({len(block) for block in blocks})[:8]} bytes in one call")
    return length


def _address(view: memoryview) -> int:
    if view.readonly:
        address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # five times as fast, for writable memory alone
