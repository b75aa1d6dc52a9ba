"""A KV pool in a memory file, without torch, for tests of links."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
from collections.abc import Callable

from engine.kv_layout import KvLayout
from engine.peer_windows import GENERATION_BYTES, PeerWindows, generations_offset

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=8, dtype="float32")
"""32 KiB a block: more than a link's frame buffer, so that a payload takes several reads."""
NUM_BLOCKS = 32


class MemoryPool:
    """A `KvPool` in a memory file, without torch. `before_block` runs whenever somebody asks for a block's bytes."""

    def __init__(
        self,
        layout: KvLayout = LAYOUT,
        num_blocks: int = NUM_BLOCKS,
        sealed: bool = True,
        device: str = "cpu",
        borrows: bool = False,
    ) -> None:
        self.device = device
        self.lends = not borrows
        self.layout = layout
        self.num_blocks = num_blocks
        self.before_block: Callable[[int], None] = lambda block: None
        self.fd: int | None = os.memfd_create("kv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        nbytes = num_blocks * layout.block_bytes
        os.ftruncate(self.fd, generations_offset(nbytes) + num_blocks * GENERATION_BYTES)
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(self.fd, 0)
        self.generations = memoryview(memory)[generations_offset(nbytes) :].cast("Q")
        self.windows = PeerWindows(self.fd, nbytes, num_blocks) if borrows else None
        self._bytes = memoryview(memory if self.windows is None else self.windows.memory).cast("B")

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def block(self, block: int) -> memoryview:
        self.before_block(block)
        assert 0 <= block < self.num_blocks or self.windows is not None
        start = block * self.layout.block_bytes
        return self._bytes[start : start + self.layout.block_bytes]

    def link_memory(self, num_blocks: int) -> None:
        """It is in host memory."""

    def fill(self, seed: int) -> None:
        rng = random.Random(seed)
        for block in range(self.num_blocks):
            self.block(block)[:] = rng.randbytes(self.layout.block_bytes)

    def number(self) -> None:
        """Fill each block with its number: far quicker than `fill`, and one block is still not another."""
        for block in range(self.num_blocks):
            self.block(block)[:] = bytes([block + 1]) * self.layout.block_bytes

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self._bytes = self.generations = memoryview(b"")
        self.windows = None
