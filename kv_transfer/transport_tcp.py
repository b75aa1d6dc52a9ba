"""The `tcp` transport: a block's payload follows its frame in the stream, and is received straight into its slot."""

from __future__ import annotations

from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Block
from kv_transfer.identity import TCP


class TcpOutlet:
    """P's end."""

    transport = TCP

    def place(self, source_block: int, block: memoryview) -> tuple[None, memoryview]:
        return None, block


class TcpIntake:
    """D's end."""

    transport = TCP

    def __init__(self, connection: FrameSocket) -> None:
        self._connection = connection

    def check(self, frame: Block) -> str | None:
        return None if frame.offset is None else "a block names an offset on a link without shared memory"

    def read_into(self, frame: Block, slot: memoryview) -> None:
        self._connection.receive_into(slot)

    def discard(self, frame: Block) -> None:
        self._connection.discard(frame.length)

    def close(self) -> None:
        """The connection is its link's."""
