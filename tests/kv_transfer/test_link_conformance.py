"""What every transport must do: the same claims over `shm` and `tcp`, with real threads and a proxy that misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kv_links import (
    Adopted,
    BlockRefused,
    Done,
    Failed,
    Gate,
    Pieces,
    block_hash,
    in_time,
    same_bytes,
    ticket,
)
from kv_wire import Wire, with_entry

from engine.errors import (
    DigestMismatch,
    HashMismatch,
    RequestCancelled,
    SlotMismatch,
    StaleTicket,
    TransferError,
)
from kv_transfer.frames import Blocks, Frame

BLOCK_BYTES = 32 * 1024


def test_blocks_arrive_byte_for_byte_in_the_slots_of_the_ticket(wire: Wire) -> None:
    slots = [9, 3, 17, 1]
    wire.begin("t", slots, direct=True)
    wire.send("t", range(4))
    wire.prefill.sender.finish("t")

    done = wire.prefill.listener.next()

    assert isinstance(done, Done)
    assert (done.stats.blocks, done.stats.bytes, done.stats.transport) == (4, 4 * BLOCK_BYTES, wire.transport)
    assert wire.arrived(slots)
    adopted = [wire.decode.listener.next() for _ in slots]
    assert adopted == [Adopted("t", ordinal, BLOCK_BYTES, wire.transport) for ordinal in range(4)]
    stats = wire.decode.receiver.stats()
    assert stats.blocks_adopted == {wire.transport: 4}
    assert stats.bytes_adopted == {wire.transport: 4 * BLOCK_BYTES}
    received = wire.decode.receiver.transfer_stats("t")
    assert received is not None
    assert (received.blocks, received.transport) == (4, wire.transport)
    progress = wire.decode.table.progress("t")
    assert progress is not None
    assert progress.complete


def test_blocks_are_adopted_while_later_ones_are_still_computed(wire: Wire) -> None:
    wire.begin("t", [5, 6], direct=True)
    wire.send("t", [0])

    assert wire.decode.listener.next() == Adopted("t", 0, BLOCK_BYTES, wire.transport)

    wire.send("t", [1])
    assert wire.decode.listener.next() == Adopted("t", 1, BLOCK_BYTES, wire.transport)
    wire.prefill.sender.finish("t")
    assert isinstance(wire.prefill.listener.next(), Done)


def test_only_blocks_that_the_ticket_asks_for_travel(wire: Wire) -> None:
    expected = wire.decode.expect("t", [7, 8], first=2)
    wire.prefill.sender.open("t", ticket("t", wire.proxy.endpoint, expected), in_time())
    wire.send("t", range(6))
    wire.prefill.sender.finish("t")

    done = wire.prefill.listener.next()

    assert isinstance(done, Done)
    assert done.stats.blocks == 2
    assert same_bytes(wire.prefill.pool, 2, wire.decode.pool, 7)


def test_several_requests_share_one_link(wire: Wire) -> None:
    for number in range(4):
        wire.begin(f"t{number}", [4 * number, 4 * number + 1], direct=True)
    for number in range(4):
        wire.send(f"t{number}", [0, 1], first_source=2 * number)
        wire.prefill.sender.finish(f"t{number}")

    ended = [wire.prefill.listener.next() for _ in range(4)]

    assert {event.request_id for event in ended if isinstance(event, Done)} == {"t0", "t1", "t2", "t3"}
    assert all(wire.arrived([4 * number, 4 * number + 1], first_source=2 * number) for number in range(4))
    assert wire.prefill.sender.stats().links_connected == {wire.transport: 1}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda frame: with_entry(frame, digest=bytes(16)), DigestMismatch),
        (lambda frame: with_entry(frame, generation=2), SlotMismatch),
        (lambda frame: with_entry(frame, slot=30), SlotMismatch),
        (lambda frame: with_entry(frame, ordinal=7), SlotMismatch),
        (lambda frame: with_entry(frame, hash=block_hash(9)), HashMismatch),
        (lambda frame: replace(frame, incarnation="0"), StaleTicket),
    ],
    ids=["digest", "generation", "slot", "ordinal", "hash", "incarnation"],
)
def test_a_block_that_is_not_what_was_agreed_is_refused_and_the_link_lives_on(
    wire: Wire, change: Callable[[Blocks], Blocks], error: type[TransferError]
) -> None:
    wire.change_blocks(change)
    wire.begin("bad", [5])
    wire.begin("good", [6, 7])
    wire.send("bad", [0])

    refused = wire.decode.listener.next()
    assert isinstance(refused, BlockRefused)
    assert (refused.ticket_id, refused.error) == ("bad", error)
    if refused.ordinal == 0:
        assert wire.prefill.listener.next() == Failed("bad", error)
    else:  # its sender cannot know what became of a block that was answered under another name
        wire.prefill.sender.abort("bad")
        assert wire.prefill.listener.next() == Failed("bad", RequestCancelled)
    assert wire.decode.table.missing("bad") == (0,)

    wire.change_blocks(lambda frame: frame)
    wire.send("good", [0, 1])
    wire.prefill.sender.finish("good")
    assert isinstance(wire.prefill.listener.next(), Done)
    assert wire.arrived([6, 7])
    assert wire.prefill.sender.stats().links_connected == {wire.transport: 1}
    assert wire.decode.receiver.stats().blocks_refused == {error.__name__: 1}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda frame: with_entry(frame, 1, digest=bytes(16)), DigestMismatch),
        (lambda frame: with_entry(frame, 1, generation=2), SlotMismatch),
    ],
    ids=["after the copy", "before the copy"],
)
def test_a_wrong_block_of_a_group_is_refused_and_its_neighbours_are_adopted(
    wire: Wire, change: Callable[[Blocks], Blocks], error: type[TransferError]
) -> None:
    wire.change_blocks(change)
    wire.begin("t", [5, 6, 7])
    wire.send("t", [0, 1, 2])

    events = [wire.decode.listener.next() for _ in range(3)]

    assert events == [
        Adopted("t", 0, BLOCK_BYTES, wire.transport),
        Adopted("t", 2, BLOCK_BYTES, wire.transport),
        BlockRefused("t", 1, error),
    ]
    assert wire.prefill.listener.next() == Failed("t", error)
    assert wire.decode.table.missing("t") == (1,)
    assert same_bytes(wire.prefill.pool, 0, wire.decode.pool, 5)
    assert same_bytes(wire.prefill.pool, 2, wire.decode.pool, 7)


def test_a_flipped_bit_is_found_and_nothing_is_adopted(wire: Wire) -> None:
    def flip(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Blocks):
            if payload:
                return [encoded, payload[:1000], bytes([payload[1000] ^ 1]), payload[1001:]]
            wire.prefill.pool.block(0)[1000] ^= 1
        return [encoded]

    wire.proxy.to_receiver = flip
    wire.begin("t", [5])
    wire.send("t", [0])

    assert wire.decode.listener.next() == BlockRefused("t", 0, DigestMismatch)
    assert wire.prefill.listener.next() == Failed("t", DigestMismatch)
    assert wire.decode.table.missing("t") == (0,)
    assert wire.decode.receiver.stats().blocks_adopted == {}


@pytest.mark.parametrize("wire", ["shm"], indirect=True)  # over tcp the bytes travel with the frame
def test_a_source_block_that_is_reused_before_the_copy_is_never_adopted(wire: Wire) -> None:
    gate = Gate()

    def hold_block(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Blocks):
            gate.hold()
        return [encoded]

    wire.proxy.to_receiver = hold_block
    wire.begin("t", [5])
    wire.send("t", [0])
    gate.wait_until_reached()
    wire.prefill.sender.abort("t")
    assert wire.prefill.listener.next() == Failed("t", RequestCancelled)
    wire.prefill.pool.block(0)[:] = b"somebody else's tokens".ljust(BLOCK_BYTES, b".")
    gate.open()

    assert wire.decode.listener.next() == BlockRefused("t", 0, DigestMismatch)
    assert wire.decode.table.missing("t") == (0,)


@pytest.mark.parametrize("wire", ["shm", "tcp"], indirect=True)  # of gloo only frames pass here, and no payload
def test_a_frame_that_comes_twice_is_adopted_once(wire: Wire) -> None:
    def twice(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        copies = 2 if isinstance(frame, Blocks) else 1
        return [encoded + payload] * copies

    wire.proxy.to_receiver = twice
    wire.begin("t", [5, 6])
    wire.send("t", [0, 1])
    wire.prefill.sender.finish("t")

    assert isinstance(wire.prefill.listener.next(), Done)
    adopted = [wire.decode.listener.next() for _ in range(2)]
    assert adopted == [Adopted("t", ordinal, BLOCK_BYTES, wire.transport) for ordinal in (0, 1)]
    assert wire.arrived([5, 6])
    assert wire.decode.listener.events.empty()


def test_an_answer_that_comes_twice_counts_once(wire: Wire) -> None:
    def twice(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        return [encoded, encoded]

    wire.proxy.to_sender = twice
    wire.begin("t", [5])
    wire.send("t", [0])
    wire.prefill.sender.finish("t")

    done = wire.prefill.listener.next()
    assert isinstance(done, Done)
    assert done.stats.blocks == 1
    assert wire.prefill.sender.stats().blocks_acked == 1
