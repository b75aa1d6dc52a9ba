"""The engine's own pools on both ends of a link."""

from __future__ import annotations

import time

import pytest
import torch
from kv_links import (
    LAYOUT,
    WAIT_S,
    Done,
    RecordingReceiverListener,
    RecordingSenderListener,
    block_hash,
    identity,
    in_time,
    only,
    outgoing,
    ticket,
)

from engine.kv_cache import KvCache
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ExpectedBlock, ReservationTable
from kv_transfer.sender import KvSender


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tensors_written_at_prefill_are_read_at_decode(transport: str) -> None:
    source, target = KvCache(LAYOUT, 4), KvCache(LAYOUT, 4)
    source.pool.copy_(torch.randn(source.pool.shape, generator=torch.Generator().manual_seed(1)))
    table = ReservationTable("1")
    receiver = KvReceiver(identity("decode-0"), target, table, RecordingReceiverListener())
    receiver.start()
    listener = RecordingSenderListener()
    sender = KvSender(identity("prefill-0"), source, listener)
    expected = [ExpectedBlock(ordinal=n, slot=3 - n, generation=1, hash=block_hash(n)) for n in range(3)]
    table.open("t", expected, lease_until=time.monotonic() + 5)

    endpoint = only(receiver.endpoint(), transport)
    sender.open("t", ticket("t", endpoint, {block.ordinal: block.slot for block in expected}), in_time())
    sender.send("t", outgoing(range(3)))
    sender.finish("t")

    assert isinstance(listener.next(), Done)
    assert all(torch.equal(target.pool[3 - n], source.pool[n]) for n in range(3))
    assert not target.pool[0].any()
    sender.close(WAIT_S)
    receiver.close(WAIT_S)
    table.check_integrity()
    source.close()
    target.close()
