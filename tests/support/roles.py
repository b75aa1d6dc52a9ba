"""One worker role without its server: a session to talk through, requests to send, and a sender that does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from fakes import FakeModel

from engine.block_hash import pack_tokens
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import EngineError, RequestCancelled
from kv_transfer.sender import BlockColumns, OutgoingBlock, SenderListener, TicketInfo
from kv_transfer.stats import TransferStats
from kvrelay.v1 import common_pb2, worker_pb2
from worker.config import WorkerConfig
from worker.engine_builder import EngineParts, assemble_engine
from worker.session import Role, Session

BLOCK_SIZE = 4
FINGERPRINT = bytes(range(32))
BOUND_S = 10.0
"""A wait longer than this is a failure."""


def make_parts(
    model: FakeModel | None = None, num_blocks: int = 32, max_num_batched_tokens: int = 8, max_num_seqs: int = 8
) -> EngineParts:
    config = EngineConfig(
        model_path="none",
        dtype="float32",
        num_blocks_override=num_blocks,
        block_size=BLOCK_SIZE,
        scheduler=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
    )
    return assemble_engine(model or FakeModel(), FINGERPRINT, config)


def make_config(worker_id: str = "w0", **settings: Any) -> WorkerConfig:
    return WorkerConfig(worker_id=worker_id, model_name="fake", engine=EngineConfig(model_path="none"), **settings)


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | fields)


def fill(message: Any, request_id: str, tokens: Sequence[int], **fields: Any) -> Any:
    """The fields that Reserve and Prefill share; `fields` overrides."""
    defaults: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": pack_tokens(tokens),
        "num_prompt_tokens": len(tokens),
        "sampling": sampling(),
        "timeout_ms": 60_000,
    }
    message.MergeFrom(type(message)(**defaults | fields))
    return message


class CheckedRole(Role, Protocol):
    async def check_integrity(self) -> None: ...


class Router:
    """What a router is to a role: one session."""

    def __init__(self, role: CheckedRole, name: str = "r0") -> None:
        self.role = role
        self.session = Session(name, 1024)

    async def send(self, **message: Any) -> None:
        await self.role.handle(self.session, worker_pb2.SessionRequest(**message))

    async def cancel(self, request_id: str) -> None:
        await self.send(cancel=worker_pb2.Cancel(request_id=request_id))

    async def next(self) -> worker_pb2.SessionResponse:
        async with asyncio.timeout(BOUND_S):
            return await self.session.next_message()

    async def expect(self, kind: str) -> Any:
        """The next message, which must be of `kind`."""
        message = await self.next()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def tokens(self, count: int) -> list[int]:
        """The next `count` outputs of the one request on this session, in order of their indexes."""
        outputs: list[worker_pb2.Output] = []
        while len(outputs) < count:
            outputs += [entry.output for entry in (await self.expect("step")).outputs]
        assert [output.index for output in outputs] == list(range(outputs[0].index, outputs[0].index + count))
        return [output.token_id for output in outputs]


async def check_nothing_left(role: CheckedRole, num_blocks: int = 32) -> worker_pb2.Load:
    """Every live request ends by itself, and then every block is free or cached."""
    await role.drain(BOUND_S)
    await role.check_integrity()
    load = await role.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.blocks_free + load.blocks_cached == num_blocks, load
    return load


class ManualSender:
    """Stands in for `KvSender`: notes what it is told; the test says how transfers end.

    An aborted one ends at once, or with `lingers` when the test calls `end_aborted`.
    """

    def __init__(
        self, identity: object, kv: object, listener: SenderListener, *, settings: object, copier: object
    ) -> None:
        self.listener = listener
        self.open_transfers: dict[str, TicketInfo] = {}
        self.sent: dict[str, list[OutgoingBlock]] = {}
        self.digested: list[tuple[int, int]] = []
        self.damaged: set[int] = set()
        self.finished: set[str] = set()
        self.aborted: set[str] = set()
        self.lingers = False

    def open(self, request_id: str, ticket: TicketInfo, deadline: float) -> None:
        self.open_transfers[request_id] = ticket
        self.sent[request_id] = []

    def send(self, request_id: str, blocks: Sequence[OutgoingBlock | BlockColumns], *, finish: bool = False) -> None:
        if request_id in self.open_transfers:
            for block in blocks:
                self.sent[request_id] += block.singly() if isinstance(block, BlockColumns) else [block]
        if finish:
            self.finish(request_id)

    def digest(self, blocks: Sequence[tuple[int, int]]) -> None:
        self.digested += blocks

    def is_damaged(self, block: int, generation: int) -> bool | None:
        return block in self.damaged

    def finish(self, request_id: str) -> None:
        self.finished.add(request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        if not self.lingers:
            self.end_aborted()

    def end(self, request_id: str, error: EngineError | None = None) -> None:
        """The transfer is over; no block of it is read any more."""
        del self.open_transfers[request_id]
        if error is None:
            self.listener.transfer_done(request_id, TransferStats(blocks=0, bytes=0, transport="shm", seconds=0.0))
        else:
            self.listener.transfer_failed(request_id, error)

    def end_aborted(self) -> None:
        for request_id in self.aborted & self.open_transfers.keys():
            self.end(request_id, RequestCancelled("the transfer was aborted"))

    def check_integrity(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        for request_id in list(self.open_transfers):
            self.end(request_id, RequestCancelled("the sender is closed"))
