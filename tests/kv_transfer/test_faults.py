"""Each kind of injected fault really happens, and ends as `kv_transfer` says: typed, counted, and recomputable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kv_links import (
    SETTINGS,
    WAIT_S,
    Adopted,
    BlockRefused,
    Done,
    Failed,
    Lost,
    MemoryPool,
)
from kv_wire import Wire, open_wire

from engine.errors import ConfigError, DigestMismatch, LinkClosed, ProtocolError
from kv_transfer.faults import Direction, Fault, FaultInjector, FaultKind, FaultPlan, flipped
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.link import LinkSettings

BLOCK_BYTES = 32 * 1024
TO_RECEIVER, TO_SENDER = Direction.TO_RECEIVER, Direction.TO_SENDER
HELLO, RENEW, FIRST_BLOCK, SECOND_BLOCK = range(4)
"""Frames to the receiver, if the blocks are given one by one."""
WELCOME, FIRST_ANSWER = range(2)
"""Frames to the sender."""
HASTY = replace(SETTINGS, handshake_timeout_s=0.2, progress_timeout_s=0.2)


class WatchedInjector(FaultInjector):
    """Says when a fault begins."""

    def __init__(self, plan: FaultPlan, source: MemoryPool, seconds: float) -> None:
        super().__init__(plan, source=source, delay_s=seconds, freeze_s=seconds)
        self.begun = threading.Event()

    def count(self, kind: FaultKind) -> None:
        super().count(kind)
        self.begun.set()


@contextmanager
def faulty(
    transport: str,
    direction: Direction,
    frame: int,
    fault: Fault,
    settings: LinkSettings = SETTINGS,
    seconds: float = WAIT_S,
) -> Iterator[tuple[Wire, WatchedInjector]]:
    """One fault at one frame; delays and freezes last `seconds`, which a test only waits for if it fails."""
    source = MemoryPool()
    injector = WatchedInjector(FaultPlan(at={(direction, frame): fault}), source, seconds)
    failing = replace(settings, connection=injector.connection(direction))
    ends = (failing, settings) if direction is TO_RECEIVER else (settings, failing)
    with open_wire(transport, *ends, source=source) as wire:
        yield wire, injector
        assert injector.injected() == {fault.kind: 1}


transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@transports
def test_a_block_that_is_dropped_costs_the_link_and_is_recomputed(transport: str) -> None:
    drop = Fault(kind=FaultKind.DROP)
    with faulty(transport, TO_RECEIVER, FIRST_BLOCK, drop, HASTY) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        assert wire.prefill.listener.next() == Failed("t", LinkClosed)
        assert wire.decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
        assert wire.decode.table.missing("t") == (0,)
        assert wire.prefill.sender.stats().links_lost == {"LinkClosed": 1}


@transports
def test_a_dropped_answer_costs_the_link_but_not_the_block(transport: str) -> None:
    drop = Fault(kind=FaultKind.DROP)
    with faulty(transport, TO_SENDER, FIRST_ANSWER, drop, HASTY) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        assert wire.prefill.listener.next() == Failed("t", LinkClosed)
        assert wire.decode.listener.next() == Adopted("t", 0, BLOCK_BYTES, transport)
        assert wire.arrived([5])


@transports
def test_a_delay_within_the_deadline_is_waited_for(transport: str) -> None:
    delay = Fault(kind=FaultKind.DELAY)
    with faulty(transport, TO_RECEIVER, FIRST_BLOCK, delay, seconds=0.05) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])
        wire.prefill.sender.finish("t")

        assert isinstance(wire.prefill.listener.next(), Done)
        assert wire.arrived([5])


@transports
def test_an_answer_that_is_delayed_beyond_the_deadline_costs_the_link(transport: str) -> None:
    delay = Fault(kind=FaultKind.DELAY)
    with faulty(transport, TO_SENDER, FIRST_ANSWER, delay, HASTY) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        assert wire.prefill.listener.next() == Failed("t", LinkClosed)
        assert wire.decode.table.missing("t") == ()


@transports
def test_a_duplicated_block_is_adopted_once_and_counted(transport: str) -> None:
    with faulty(transport, TO_RECEIVER, FIRST_BLOCK, Fault(kind=FaultKind.DUPLICATE)) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])
        wire.prefill.sender.finish("t")

        assert isinstance(wire.prefill.listener.next(), Done)
        assert wire.decode.listener.next() == Adopted("t", 0, BLOCK_BYTES, transport)
        wire.decode.receiver.close(WAIT_S)
        assert wire.decode.listener.events.empty()
        assert wire.decode.receiver.stats().blocks_duplicate == 1


@transports
def test_blocks_that_change_places_are_adopted_in_the_order_in_which_they_come(transport: str) -> None:
    before = ["HELLO", "RENEW first", "RENEW second"]
    with faulty(transport, TO_RECEIVER, len(before), Fault(kind=FaultKind.REORDER)) as (wire, _):
        wire.begin("first", [5], direct=True)
        wire.begin("second", [6], direct=True)
        wire.send("first", [0])
        wire.send("second", [0])

        adopted = [wire.decode.listener.next() for _ in range(2)]
        assert adopted == [Adopted(ticket_id, 0, BLOCK_BYTES, transport) for ticket_id in ("second", "first")]
        assert wire.arrived([5])
        assert wire.arrived([6])


@transports
def test_a_block_without_its_end_costs_the_link_by_the_deadline(transport: str) -> None:
    with faulty(transport, TO_RECEIVER, FIRST_BLOCK, Fault(kind=FaultKind.TRUNCATE), HASTY) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        assert wire.prefill.listener.next() == Failed("t", LinkClosed)
        assert wire.decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
        assert wire.decode.table.missing("t") == (0,)


@transports
def test_a_bit_that_flips_in_a_payload_is_refused(transport: str) -> None:
    with faulty(transport, TO_RECEIVER, FIRST_BLOCK, Fault(kind=FaultKind.FLIP, in_payload=True)) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        assert wire.decode.listener.next() == BlockRefused("t", 0, DigestMismatch)
        assert wire.prefill.listener.next() == Failed("t", DigestMismatch)
        assert wire.decode.table.missing("t") == (0,)
        assert wire.decode.receiver.stats().blocks_refused == {"DigestMismatch": 1}


@transports
def test_a_bit_that_flips_in_the_head_of_a_frame_costs_the_link(transport: str) -> None:
    flip = Fault(kind=FaultKind.FLIP, position=0.0)  # the length: the stream loses its place
    with faulty(transport, TO_RECEIVER, FIRST_BLOCK, flip, HASTY) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        lost = wire.decode.listener.next()
        assert isinstance(lost, Lost)
        assert lost.error in (LinkClosed, ProtocolError)
        assert wire.prefill.listener.next() == Failed("t", LinkClosed)
        assert wire.decode.table.missing("t") == (0,)


@transports
def test_a_block_that_is_replayed_for_a_slot_in_new_hands_is_refused(transport: str) -> None:
    before = ["HELLO", "RENEW old", "BLOCK old", "FINISH old", "RENEW new"]
    replay = Fault(kind=FaultKind.REPLAY, position=2.5 / len(before))
    with faulty(transport, TO_RECEIVER, len(before), replay) as (wire, _):
        wire.begin("old", [5], direct=True)
        wire.send("old", [0])
        wire.prefill.sender.finish("old")
        assert isinstance(wire.prefill.listener.next(), Done)
        assert isinstance(wire.decode.listener.next(), Adopted)
        wire.decode.table.close("old")

        wire.begin("new", [5], generation=2, direct=True)
        wire.send("new", [0], first_source=8)
        wire.prefill.sender.finish("new")

        assert isinstance(wire.prefill.listener.next(), Done)
        assert wire.arrived([5], first_source=8)
        assert wire.decode.receiver.stats().blocks_refused == {"StaleTicket": 1}


@transports
def test_a_sender_that_freezes_costs_no_more_than_the_lease(transport: str) -> None:
    with faulty(transport, TO_RECEIVER, FIRST_BLOCK, Fault(kind=FaultKind.FREEZE)) as (wire, injector):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])
        assert injector.begun.wait(WAIT_S)
        expiry = wire.decode.table.next_expiry()
        assert expiry is not None

        assert wire.decode.table.expire(expiry + wire.decode.table.lease_s) == ["t"]
        assert wire.decode.table.close("t") == frozenset()
        wire.prefill.sender.close(WAIT_S)
        assert wire.prefill.listener.next() == Failed("t", LinkClosed)
        assert wire.untouched(5)


@transports
def test_a_receiver_that_freezes_is_given_up_by_the_deadline(transport: str) -> None:
    with faulty(transport, TO_SENDER, FIRST_ANSWER, Fault(kind=FaultKind.FREEZE), HASTY) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        assert wire.prefill.listener.next() == Failed("t", LinkClosed)


@transports
@pytest.mark.parametrize("frame", [HELLO, RENEW, FIRST_BLOCK, SECOND_BLOCK])
def test_a_sender_that_dies_at_any_frame_loses_what_was_not_adopted(transport: str, frame: int) -> None:
    with faulty(transport, TO_RECEIVER, frame, Fault(kind=FaultKind.KILL)) as (wire, _):
        wire.begin("t", [5, 6], direct=True)
        for ordinal in range(frame - FIRST_BLOCK):
            wire.send("t", [ordinal])
            assert wire.decode.listener.next() == Adopted("t", ordinal, BLOCK_BYTES, transport)
        wire.send("t", [0, 1])

        assert wire.prefill.listener.next() == Failed("t", LinkClosed)
        wire.decode.receiver.close(WAIT_S)
        assert wire.decode.table.missing("t") == tuple(range(max(0, frame - FIRST_BLOCK), 2))
        assert wire.decode.table.close("t") == frozenset()


@transports
@pytest.mark.parametrize("frame", [WELCOME, FIRST_ANSWER])
def test_a_receiver_that_dies_at_any_frame_fails_the_transfer(transport: str, frame: int) -> None:
    with faulty(transport, TO_SENDER, frame, Fault(kind=FaultKind.KILL)) as (wire, _):
        wire.begin("t", [5], direct=True)
        wire.send("t", [0])

        assert wire.prefill.listener.next() == Failed("t", LinkClosed)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_over_gloo_a_transfer_ends_whatever_happens_to_a_frame_and_no_wrong_bytes_are_adopted(kind: FaultKind) -> None:
    before = ["HELLO", "MEET", "RENEW"]
    fault, settings = Fault(kind=kind, in_payload=True), replace(SETTINGS, progress_timeout_s=0.3)
    with faulty("gloo", TO_RECEIVER, len(before), fault, settings, seconds=0.1) as (wire, _):
        sources = [bytes(wire.prefill.pool.block(ordinal)) for ordinal in range(2)]
        wire.begin("t", [5, 6], direct=True)
        wire.send("t", [0])
        wire.send("t", [1])
        wire.prefill.sender.finish("t")

        ended = wire.prefill.listener.next()
        wire.decode.receiver.close(WAIT_S)

        missing = wire.decode.table.missing("t")
        assert isinstance(ended, Failed) or not missing
        assert wire.decode.table.close("t") == frozenset()
        adopted = [ordinal for ordinal in range(2) if ordinal not in missing]
        assert all(bytes(wire.decode.pool.block(5 + ordinal)) == sources[ordinal] for ordinal in adopted)
        assert kind is not FaultKind.FLIP or missing


def test_a_plan_is_a_function_of_its_seed() -> None:
    def faults(seed: int) -> list[Fault | None]:
        plan = FaultPlan(rate=0.5, seed=seed)
        return [
            plan.fault(link, direction, frame) for link in range(9) for direction in Direction for frame in range(9)
        ]

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)
    injected = [fault for fault in faults(1) if fault is not None]
    assert {fault.kind for fault in injected} == set(FaultKind)
    assert 0.35 < len(injected) / len(faults(1)) < 0.65


@pytest.mark.parametrize("position", [0.0, 0.4, 0.999])
def test_a_flip_changes_one_bit(position: float) -> None:
    data = bytes(range(100))

    changed = flipped(data, position)

    assert (int.from_bytes(data) ^ int.from_bytes(changed)).bit_count() == 1


def test_nothing_is_injected_unless_asked_for() -> None:
    assert LinkSettings().connection is FrameSocket
    assert FaultPlan().fault(0, TO_RECEIVER, 0) is None


def test_a_plan_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate"):
        FaultPlan(rate=1.5)
    with pytest.raises(ConfigError, match="position"):
        Fault(kind=FaultKind.FLIP, position=1.0)
