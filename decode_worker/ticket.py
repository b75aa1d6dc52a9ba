"""Between a granted reservation and what links and routers are told of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from engine.engine import MissingBlock
from engine.kv_layout import KvLayout
from kv_transfer.reservation import ExpectedBlock
from kvrelay.v1 import worker_pb2
from worker.config import WorkerConfig
from worker.outputs import layout_to_proto


def expected_blocks(missing: Sequence[MissingBlock]) -> list[ExpectedBlock]:
    """For the reservation table."""
    return [
        ExpectedBlock(ordinal=block.ordinal, slot=block.slot, generation=block.generation, hash=block.expected_hash)
        for block in missing
    ]


def new_ticket(ticket_id: str, config: WorkerConfig, incarnation: str, layout: KvLayout) -> worker_pb2.Ticket:
    """That asks for nothing yet."""
    return worker_pb2.Ticket(
        ticket_id=ticket_id,
        worker_id=config.worker_id,
        incarnation=incarnation,
        lease_ms=round(config.lease_s * 1000),
        layout=layout_to_proto(layout),
    )


def ask_for(ticket: worker_pb2.Ticket, missing: Sequence[MissingBlock]) -> None:
    """Fill in which blocks the ticket's holder may write, and where."""
    ticket.ordinals.extend(block.ordinal for block in missing)
    ticket.slots.extend(block.slot for block in missing)
    ticket.generations.extend(block.generation for block in missing)
