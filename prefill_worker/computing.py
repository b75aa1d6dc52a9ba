"""The engine-thread side of a prefill worker: hands completed blocks to the sender, and gives blocks back.

Every method of `PromptComputer` runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.engine import Engine, StepOutput
from engine.request import Request
from kv_transfer.sender import KvSender
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

    def __init__(self, sender: KvSender, generation: Callable[[int], int]) -> None:
        """`generation`: of a block of the engine."""
        self._sender = sender
        self._generation = generation
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
                self._sender.send(update.request_id, blocks)
            if update.token is not None:
                self._sender.finish(update.request_id)

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
