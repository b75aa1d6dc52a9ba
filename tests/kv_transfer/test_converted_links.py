"""Links between workers whose blocks are laid out otherwise: the sender makes the receiver's blocks of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kv_links import (
    LAYOUT,
    SETTINGS,
    Done,
    Failed,
    MemoryPool,
    PrefillSide,
    block_hash,
    decode_side,
    in_time,
    prefill_side,
    ticket,
)

from engine.errors import HandshakeRefused, InternalError
from engine.kv_layout import KvLayout
from kv_transfer.conversion import convert, copies, sources_of
from kv_transfer.link import LinkSettings
from kv_transfer.sender import OutgoingBlock

NUM_TOKENS = 60


def sent_blocks(source: KvLayout, target: KvLayout) -> list[OutgoingBlock]:
    """Of a sequence whose block n is the sender's block n."""
    blocks = []
    for ordinal in range(-(-NUM_TOKENS // target.block_size)):
        first, *more = sources_of(source, target, ordinal, NUM_TOKENS)
        blocks.append(OutgoingBlock(ordinal, first, block_hash(ordinal), tuple(more)))
    return blocks


def begin(prefill: PrefillSide, endpoint: bytes, target: KvLayout, slots: dict[int, int]) -> None:
    prefill.sender.open("t", replace(ticket("t", endpoint, slots), layout=target), in_time())


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, max_unacked_bytes=1)], ids=["groups", "one by one"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (replace(LAYOUT, block_size=16), replace(LAYOUT, block_size=8)),
        (replace(LAYOUT, block_size=8), replace(LAYOUT, block_size=32)),
        (replace(LAYOUT, block_size=32), replace(LAYOUT, block_size=16)),
        (LAYOUT, LAYOUT.shard(1, 2)),
        (replace(LAYOUT, block_size=16), replace(LAYOUT, block_size=8).shard(0, 2)),
        (replace(LAYOUT, dtype="int8"), replace(LAYOUT, dtype="int8").shard(1, 2)),
    ],
)
def test_the_receiver_adopts_the_same_kv_in_its_own_layout(
    source: KvLayout, target: KvLayout, settings: LinkSettings
) -> None:
    with decode_side(pool=MemoryPool(target)) as decode, prefill_side(settings, MemoryPool(source)) as prefill:
        blocks = sent_blocks(source, target)
        slots = decode.expect("t", list(range(len(blocks))))
        begin(prefill, decode.receiver.endpoint(), target, slots)
        prefill.sender.send("t", blocks)
        prefill.sender.finish("t")

        done = prefill.listener.next()

        assert isinstance(done, Done)
        assert (done.stats.bytes, done.stats.transport) == (len(blocks) * target.block_bytes, "tcp")
        assert prefill.sender.stats().bytes_acked == done.stats.bytes
        expected = {n: memoryview(bytearray(target.block_bytes)) for n in slots}
        here = {n: prefill.pool.block(n) for n in range(prefill.pool.num_blocks)}
        convert(copies(source, target, slots, num_tokens=64), source, here, target, expected)
        assert {n: bytes(decode.pool.block(slot)) for n, slot in slots.items()} == expected


def test_shared_memory_is_given_up_where_layouts_differ() -> None:
    target = replace(LAYOUT, block_size=16)
    with decode_side(pool=MemoryPool(target)) as decode, prefill_side() as prefill:
        begin(prefill, decode.receiver.endpoint(), target, decode.expect("t", [5]))
        prefill.sender.send("t", [OutgoingBlock(0, 0, block_hash(0), (1,))])
        prefill.sender.finish("t")

        assert isinstance(prefill.listener.next(), Done)
        assert prefill.sender.stats().links_connected == {"tcp": 1}
        assert prefill.sender.stats().fallbacks == 1
        assert decode.receiver.stats().links_refused == {"transport": 1}


def test_a_layout_that_cannot_be_made_fails_the_transfer_with_the_reason() -> None:
    target = replace(LAYOUT, block_size=64)
    with decode_side(pool=MemoryPool(target)) as decode, prefill_side() as prefill:
        begin(prefill, decode.receiver.endpoint(), target, decode.expect("t", [5]))

        failed = prefill.listener.next()

        assert failed == Failed("t", HandshakeRefused)
        assert isinstance(failed, Failed)
        assert "block_size is 8 and 64: only 8, 16, 32" in failed.message


def test_a_piece_that_is_no_block_of_the_pool_is_refused() -> None:
    with prefill_side() as prefill, pytest.raises(InternalError, match="no block of this pool"):
        prefill.sender.send("t", [OutgoingBlock(0, 0, block_hash(0), (prefill.pool.num_blocks,))])
