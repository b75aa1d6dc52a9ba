"""The `shm` transport: a block's payload is copied by the receiver out of the sender's pool, mapped read-only.

Why the receiver copies: see `kv_transfer`.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from engine.errors import HandshakeRefused
from kv_transfer.frames import Block
from kv_transfer.identity import SHM


class ShmOutlet:
    """P's end."""

    transport = SHM

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes

    def place(self, source_block: int, block: memoryview) -> tuple[int, None]:
        return source_block * self._block_bytes, None


def read_only(fd: int) -> int:
    """A second descriptor of the same memory file, through which nobody can write. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class ShmIntake:
    """D's end: P's pool, mapped read-only."""

    transport = SHM

    def __init__(self, fd: int, num_blocks: int, block_bytes: int) -> None:
        """Map `num_blocks` blocks of the memory file `fd`, which stays the caller's.

        Raises `HandshakeRefused` if it cannot be mapped safely: a file that its owner can shrink would kill us with
        SIGBUS on the next read.
        """
        self._block_bytes = block_bytes
        nbytes = num_blocks * block_bytes
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as error:
            raise HandshakeRefused(f"the peer's pool is no memory file: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise HandshakeRefused("the peer's pool is not sealed against shrinking")
        if not 0 < nbytes <= size:
            raise HandshakeRefused(f"the peer's pool of {num_blocks} blocks has {size} bytes, not {nbytes}")
        try:
            self._memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, OverflowError, ValueError) as error:
            raise HandshakeRefused(f"the peer's pool cannot be mapped: {error}") from error
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def check(self, frame: Block) -> str | None:
        if frame.offset is None:
            return "a block without offset on a link with shared memory"
        if frame.offset % self._block_bytes or frame.offset + frame.length > len(self._bytes):
            return f"offset {frame.offset} is no block of the peer's pool"
        return None

    def read_into(self, frame: Block, slot: memoryview) -> None:
        """One copy at the speed of memcpy. Releases the GIL, which assigning to a memoryview's slice does not."""
        assert frame.offset is not None, "`check` comes first"
        np.copyto(np.frombuffer(slot, dtype=np.uint8), self._bytes[frame.offset : frame.offset + frame.length])

    def discard(self, frame: Block) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        del self._bytes
        self._memory.close()
