"""What a link needs of a KV pool. `engine.kv_cache.KvCache` is one; tests bring smaller ones."""

from __future__ import annotations

from typing import Protocol

from engine.kv_layout import KvLayout
from engine.link_memory import LinkMemory
from engine.peer_windows import PeerWindows


class KvPool(Protocol):
    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def device(self) -> str:
        """Where it is, as torch names it: `cpu`, or a GPU, which `nccl` alone reaches without a copy to the host."""
        ...

    @property
    def fd(self) -> int | None:
        """Of the memory file that holds the pool from its first byte, or None where there is none to share."""
        ...

    @property
    def address(self) -> int:
        """Of block 0 in this process, for native copies. Not to be kept; only where host code can reach it."""
        ...

    @property
    def lends(self) -> bool:
        """Whether peers can read blocks of it where they are: its memory file has generations behind the blocks."""
        ...

    @property
    def windows(self) -> PeerWindows | None:
        """Where pools of peers can be read beside ours."""
        ...

    def block(self, block: int) -> memoryview:
        """The bytes of one block, writable, `layout.block_bytes` long, no copy. Of a pool in host memory only."""
        ...

    def link_memory(self, num_blocks: int) -> LinkMemory | None:
        """For one link with groups of up to `num_blocks`, of a pool that is not in host memory."""
        ...
