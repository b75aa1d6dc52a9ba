"""The `shm` transport: a block's payload is copied by the receiver out of the sender's pool, mapped read-only.

Why the receiver copies: see `kv_transfer`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

from engine.errors import HandshakeRefused, ProtocolError
from engine.native.blocks import SharedPool
from engine.peer_windows import PeerWindow
from kv_transfer.digest import BlockCopier
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Blocks
from kv_transfer.identity import SHM
from kv_transfer.pool import KvPool


class ShmOutlet:
    """P's end."""

    reads_pool = False

    def __init__(self, connection: FrameSocket, block_bytes: int, transport: str = SHM) -> None:
        self.transport = transport
        self._connection = connection
        self._block_bytes = block_bytes

    def offset(self, source_block: int) -> int:
        return source_block * self._block_bytes

    def send(self, encoded: bytes, sources: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._connection.send(encoded)

    def close(self) -> None:
        """The connection is its link's."""


def read_only(fd: int) -> int:
    """A second descriptor of the same memory file, through which nobody can write. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class ShmIntake:
    """D's end: P's pool, mapped read-only."""

    transport = SHM
    window: PeerWindow | None = None

    def __init__(self, fd: int, num_blocks: int, block_bytes: int, copier: BlockCopier) -> None:
        """Map `num_blocks` blocks of the memory file `fd`, which stays the caller's.

        Raises `HandshakeRefused` if it cannot be mapped safely: a file that its owner can shrink would kill us with
        SIGBUS on the next read.
        """
        self._block_bytes = block_bytes
        self._copier = copier
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
        self._bytes = memoryview(self._memory)
        self._shared = SharedPool(self._bytes)

    def check(self, frame: Blocks) -> str | None:
        for entry in frame.entries:
            if entry.offset is None:
                return "a block without offset on a link with shared memory"
            if entry.offset % self._block_bytes or entry.offset + frame.length > len(self._bytes):
                return f"offset {entry.offset} is no block of the peer's pool"
        return None

    def copy(self, sources: Sequence[int], kv: KvPool, slots: Sequence[int]) -> bytes:
        """Copy blocks of the sender into slots of `kv`. Returns their digests, one after the other. Raises
        `ProtocolError` if one is none of the sender's; then nothing was copied."""
        if (max(sources) + 1) * self._block_bytes > len(self._bytes):
            raise ProtocolError(f"block {max(sources)} is none of the peer's pool")
        return self._copier.copy_blocks(self._shared, sources, kv, slots)

    def receive_into(self, frame: Blocks, slots: Sequence[memoryview | None]) -> list[bytes]:
        granted: list[memoryview] = []
        offsets: list[int] = []
        for slot, entry in zip(slots, frame.entries, strict=True):
            if slot is not None:
                assert entry.offset is not None, "`check` comes first"
                granted.append(slot)
                offsets.append(entry.offset)
        return self._copier.copy(granted, self._bytes, offsets)

    def close(self) -> None:
        self._bytes.release()
        self._memory.close()
