"""What routers and links do to a decode worker, without either."""

from __future__ import annotations

from typing import Any

from roles import fill

from decode_worker.worker import DecodeWorker
from engine.block_hash import pack_tokens
from kv_transfer.frames import BlockEntry
from kv_transfer.reservation import ReservationTable, WriteGrant, WriteOutcome
from kvrelay.v1 import worker_pb2

PROMPT = list(range(100, 122))
BLOCKS = 6
"""Of `PROMPT`, 4 tokens each; the last holds 2."""


def reserve(request_id: str = "a", tokens: list[int] = PROMPT, **fields: Any) -> worker_pb2.Reserve:
    message: worker_pb2.Reserve = fill(worker_pb2.Reserve(), request_id, tokens, **fields)
    return message


def start(request_id: str = "a", tokens: list[int] | None = None) -> worker_pb2.Start:
    """Without tokens: compute what is missing."""
    packed = pack_tokens(tokens or [])
    return worker_pb2.Start(request_id=request_id, token_ids=packed, compute_missing=not tokens)


def table_of(worker: DecodeWorker) -> ReservationTable:
    return worker._table


def begin_write(worker: DecodeWorker, ticket: worker_pb2.Ticket, index: int) -> WriteGrant:
    """As a link does when the frame of the ticket's block number `index` has come."""
    ordinal = ticket.ordinals[index]
    content_hash = table_of(worker)._open[ticket.ticket_id].blocks[ordinal].hash
    entry = BlockEntry(ordinal, ticket.slots[index], ticket.generations[index], content_hash, bytes(16), None)
    grant, refused = table_of(worker).begin_write(ticket.ticket_id, ticket.incarnation, [entry])
    for error in refused.values():
        raise error
    return grant


def end_write(worker: DecodeWorker, grant: WriteGrant) -> WriteOutcome:
    """As a link does, with what it tells the worker then."""
    (outcome,) = table_of(worker).end_write(grant, [True])
    if outcome is WriteOutcome.LATE:
        worker.writes_quiet(grant.ticket_id, grant.slots)
    elif outcome is WriteOutcome.ADOPTED:
        worker.blocks_adopted(grant.ticket_id, grant.ordinals, 256, "shm")
    return outcome
