"""Pools on cards that are stand-ins, and a link between two of them, or one of them and a pool in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from gpu_stand_in import StandIn
from kv_links import (
    LAYOUT,
    NUM_BLOCKS,
    SETTINGS,
    WAIT_S,
    Done,
    Failed,
    RecordingReceiverListener,
    RecordingSenderListener,
    block_hash,
    identity,
    in_time,
    only,
    outgoing,
    ticket,
)

from engine.cuda.memory import CudaKvCache
from engine.kv_layout import KvLayout
from kv_transfer.link import LinkSettings
from kv_transfer.pool import KvPool
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ExpectedBlock, ReservationTable
from kv_transfer.sender import KvSender

CARDS = replace(SETTINGS, transports=("shm", "nccl", "tcp"))


@dataclass
class Pair:
    source: KvPool
    target: KvPool
    sender: KvSender
    sent: RecordingSenderListener
    receiver: KvReceiver
    received: RecordingReceiverListener
    table: ReservationTable

    def send(self, transport: str, slots: list[int], ticket_id: str = "t") -> Done | Failed:
        """The first blocks into `slots`, over `transport`; empty: over any."""
        expected = [ExpectedBlock(ordinal=n, slot=s, generation=1, hash=block_hash(n)) for n, s in enumerate(slots)]
        self.table.open(ticket_id, expected, lease_until=in_time())
        places = dict(enumerate(slots))
        offered = self.receiver.endpoint()
        endpoint = only(offered, transport) if transport else offered
        self.sender.open(ticket_id, ticket(ticket_id, endpoint, places), in_time())
        self.sender.send(ticket_id, outgoing(range(len(slots))))
        self.sender.finish(ticket_id)
        return self.sent.next()

    def arrived(self, slots: list[int]) -> bool:
        return all(bytes_of(self.source, n) == bytes_of(self.target, slot) for n, slot in enumerate(slots))


def bytes_of(pool: KvPool, block: int) -> bytes:
    if isinstance(pool, CudaKvCache):
        return pool.block_tensor(block).numpy().tobytes()
    return bytes(pool.block(block))


def card_pool(index: int, layout: KvLayout = LAYOUT, card: str = "") -> CudaKvCache:
    pool = CudaKvCache(layout, NUM_BLOCKS, StandIn(index, card))
    pool.by_block.random_(0, 256, generator=torch.Generator().manual_seed(index))
    pool.mark()
    return pool


@contextmanager
def linked(source: KvPool, target: KvPool, settings: LinkSettings = CARDS) -> Iterator[Pair]:
    table, sent, received = ReservationTable("1"), RecordingSenderListener(), RecordingReceiverListener()
    receiver = KvReceiver(identity("decode-0", layout=target.layout), target, table, received, settings=settings)
    receiver.start()
    sender = KvSender(identity("prefill-0", layout=source.layout), source, sent, settings)
    try:
        yield Pair(source, target, sender, sent, receiver, received, table)
    finally:
        sender.close(WAIT_S)
        receiver.close(WAIT_S)
        table.check_integrity()


def calls_of(pool: KvPool) -> list[str]:
    assert isinstance(pool, CudaKvCache)
    assert isinstance(pool.gpu, StandIn)
    return pool.gpu.calls
