"""The engine-thread side of a prefill worker: hands completed blocks to the sender, and gives blocks back.

Every method of `PromptComputer` runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.block_table_checks import NO_BLOCK
from engine.engine import Engine, StepOutput
from engine.lending import LendingBlockManager
from engine.request import Request
from kv_transfer.sender import KvSender, OutgoingBlock
from prefill_worker.shipment import Shipment


@dataclass(frozen=True, slots=True)
class _Sending:
    request: Request
    shipment: Shipment


class PromptComputer:
    """Owns the shipments.

    Invariant: the engine keeps every block that was handed to the sender until `transfer_over`: as a block of the
    request, or in quarantine if that was cancelled.
    """

    def __init__(
        self, sender: KvSender, generation: Callable[[int], int], lender: LendingBlockManager | None = None
    ) -> None:
        """`generation`: of a block of the engine. `lender`: of the engine, if it lends blocks."""
        self._sender = sender
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
        """Hand over what the step completed; never waits."""
        for update in output.updates:
            sending = self._sending.get(update.request_id)
            if sending is None or update.error is not None:
                continue
            table, shipment = sending.request.block_table, sending.shipment
            blocks = shipment.take_complete(update.num_computed_tokens, table, self._generation)
            if blocks:
                self._sender.send(update.request_id, self._lendable(sending, blocks))
            if update.token is not None:
                self._sender.finish(update.request_id)

    def _lendable(self, sending: _Sending, blocks: list[OutgoingBlock]) -> list[OutgoingBlock]:
        """`blocks`, those marked that may be read where they are; the engine holds these until `loan_over`."""
        lendable = sending.shipment.num_lendable(blocks)
        if self._lender is None or not lendable:
            return blocks
        request = sending.request
        chain = request.block_table[: blocks[lendable - 1].ordinal + 1]
        if NO_BLOCK in chain or not self._lender.lend(request.request_id, chain, lendable):
            return blocks
        return [*(replace(block, lendable=True) for block in blocks[:lendable]), *blocks[lendable:]]

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
