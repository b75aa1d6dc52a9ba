"""The digest that tells damaged or overwritten KV bytes from those that were sent. No defence against forgery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

from engine.native.blocks import SharedPool, TargetPool

DIGEST_BYTES = 16
UNVERIFIED = bytes(DIGEST_BYTES)
"""In the place of a digest where nobody has the bytes in host memory: blocks that go from GPU to GPU."""


class BlockCopier(Protocol):
    """Passes over the bytes of many blocks in one call, without the GIL. The digest is xxh3-128."""

    def digests(self, blocks: Sequence[memoryview]) -> list[bytes]: ...

    def copy(self, slots: Sequence[memoryview], pool: memoryview, offsets: Sequence[int]) -> list[bytes]:
        """Copy what is in `pool` at each offset into its slot.

        Returns the digest of what each slot got, whatever the pool holds by then.
        """
        ...

    def copy_blocks(
        self, source: SharedPool, sources: Sequence[int], target: TargetPool, slots: Sequence[int]
    ) -> bytes:
        """The same, from one pool to another: block `sources[i]` of `source` into block `slots[i]` of `target`.

        Returns the digests, one after the other.
        """
        ...


class PythonBlockCopier:
    """One block after the other. A `BlockCopier` that runs everywhere; `engine.native.blocks` has a faster one."""

    def digests(self, blocks: Sequence[memoryview]) -> list[bytes]:
        return [xxhash.xxh3_128_digest(block) for block in blocks]

    def copy(self, slots: Sequence[memoryview], pool: memoryview, offsets: Sequence[int]) -> list[bytes]:
        for slot, offset in zip(slots, offsets, strict=True):
            # Releases the GIL, which assigning to a memoryview's slice does not.
            np.copyto(np.frombuffer(slot, dtype=np.uint8), np.frombuffer(pool, np.uint8, len(slot), offset))
        return self.digests(slots)

    def copy_blocks(
        self, source: SharedPool, sources: Sequence[int], target: TargetPool, slots: Sequence[int]
    ) -> bytes:
        offsets = [target.layout.block_bytes * block for block in sources]
        return b"".join(self.copy([target.block(slot) for slot in slots], source.bytes, offsets))
