"""The account of one reservation's KV: which blocks came, and what is computed here instead. Knows no link."""

from __future__ import annotations

from collections.abc import Collection

from engine.engine import Reservation
from kv_transfer.stats import TransferStats
from kvrelay.v1 import worker_pb2


class HandOver:
    """One granted reservation.

    Complete means that the *set* of missing ordinals is empty; arrivals are never counted to decide it.
    """

    def __init__(self, reservation: Reservation, num_tokens: int, block_size: int) -> None:
        """`num_tokens` are those of the reservation: their KV is what has to be here in the end."""
        self._missing = {block.ordinal for block in reservation.missing}
        self._cached_tokens = reservation.cached_tokens
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._blocks_adopted = 0
        self._blocks_refused = 0
        self._bytes_refused = 0

    @property
    def complete(self) -> bool:
        return not self._missing

    def adopt(self, ordinals: Collection[int]) -> None:
        """They came, and the engine has them."""
        before = len(self._missing)
        self._missing.difference_update(ordinals)
        self._blocks_adopted += before - len(self._missing)

    def refuse(self, num_bytes: int) -> None:
        """A block came and was not what was agreed."""
        self._blocks_refused += 1
        self._bytes_refused += num_bytes

    def message(self, request_id: str, stats: TransferStats | None, error: str = "") -> worker_pb2.HandedOver:
        """`stats`: of the link, or None if it brought no block. What it brought too late was received, not adopted.
        With `error`, all from the first gap on is computed here."""
        message = worker_pb2.HandedOver(
            request_id=request_id,
            blocks_received=self._blocks_refused,
            bytes_received=self._bytes_refused,
            blocks_cached=self._cached_tokens // self._block_size,
            error=error,
        )
        if stats is not None:
            message.blocks_adopted = self._blocks_adopted
            message.blocks_received += stats.blocks
            message.bytes_received += stats.bytes
            message.transport = stats.transport
            message.transfer_us = round(stats.seconds * 1e6)
        if error:
            message.recomputed_tokens = self._num_tokens - self._resident_tokens()
        return message

    def _resident_tokens(self) -> int:
        if not self._missing:
            return self._cached_tokens
        return min(self._missing) * self._block_size
