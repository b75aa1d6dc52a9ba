"""The `adopt` transport: the receiver reads a block in the sender's pool for as long as it needs it. Nothing is copied.

A link of it is one of `shm`, with the sender's pool in a window of the receiver's as well. So what the sender may not
lend, because too much is lent already or the block is not full, is copied over the same link.
"""

from __future__ import annotations

from engine.errors import HandshakeRefused
from engine.peer_windows import PeerWindows
from kv_transfer.digest import BlockCopier
from kv_transfer.identity import ADOPT
from kv_transfer.transport_shm import ShmIntake


class AdoptIntake(ShmIntake):
    """D's end."""

    transport = ADOPT

    def __init__(self, fd: int, num_blocks: int, block_bytes: int, copier: BlockCopier, windows: PeerWindows) -> None:
        """As `ShmIntake`. Raises `HandshakeRefused` too if there is no window for this pool."""
        super().__init__(fd, num_blocks, block_bytes, copier)
        try:
            self.window = windows.open(fd, num_blocks)
        except HandshakeRefused:
            super().close()
            raise

    def close(self) -> None:
        """What is lent can still be read: its window stays until all of it was given back."""
        super().close()
        if self.window is not None:
            self.window.retire()
