"""The `tcp` transport: payloads follow their frame in the stream, and are received straight into their slots."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.digest import BlockCopier
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Blocks
from kv_transfer.identity import TCP


class TcpOutlet:
    """P's end."""

    transport = TCP
    reads_pool = False

    def __init__(self, connection: FrameSocket) -> None:
        self._connection = connection

    def offset(self, source_block: int) -> None:
        return None

    def send(self, encoded: bytes, sources: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._connection.send(encoded, *sources)

    def close(self) -> None:
        """The connection is its link's."""


class TcpIntake:
    """D's end."""

    transport = TCP
    window = None

    def __init__(self, connection: FrameSocket, copier: BlockCopier) -> None:
        self._connection = connection
        self._copier = copier

    def check(self, frame: Blocks) -> str | None:
        if any(entry.offset is not None for entry in frame.entries):
            return "a block names an offset on a link without shared memory"
        return None

    def receive_into(self, frame: Blocks, slots: Sequence[memoryview | None]) -> list[bytes]:
        digests: list[bytes] = []
        for slot in slots:
            if slot is None:
                self._connection.discard(frame.length)
            else:
                self._connection.receive_into(slot)
                digests += self._copier.digests([slot])  # while it is in the cache
        return digests

    def close(self) -> None:
        """The connection is its link's."""
