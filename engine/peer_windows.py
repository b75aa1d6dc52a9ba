"""A pool in whose range of addresses the pools of peers on this host can be seen, read-only.

Kernels find a block at base + id * block_bytes. So a block of a peer is one more id, beyond our own, and nothing that
reads blocks needs to know whose they are. Nothing can write there: the pages are mapped read-only, and a peer's memory
file is sealed against any other mapping.

A window belongs to a link. It is taken down when the link has ended and nobody uses a block of it any more; until then
the memory behind it stays, whatever becomes of the peer.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError, HandshakeRefused

NUM_WINDOWS = 8
"""Peers at once, those included that are gone and whose blocks are still used. One more is copied from."""
WINDOW_POOLS = 4
"""A peer's pool may have so many times our own blocks: it costs addresses, no memory."""
GENERATION_BYTES = 8
_LARGE_PAGE = 2 * 1024 * 1024
_PAGE = mmap.PAGESIZE
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000  # linux/mman.h, equal on x86-64 and AArch64
_FAILED = ctypes.c_void_p(-1).value


def generations_offset(pool_bytes: int) -> int:
    """Where the generations of a pool's slots stand in its memory file: behind the blocks, on pages of their own."""
    return -(-pool_bytes // _PAGE) * _PAGE


class PeerWindow:
    """One peer's pool. `give_back` may be called from any thread; the rest is its link's."""

    def __init__(
        self, owner: PeerWindows, number: int, first_block: int, num_blocks: int, generations: npt.NDArray[np.uint64]
    ) -> None:
        self.first_block = first_block
        """Id, here, of the peer's block 0."""
        self.num_blocks = num_blocks
        self.generations = generations
        """Of the peer's slots, [num_blocks] uint64. The peer changes them whenever it likes."""
        self._owner = owner
        self._number = number
        self._lock = threading.Lock()
        self._used = 0
        self._returned: Counter[str] = Counter()
        self._retired = False

    def take(self, count: int) -> None:
        """So many blocks were lent, each to be given back once."""
        with self._lock:
            self._used += count

    def give_back(self, ticket_id: str, count: int) -> None:
        """Blocks that came for this ticket are read no more."""
        with self._lock:
            self._used -= count
            assert self._used >= 0, f"more was given back than lent, for {ticket_id}"
            if not self._retired:
                self._returned[ticket_id] += count
            over = self._retired and not self._used
        if over:
            self._close()

    def take_returned(self, limit: int) -> list[tuple[str, int]]:
        """What was given back and the peer was not told, of at most `limit` tickets."""
        with self._lock:
            told = list(self._returned.items())[:limit]
            for ticket_id, _ in told:
                del self._returned[ticket_id]
            return told

    def retire(self) -> None:
        """The link has ended: nobody is told any more, and the window goes with its last block."""
        with self._lock:
            self._retired = True
            self._returned.clear()
            over = not self._used
        if over:
            self._close()

    def _close(self) -> None:
        self.generations = np.empty(0, dtype=np.uint64)
        self._owner.close_window(self._number)


class PeerWindows:
    """The range: our own pool, writable, and behind it `NUM_WINDOWS` places for others."""

    def __init__(self, fd: int, pool_bytes: int, num_blocks: int) -> None:
        """Map the memory file `fd` as our own pool. Raises `ConfigError` if there are not enough addresses."""
        block_bytes = pool_bytes // num_blocks
        step = _PAGE // math.gcd(block_bytes, _PAGE)
        """Every so many blocks one begins on a page."""
        self._block_bytes = block_bytes
        self._most_blocks = WINDOW_POOLS * num_blocks
        self._first = [step * -(-(num_blocks + i * (self._most_blocks + step)) // step) for i in range(NUM_WINDOWS + 1)]
        """Id of each window's first block; the last one is the end."""
        self.num_block_ids = self._first[-1]
        self._open: dict[int, PeerWindow] = {}
        self._lock = threading.Lock()
        length = self.num_block_ids * block_bytes
        reserved = length + _LARGE_PAGE
        base = _mmap(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._base = -(-base // _LARGE_PAGE) * _LARGE_PAGE
        array_type: Any = ctypes.c_ubyte * length
        range_type: Any = type("Range", (array_type,), {})  # of a plain array no weak reference can be had
        self.memory: ctypes.Array[ctypes.c_ubyte] = range_type.from_address(self._base)
        """All of it. Where no window is open, reading ends the process, as writing does anywhere but in our own."""
        weakref.finalize(self.memory, _munmap, base, reserved)
        own = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(self._base, generations_offset(pool_bytes), own, mmap.MAP_SHARED | _MAP_FIXED, fd)
        _libc.madvise(self._base, pool_bytes // _PAGE * _PAGE, getattr(mmap, "MADV_HUGEPAGE", 14))  # only a hint

    def open(self, fd: int, num_blocks: int) -> PeerWindow:
        """Show a peer's pool of `num_blocks` blocks like ours; `fd` stays the caller's.

        Raises `HandshakeRefused` if no window is free, the pool is too large, or the file is not what it should be.
        """
        nbytes = num_blocks * self._block_bytes
        at = generations_offset(nbytes)
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        except OSError as error:
            raise HandshakeRefused(f"the peer's pool is no memory file: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise HandshakeRefused("the peer's pool is not sealed against shrinking")
        if not 0 < num_blocks <= self._most_blocks or size < at + num_blocks * GENERATION_BYTES:
            raise HandshakeRefused(f"a pool of {num_blocks} blocks in {size} bytes fits into no window")
        try:
            page = mmap.mmap(fd, num_blocks * GENERATION_BYTES, mmap.MAP_SHARED, mmap.PROT_READ, offset=at)
        except (OSError, ValueError) as error:
            raise HandshakeRefused(f"the peer's pool cannot be mapped: {error}") from error
        with self._lock:
            number = next((n for n in range(NUM_WINDOWS) if n not in self._open), None)
            if number is None:
                raise HandshakeRefused(f"{NUM_WINDOWS} peers' pools are mapped already")
            first = self._first[number]
            try:
                _mmap(self._base + first * self._block_bytes, at, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
            except ConfigError as error:
                raise HandshakeRefused(f"the peer's pool cannot be mapped: {error}") from error
            window = PeerWindow(self, number, first, num_blocks, np.frombuffer(page, dtype=np.uint64))
            self._open[number] = window
            return window

    def close_window(self, number: int) -> None:
        """Nobody reads there any more. For `PeerWindow`."""
        start, end = self._first[number], self._first[number + 1]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        with self._lock:
            _mmap(self._base + start * self._block_bytes, (end - start) * self._block_bytes, _PROT_NONE, flags, -1)
            del self._open[number]

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    """Python's own cannot be told where. Raises `ConfigError`."""
    got: int = _libc.mmap(address, length, protection, flags, fd, 0)
    if got == _FAILED:
        number = ctypes.get_errno()
        raise ConfigError(f"{length} bytes cannot be mapped: {os.strerror(number)}")
    return got


def _munmap(address: int, length: int) -> None:
    _libc.munmap(address, length)
