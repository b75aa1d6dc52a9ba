"""What a sender of blocks tells its worker, and what it is told by the other end."""

from __future__ import annotations

from typing import Protocol

from engine import errors
from engine.errors import EngineError, TransferError
from kv_transfer.frames import Nack
from kv_transfer.outgoing import OutgoingBlock
from kv_transfer.stats import TransferStats


class SenderListener(Protocol):
    """Called on link threads. For every transfer exactly one of the two, after which no thread of this process reads
    its source blocks. Must not wait for the sender."""

    def transfer_done(self, request_id: str, stats: TransferStats) -> None: ...

    def transfer_failed(self, request_id: str, error: EngineError) -> None:
        """`TransferError`, or `RequestCancelled` after `abort`, or `DeadlineExceeded`."""
        ...

    def block_doubted(self, block: OutgoingBlock) -> None:
        """A receiver got other bytes than were announced, and its transfer fails. Either the way or `block` is to
        blame: see `KvSender.is_damaged`. Until that is known nobody should be sent a digest that is taken anew."""
        ...

    def loan_over(self, request_id: str, count: int) -> None:
        """So many of the blocks that were handed over to be lent are not, or no more; before or after the transfer's
        end. Each is reported once."""
        ...


def error_of(frame: Nack) -> TransferError:
    """The typed error that the receiver named; a plain `TransferError` for a name that we do not know."""
    cls = getattr(errors, frame.error, None)
    if isinstance(cls, type) and issubclass(cls, TransferError):
        return cls(frame.message)
    return TransferError(f"{frame.error}: {frame.message}")
