"""Owns the memory of one KV pool: a tensor for the kernels, bytes for the links. Knows not which block is whose."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ConfigError, InternalError
from engine.kv_layout import KvLayout
from engine.link_memory import LinkMemory
from engine.machine import memory_bytes
from engine.peer_windows import GENERATION_BYTES, PeerWindows, generations_offset

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h since 5.1; Python's fcntl has no name for it


class KvCache:
    """The KV pool of one worker, zero at first; the system provides each page when it is first written.

    On Linux the memory is a memfd, so that a peer on this host can map `fd`. It is sealed: nobody can resize it,
    and (Linux 5.1 and later) no mapping but ours can write to it. Behind the blocks it holds the generation of each
    slot, for peers that read blocks where they are.
    """

    device = "cpu"
    """Where it is, as torch names it."""
    max_lent_blocks = 0
    generations: npt.NDArray[np.uint64] | None = None
    """Of each slot, as peers see it; kept up by who lends. None where nobody can see it."""
    windows: PeerWindows | None = None

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_host_blocks: int = 0,
        *,
        borrows: bool = False,
        lent_share: float = 0.0,
        fence: Callable[[], None] = lambda: None,
        before_seal: Callable[[KvCache], None] = lambda kv: None,
    ) -> None:
        """Raises `ConfigError` naming `kv_memory_bytes` if the machine cannot hold the pool; nothing stays open.

        `num_host_blocks`: room in host memory for blocks that leave the pool. `borrows` (Linux): blocks of peers can
        be read beside ours. `lent_share`: of our blocks, what peers may read at once where it is. Both need `fence`,
        a full memory barrier, where another process may see our writes in another order (`engine.native.fence`).
        `before_seal`: processes of this worker that write into the pool, too, map `fd` now. It may raise.
        """
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self._block_bytes = layout.block_bytes  # which works it out each time
        self.nbytes = num_blocks * self._block_bytes
        _check_physical_memory(self.nbytes)
        self.fence = fence
        self.max_lent_blocks = int(lent_share * num_blocks)
        offset = generations_offset(self.nbytes)
        size = offset + num_blocks * GENERATION_BYTES
        self.fd: int | None = _sealable_memfd(size) if sys.platform == "linux" else None
        self._give_fd_back = None if self.fd is None else weakref.finalize(self, os.close, self.fd)
        """Now, by `close`, or with the pool, if nobody closes it."""
        try:
            memory = self._map(size, borrows)
            if self.fd is not None and not borrows:
                self.generations = np.frombuffer(memoryview(memory), np.uint64, num_blocks, offset)
            if self.fd is not None:
                before_seal(self)
                _seal(self.fd)
        except (OSError, MemoryError, OverflowError, ValueError, ConfigError) as error:
            self._close_fd()
            raise _does_not_fit(self.nbytes, error) from error
        length = self.num_block_ids * self._block_bytes
        self._bytes = memoryview(memory).cast("B")[:length]
        by_block = torch.frombuffer(memory, dtype=torch.uint8, count=length).view(-1, self._block_bytes)
        self.pool, self.scales = kv_views(by_block, layout)
        """[block ids, layers, 2 (K, V), kv_heads, block_size, head_dim]: contiguous inside a block, and as a whole
        unless scales stand between the blocks. Blocks of peers are read only: writing there ends the process."""
        # Scales: [blocks, layers, 2 (K, V), kv_heads] float32, in a quantized type; see `engine.kernels.quantized`.
        self.host: KvCache | None = None
        """Host memory: as the pool of a worker without a GPU is in it too, it is one more pool."""
        if num_host_blocks:
            try:
                self.host = KvCache(layout, num_host_blocks)
            except ConfigError:
                self.close()
                raise

    @property
    def num_host_blocks(self) -> int:
        return 0 if self.host is None else self.host.num_blocks

    @property
    def num_block_ids(self) -> int:
        """Our blocks, and behind them those of peers."""
        return self.num_blocks if self.windows is None else self.windows.num_block_ids

    @property
    def lends(self) -> bool:
        """Whether peers on this host may read blocks where they are."""
        return self.generations is not None and self.max_lent_blocks > 0

    @property
    def address(self) -> int:
        """Of block 0 in this process, for native copies. Not to be kept beyond `close`."""
        if self.closed:
            raise InternalError("the KV pool is closed")
        return self.pool.data_ptr()

    @property
    def closed(self) -> bool:
        return self._bytes.nbytes == 0

    def block(self, block: int) -> memoryview:
        """The bytes of one block, `layout.block_bytes` long, writable, no copy."""
        if not 0 <= block < self.num_block_ids:
            raise InternalError(f"block {block} is outside the pool of {self.num_blocks} blocks")
        if self.closed:
            raise InternalError("the KV pool is closed")
        start = block * self._block_bytes
        return self._bytes[start : start + self._block_bytes]

    def link_memory(self, num_blocks: int) -> LinkMemory | None:
        """What a link needs to reach blocks that are not in host memory, for groups of up to `num_blocks`."""
        return None

    def _map(self, size: int, borrows: bool) -> mmap.mmap | ctypes.Array[ctypes.c_ubyte]:
        if borrows and self.fd is not None:
            self.windows = PeerWindows(self.fd, self.nbytes, self.num_blocks)
            return self.windows.memory
        memory = mmap.mmap(-1 if self.fd is None else self.fd, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # only a hint: the kernel may be built without it
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def close(self) -> None:
        """Give the memory back. A second call does nothing.

        A tensor or memoryview that someone still holds stays valid, and keeps the memory until it is gone. A plain
        address does not: whoever copies through `address` must have stopped.
        """
        self._bytes = memoryview(b"")
        self.pool = torch.empty(0, dtype=self.pool.dtype)
        self.scales = self.windows = self.generations = None
        self._close_fd()
        if self.host is not None:
            self.host.close()

    def _close_fd(self) -> None:
        if self._give_fd_back is not None:
            self._give_fd_back()
        self.fd = None


def kv_views(
    by_block: torch.Tensor,  # [blocks, block_bytes] uint8
    layout: KvLayout,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`pool` and `scales` of a cache in these bytes."""
    values = by_block[:, : layout.values_bytes]
    pool = values.view(_DTYPES[layout.dtype]).view(len(by_block), *layout.shape)
    if not layout.quantized:
        return pool, None
    scales = by_block[:, layout.scales_offset : layout.scales_offset + layout.scales_bytes]
    return pool, scales.view(torch.float32).view(len(by_block), *layout.scales_shape)


def _check_physical_memory(nbytes: int) -> None:
    # Pages come when they are written: a pool larger than the machine would open well and be killed much later.
    if nbytes > (most := memory_bytes()):
        raise ConfigError(f"kv_memory_bytes: the KV pool needs {nbytes} bytes, the machine has {most}")


def _sealable_memfd(nbytes: int) -> int:
    try:
        fd = os.memfd_create("kvrelay-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _does_not_fit(nbytes, error) from error
    try:
        os.ftruncate(fd, nbytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise _does_not_fit(nbytes, error) from error
    return fd


def _seal(fd: int) -> None:
    """Must follow our own mapping: the write seal refuses later writable ones."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)  # a kernel before 5.1


def _does_not_fit(nbytes: int, error: Exception) -> ConfigError:
    return ConfigError(f"kv_memory_bytes: cannot allocate {nbytes} bytes for the KV pool: {error}")
