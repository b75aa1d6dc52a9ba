"""The engine-thread side of a prefill worker: hands completed blocks to the sender, and gives blocks back.

Every method of `PromptComputer` runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_table_checks import NO_BLOCK
from engine.engine import Engine, RequestUpdate, StepOutput
from engine.lending import LendingBlockManager
from engine.request import Request
from kv_transfer.sender import BlockColumns, KvSender, OutgoingBlock
from prefill_worker.shipment import Shipment

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sending:
    request: Request
    shipment: Shipment
    num_digested: int = 0
    """Blocks of the prompt, from the first on, that were found in the cache or have their digest."""


class PromptComputer:
    """Owns the shipments.

    Invariant: the engine keeps every block that was handed to the sender until `transfer_over`: as a block of the
    request, or in quarantine if that was cancelled.
    """

    def __init__(
        self,
        sender: KvSender,
        generation: Callable[[int], int],
        block_size: int,
        lender: LendingBlockManager | None = None,
    ) -> None:
        """`generation`: of a block of the engine. `lender`: of the engine, if it lends blocks."""
        self._sender = sender
        self._block_size = block_size
        self._generation = generation
        self._lender = lender
        self._sending: dict[str, _Sending] = {}
        self._busy: dict[str, list[int]] = {}
        """Blocks of cancelled requests that the sender may be reading."""

    def submit(self, engine: Engine, request: Request, shipment: Shipment | None) -> None:
        """Raises as `Engine.submit` does. Without a shipment, no link will ever read the request's blocks."""
        request.transfer_over = shipment is None
        engine.submit(request)
        if shipment is not None:
            self._sending[request.request_id] = _Sending(request, shipment)

    def ship(self, output: StepOutput) -> None:
        """Hand over what the step completed; never waits. First the digest of each block that it filled is taken."""
        found = [(update, self._sending.get(update.request_id)) for update in output.updates if update.error is None]
        going_on = [(update, sending) for update, sending in found if sending is not None]
        self._sender.digest([block for update, sending in going_on for block in self._filled(update, sending)])
        for update, sending in going_on:
            blocks: list[OutgoingBlock | BlockColumns] = [*self._full(update, sending)]
            table, shipment = sending.request.block_table, sending.shipment
            blocks += shipment.take_complete(update.num_computed_tokens, table, self._generation)
            finished = update.token is not None
            if blocks or finished:
                self._sender.send(update.request_id, blocks, finish=finished)

    def _filled(self, update: RequestUpdate, sending: _Sending) -> list[tuple[int, int]]:
        """Blocks that this step made full, with their generations."""
        request, num_full = sending.request, update.num_computed_tokens // self._block_size
        first = max(sending.num_digested, request.num_cached_tokens // self._block_size)
        sending.num_digested = max(first, num_full)
        blocks = [block for block in request.block_table[first:num_full] if block != NO_BLOCK]
        return [(block, self._generation(block)) for block in blocks]

    def look_at(self, engine: Engine, block: OutgoingBlock) -> StepOutput:
        """A receiver got other bytes than were announced. If it is our memory that has changed, nobody is sent them
        again; requests that compute from them fail, as the output says."""
        updates: list[RequestUpdate] = []
        for one in (block.source_block, *block.more_blocks):
            generation = self._generation(one)
            damaged = self._sender.is_damaged(one, generation)
            if damaged or (damaged is None and generation == block.generation):  # nothing speaks for the second
                logger.error("block %d does not hold what was written into it: it leaves the prefix cache", one)
                updates += engine.discard(one, generation).updates
        return StepOutput(tuple(updates))

    def _full(self, update: RequestUpdate, sending: _Sending) -> list[BlockColumns]:
        """Full blocks, all together; the engine holds what may be read where it is until `loan_over`."""
        ordinals = sending.shipment.full(update.num_computed_tokens)
        if not ordinals:
            return []
        table = sending.request.block_table
        lendable = self._lend(update.request_id, table[: ordinals[-1] + 1], len(ordinals))
        return [sending.shipment.take_full(ordinals, table, self._generation, lendable)]

    def _lend(self, request_id: str, chain: list[int], count: int) -> bool:
        return self._lender is not None and NO_BLOCK not in chain and self._lender.lend(request_id, chain, count)

    def loan_over(self, key: str, count: int) -> None:
        """So many blocks of a request, live or not, are not read by a peer any more."""
        assert self._lender is not None, "nothing was lent"
        self._lender.end_loan(key, count)

    def cancel(self, engine: Engine, key: str) -> None:
        """Compute no more of it. What the sender may be reading stays in quarantine until `transfer_over`."""
        sending = self._sending.pop(key, None)
        busy = sending.shipment.handed_out if sending is not None else []
        engine.cancel(key, busy)
        if busy:
            self._busy[key] = busy

    def transfer_over(self, engine: Engine, key: str) -> None:
        """The sender reads no block of it any more."""
        if busy := self._busy.pop(key, None):
            engine.quiet(busy)
        elif self._sending.pop(key, None) is not None:
            engine.release_held(key)

    def check_idle(self) -> None:
        """While nothing is live."""
        assert not self._sending, f"shipments of {list(self._sending)} are left"
        assert not self._busy, f"quarantined blocks of {list(self._busy)} are left"
