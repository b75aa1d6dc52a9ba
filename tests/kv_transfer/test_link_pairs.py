"""Two processes that do not fit, or not as they are: each hand-over ends as designed, and nothing is left of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kv_links import LAYOUT, SETTINGS, DecodeSide, MemoryPool, decode_side
from kv_sender_process import FILL_SEED
from link_process import LinkProcess, sender_process

from engine.cluster_key import ClusterKey
from engine.kv_layout import KvLayout
from kv_transfer.conversion import convert, copies
from kv_transfer.link import LinkSettings

pytestmark = pytest.mark.processes
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
SLOTS = [9, 2, 30, 4]


@contextmanager
def pair(
    *, sends: str = "shm,tcp", key: bytes = b"", layout: KvLayout = LAYOUT, takes: LinkSettings = SETTINGS
) -> Iterator[tuple[DecodeSide, LinkProcess]]:
    """A receiver of blocks of `LAYOUT` here, and a sender in another process. Nothing of their links may be left."""
    with sender_process("small", sends, key.hex(), json.dumps(layout.to_wire())) as sender:
        sender.tell("left")
        at_rest = sender.says()
        with decode_side(takes) as decode:
            yield decode, sender
            decode.table.close("t")
            assert decode.table.stats().ending == 0
        assert decode.receiver.stats().links_open == 0
        sender.tell("close_links")
        assert sender.says() == "closed"
        sender.tell("left")
        assert sender.says() == at_rest


def refused(decode: DecodeSide, sender: LinkProcess) -> str:
    """How the hand-over of four blocks ends; none may have come."""
    sender.begin_as_offered(decode, "t", SLOTS)
    ended = sender.says()
    assert decode.table.missing("t") == (0, 1, 2, 3)
    return ended


def test_a_pair_with_two_keys_ends_without_a_link() -> None:
    with pair(key=OTHER_KEY, takes=replace(SETTINGS, key=ClusterKey(KEY))) as (decode, sender):
        ended = refused(decode, sender)

        assert ended.startswith("failed t HandshakeRefused decode-0 refuses the link (authentication): ")
        assert "prefill-0 has another cluster key" in ended
    assert decode.receiver.refusals() == {"authentication": 1}  # counted when its thread ends


def test_a_pair_without_a_transport_in_common_does_not_connect() -> None:
    with pair(sends="shm", takes=replace(SETTINGS, transports=("tcp",))) as (decode, sender):
        ended = refused(decode, sender)

        assert ended.startswith("failed t HandshakeRefused no transport in common: our pool is on cpu")
        assert ended.endswith("leaves shm; the peer offers tcp")
        assert decode.receiver.refusals() == {}


def test_a_pair_of_two_kv_dtypes_ends_with_both_named() -> None:
    with pair(layout=replace(LAYOUT, dtype="bfloat16")) as (decode, sender):
        ended = refused(decode, sender)

        assert ended.startswith("failed t HandshakeRefused decode-0 asks for blocks that we cannot make: ")
        assert "dtype is 'bfloat16' and 'float32'" in ended
        assert decode.receiver.refusals() == {}


def test_a_pair_of_two_block_sizes_converts_and_every_token_has_its_kv() -> None:
    theirs = replace(LAYOUT, block_size=2 * LAYOUT.block_size)
    with pair(layout=theirs) as (decode, sender):
        sender.begin_as_offered(decode, "t", SLOTS)
        sender.tell("send_pieces", ticket_id="t", pieces=[[n, n // 2] for n in range(4)])
        sender.tell("finish", ticket_id="t")

        assert sender.says() == "done t"
        assert decode.receiver.stats().links_accepted == {"tcp": 1}
        source = MemoryPool(theirs)
        source.fill(FILL_SEED)
        expected = {n: memoryview(bytearray(LAYOUT.block_bytes)) for n in range(4)}
        convert(
            copies(theirs, LAYOUT, expected, num_tokens=32),
            theirs,
            {n: source.block(n) for n in range(2)},
            LAYOUT,
            expected,
        )
        assert [bytes(decode.pool.block(slot)) for slot in SLOTS] == [bytes(expected[n]) for n in range(4)]
        source.close()
