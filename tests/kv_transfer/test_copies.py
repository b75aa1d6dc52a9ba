"""Full blocks whose digests are known, over shared memory: one frame says of all of them where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kv_links import Adopted, BlockRefused, Done, Failed, Lost, Pieces, columns, same_bytes
from kv_wire import Wire, open_wire

from engine.errors import DigestMismatch, ProtocolError, SlotMismatch, TransferError
from kv_transfer.block_records import COPY
from kv_transfer.frames import Blocks, Copies, Frame, Welcome, encode

BLOCK_BYTES = 32 * 1024


@pytest.fixture(params=["shm", "adopt"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with open_wire(request.param) as wire:
        yield wire


def watch(wire: Wire, change: Callable[[Copies], Copies] = lambda frame: frame) -> list[Frame]:
    """Frames that bring blocks, as they come; what becomes of each."""
    frames: list[Frame] = []

    def forge(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, (Blocks, Copies)):
            frames.append(frame)
        return [encode(change(frame)) if isinstance(frame, Copies) else encoded]

    wire.proxy.to_receiver = forge
    return frames


def send(wire: Wire) -> None:
    wire.begin("t", [5, 6, 7])
    wire.prefill.sender.digest([(n, 0) for n in range(3)])
    wire.prefill.sender.send("t", [columns(range(3))], finish=True)


def with_record(at: int, **fields: Any) -> Callable[[Copies], Copies]:
    def change(frame: Copies) -> Copies:
        records = np.frombuffer(frame.records, dtype=COPY).copy()
        for name, value in fields.items():
            records[name][at] = value
        return replace(frame, records=records.tobytes())

    return change


def test_all_of_them_leave_in_one_frame(wire: Wire) -> None:
    frames = watch(wire)
    send(wire)

    assert isinstance(wire.prefill.listener.next(), Done)
    assert wire.arrived([5, 6, 7])
    assert [type(frame) for frame in frames] == [Copies]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (with_record(1, digest=bytes(16)), DigestMismatch),
        (with_record(1, source=9), DigestMismatch),
        (with_record(1, generation=2), SlotMismatch),
        (with_record(1, slot=5), SlotMismatch),
    ],
    ids=["digest", "source", "generation", "slot"],
)
def test_a_wrong_one_is_refused_and_its_neighbours_are_adopted(
    wire: Wire, change: Callable[[Copies], Copies], error: type[TransferError]
) -> None:
    watch(wire, change)
    send(wire)

    events = [wire.decode.listener.next() for _ in range(3)]

    assert events == [
        Adopted("t", 0, BLOCK_BYTES, wire.transport),
        Adopted("t", 2, BLOCK_BYTES, wire.transport),
        BlockRefused("t", 1, error),
    ]
    assert wire.prefill.listener.next() == Failed("t", error)
    assert same_bytes(wire.prefill.pool, 0, wire.decode.pool, 5)
    if error is DigestMismatch:
        assert wire.prefill.listener.doubted.get(timeout=20.0).source_block == 1


@pytest.mark.parametrize(
    "change",
    [with_record(2, source=1000), lambda frame: replace(frame, length=BLOCK_BYTES // 2)],
    ids=["pool", "length"],
)
def test_what_is_impossible_ends_the_link(wire: Wire, change: Callable[[Copies], Copies]) -> None:
    watch(wire, change)
    send(wire)

    assert wire.decode.listener.next() == Lost(frozenset({"t"}), ProtocolError)
    assert not any(map(any, (wire.decode.pool.block(slot) for slot in (5, 6, 7))))


def test_a_receiver_that_does_not_know_them_gets_none(wire: Wire) -> None:
    frames = watch(wire)
    wire.proxy.forge = lambda frame: replace(frame, capabilities=()) if isinstance(frame, Welcome) else frame
    send(wire)

    assert isinstance(wire.prefill.listener.next(), Done)
    assert wire.arrived([5, 6, 7])
    assert [type(frame) for frame in frames] == [Blocks]
