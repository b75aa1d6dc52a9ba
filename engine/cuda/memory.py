"""Owns the memory of a KV pool on a GPU, and pinned host memory for blocks that leave it. Knows not which is whose."""

from __future__ import annotations

import torch

from engine.cuda.device import Device, Mark
from engine.cuda.link_memory import CardLinkMemory
from engine.errors import ConfigError, InternalError
from engine.kv_cache import KvCache, kv_views
from engine.kv_layout import KvLayout


class CudaKvCache(KvCache):
    """As `KvCache`, on the device. Its blocks are tensors: host code has no bytes of them."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: Device, num_host_blocks: int = 0) -> None:
        """Raises `ConfigError` naming `gpu_memory_utilization`, or `swap_space`, if there is no room."""
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * layout.block_bytes
        self.fd = None
        self.host = None
        self.device = device.name
        self.gpu = device
        self.last_mark: Mark | None = None
        """All that the engine has launched over this pool came before. A link's copies come after it."""
        shape = num_blocks, layout.block_bytes
        try:
            self.by_block = torch.zeros(shape, dtype=torch.uint8, device=device.torch_device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"gpu_memory_utilization: no {self.nbytes} bytes for the KV pool: {error}") from error
        self.pool, self.scales = kv_views(self.by_block, layout)
        self.host_blocks = torch.empty(0, layout.block_bytes, dtype=torch.uint8)
        """[host blocks, block_bytes] uint8, pinned."""
        if num_host_blocks:
            try:
                pinned = device.pinned(num_host_blocks * layout.block_bytes)
            except RuntimeError as error:
                raise ConfigError(f"swap_space: no pinned memory for {num_host_blocks} blocks: {error}") from error
            self.host_blocks = pinned.view(num_host_blocks, layout.block_bytes)

    @property
    def num_host_blocks(self) -> int:
        return len(self.host_blocks)

    @property
    def address(self) -> int:
        raise InternalError("the KV pool is on a GPU: host code has no address of it")

    @property
    def closed(self) -> bool:
        return self.by_block.numel() == 0

    def block(self, block: int) -> memoryview:
        raise InternalError("the KV pool is on a GPU: host code has no bytes of it, use `block_tensor`")

    def block_tensor(self, block: int) -> torch.Tensor:  # [block_bytes] uint8
        """One block, no copy, on the device."""
        if not 0 <= block < self.num_blocks:
            raise InternalError(f"block {block} is outside the pool of {self.num_blocks} blocks")
        if self.closed:
            raise InternalError("the KV pool is closed")
        return self.by_block[block]

    def copy_block(self, source: int, target: int) -> None:
        """In the order of compute."""
        self.block_tensor(target).copy_(self.block_tensor(source))
        self.mark()

    def mark(self) -> None:
        """By the engine's thread, behind whatever it launches that reads or writes blocks: before it tells anybody
        that a block is complete, or that a slot may be written."""
        self.last_mark = self.gpu.mark()

    def link_memory(self, num_blocks: int) -> CardLinkMemory:
        return CardLinkMemory(self, num_blocks)

    def close(self) -> None:
        """Give the memory back to torch. A second call does nothing. Views that someone holds keep it."""
        self.by_block = self.by_block.new_empty(0)
        self.pool = self.pool.new_empty(0)
        self.scales = None
        self.host_blocks = self.host_blocks.new_empty(0, self.layout.block_bytes)


class CudaHostCopies:
    """A `BlockMover` between a pool and its pinned host memory, on the device's stream of copies."""

    def __init__(self, kv: CudaKvCache) -> None:
        self._kv = kv

    def to_host(self, block: int, slot: int) -> None:
        self._kv.gpu.copy_aside(self._kv.block_tensor(block), self._kv.host_blocks[slot])
        self._kv.mark()

    def to_pool(self, slot: int, block: int) -> None:
        self._kv.gpu.copy_aside(self._kv.host_blocks[slot], self._kv.block_tensor(block))
        self._kv.mark()

    def wait(self) -> None:
        self._kv.gpu.wait_for_copies()
