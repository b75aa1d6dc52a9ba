"""The digest that tells damaged or overwritten KV bytes from those that were sent. No defence against forgery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

DIGEST_BYTES = 16


class BlockCopier(Protocol):
    """Passes over the bytes of many blocks in one call, without the GIL. The digest is xxh3-128."""

    def digests(self, blocks: Sequence[memoryview]) -> list[bytes]: ...

    def copy(self, slots: Sequence[memoryview], sources: Sequence[memoryview]) -> list[bytes]:
        """Copy each source into its slot. Returns the digest of what each slot got, whatever its source is by then."""
        ...


class PythonBlockCopier:
    """One block after the other. A `BlockCopier` that runs everywhere."""

    def digests(self, blocks: Sequence[memoryview]) -> list[bytes]:
        return [xxhash.xxh3_128_digest(block) for block in blocks]

    def copy(self, slots: Sequence[memoryview], sources: Sequence[memoryview]) -> list[bytes]:
        for slot, source in zip(slots, sources, strict=True):
            # Releases the GIL, which assigning to a memoryview's slice does not.
            np.copyto(np.frombuffer(slot, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
        return self.digests(slots)
