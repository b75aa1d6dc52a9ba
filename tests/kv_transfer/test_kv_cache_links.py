"""The engine's own pools on both ends of a link."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kv_links import (
    LAYOUT,
    WAIT_S,
    Done,
    Failed,
    MemoryPool,
    RecordingReceiverListener,
    RecordingSenderListener,
    block_hash,
    identity,
    in_time,
    only,
    outgoing,
    same_bytes,
    ticket,
)

from engine.errors import HandshakeRefused
from engine.kernels.reference import store_kv
from engine.kv_cache import KvCache
from engine.native.blocks import load_block_copier
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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("native_end", ["sender", "receiver"])
def test_native_and_python_ends_agree_on_every_byte(transport: str, native_end: str, tmp_path: Path) -> None:
    native = load_block_copier(tmp_path)
    source, target = MemoryPool(num_blocks=80), MemoryPool(num_blocks=80)
    source.fill(seed=5)
    table, listener = ReservationTable("1"), RecordingSenderListener()
    copier = native if native_end == "receiver" else None
    receiver = KvReceiver(identity("decode-0"), target, table, RecordingReceiverListener(), copier=copier)
    receiver.start()
    copier = native if native_end == "sender" else None
    sender = KvSender(identity("prefill-0"), source, listener, copier=copier)
    places = {n: 79 - n for n in range(80)}
    expected = [ExpectedBlock(ordinal=n, slot=slot, generation=1, hash=block_hash(n)) for n, slot in places.items()]
    table.open("t", expected, lease_until=time.monotonic() + 5)

    sender.open("t", ticket("t", only(receiver.endpoint(), transport), places), in_time())
    sender.send("t", outgoing(range(80)))  # 2.5 MiB: past the caches on the native side
    sender.finish("t")

    assert isinstance(listener.next(), Done)
    assert all(same_bytes(source, n, target, slot) for n, slot in places.items())
    sender.close(WAIT_S)
    receiver.close(WAIT_S)
    table.check_integrity()
    source.close()
    target.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_a_quantized_block_brings_its_scales(transport: str, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    source, target = KvCache(layout, 4), KvCache(layout, 4)
    fill(source)
    table = ReservationTable("1")
    receiver = KvReceiver(identity("decode-0", layout=layout), target, table, RecordingReceiverListener())
    receiver.start()
    listener = RecordingSenderListener()
    sender = KvSender(identity("prefill-0", layout=layout), source, listener)
    table.open("t", [ExpectedBlock(ordinal=0, slot=3, generation=1, hash=block_hash(0))], time.monotonic() + 5)

    sender.open("t", ticket("t", only(receiver.endpoint(), transport), {0: 3}), in_time())
    sender.send("t", outgoing([0], first_source=1))
    sender.finish("t")

    assert isinstance(listener.next(), Done)
    assert bytes(target.block(3)) == bytes(source.block(1))
    assert source.scales is not None
    assert target.scales is not None
    assert torch.equal(target.scales[3], source.scales[1])
    assert source.scales[1].all()
    sender.close(WAIT_S)
    receiver.close(WAIT_S)
    table.check_integrity()
    source.close()
    target.close()


def test_workers_with_other_types_of_kv_refuse_to_link_though_their_blocks_have_one_size() -> None:
    fp8, int8 = replace(LAYOUT, dtype="fp8_e4m3"), replace(LAYOUT, dtype="int8")
    assert fp8.block_bytes == int8.block_bytes
    source, target = KvCache(int8, 4), KvCache(fp8, 4)
    table = ReservationTable("1")
    receiver = KvReceiver(identity("decode-0", layout=fp8), target, table, RecordingReceiverListener())
    receiver.start()
    listener = RecordingSenderListener()
    sender = KvSender(identity("prefill-0", layout=int8), source, listener)
    table.open("t", [ExpectedBlock(ordinal=0, slot=3, generation=1, hash=block_hash(0))], time.monotonic() + 5)

    sender.open("t", ticket("t", receiver.endpoint(), {0: 3}), in_time())
    failed = listener.next()

    assert isinstance(failed, Failed)
    assert failed.error is HandshakeRefused
    assert "dtype='int8'" in failed.message
    assert "dtype='fp8_e4m3'" in failed.message
    sender.close(WAIT_S)
    receiver.close(WAIT_S)
    source.close()
    target.close()


def fill(kv: KvCache) -> None:
    """Tokens in every slot of every layer."""
    layout, generator = kv.layout, torch.Generator().manual_seed(1)
    slots = torch.arange(kv.num_blocks * layout.block_size)
    for layer in range(layout.num_layers):
        k, v = torch.randn(2, len(slots), layout.num_kv_heads, layout.head_dim, generator=generator)
        store_kv(k, v, kv.pool, layer, slots // layout.block_size, slots % layout.block_size, kv.scales)
