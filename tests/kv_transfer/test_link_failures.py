"""How transfers end when a peer, the link, a lease or a request does: the same claims over `shm` and `tcp`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from kv_links import (
    SETTINGS,
    WAIT_S,
    Adopted,
    Done,
    Failed,
    Gate,
    Lost,
    Pieces,
    Quiet,
    decode_side,
    fault_proxy,
    in_time,
    only,
    outgoing,
    pass_on,
    prefill_side,
    ticket,
)
from kv_wire import Wire, with_entry

from engine.errors import (
    DeadlineExceeded,
    LinkClosed,
    ProtocolError,
    RequestCancelled,
    SlotMismatch,
    StaleTicket,
)
from kv_transfer import receiver_link
from kv_transfer.frames import Abort, Ack, Blocks, Finish, Frame, Renew, encode

BLOCK_BYTES = 32 * 1024


def test_a_lost_answer_ends_the_link_by_its_deadline() -> None:
    hasty = replace(SETTINGS, progress_timeout_s=0.2)
    with decode_side() as decode, prefill_side(hasty) as prefill:
        with fault_proxy(decode.receiver.endpoint(), "shm") as proxy:
            proxy.to_sender = lambda frame, encoded, payload: [] if isinstance(frame, Ack) else [encoded]
            expected = decode.expect("t", [5])
            prefill.sender.open("t", ticket("t", proxy.endpoint, expected), in_time())
            prefill.sender.send("t", outgoing([0]))

            assert prefill.listener.next() == Failed("t", LinkClosed)
            assert decode.listener.next() == Adopted("t", 0, BLOCK_BYTES, "shm")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_receiver_that_stops_reading_is_given_up_by_the_deadline(transport: str) -> None:
    hasty = replace(SETTINGS, progress_timeout_s=0.2)
    gate = Gate()

    def hold(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        gate.hold()
        return []

    with decode_side() as decode, prefill_side(hasty) as prefill:
        with fault_proxy(decode.receiver.endpoint(), transport) as proxy:
            proxy.to_receiver = hold
            expected = decode.expect("t", list(range(20)))
            prefill.sender.open("t", ticket("t", proxy.endpoint, expected), in_time())
            prefill.sender.send("t", outgoing(range(20)))

            assert prefill.listener.next() == Failed("t", LinkClosed)
            gate.open()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_receiver_that_stops_reading_delays_nobody_elses_blocks(transport: str) -> None:
    gate = Gate()

    def hold(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        gate.hold()
        return [encoded + payload]

    small = replace(SETTINGS, max_unacked_bytes=4 * BLOCK_BYTES)
    with decode_side() as slow, decode_side() as quick, prefill_side(small) as prefill:
        with fault_proxy(slow.receiver.endpoint(), transport) as proxy:
            proxy.to_receiver = hold
            begun = ticket("slow", proxy.endpoint, slow.expect("slow", list(range(20))))
            prefill.sender.open("slow", begun, in_time())
            prefill.sender.send("slow", outgoing(range(20)))
            gate.wait_until_reached()
            endpoint = only(quick.receiver.endpoint(), transport)
            prefill.sender.open("quick", ticket("quick", endpoint, quick.expect("quick", list(range(20)))), in_time())
            prefill.sender.send("quick", outgoing(range(20)))
            prefill.sender.finish("quick")

            ended = prefill.listener.next()
            assert isinstance(ended, Done)
            assert ended.request_id == "quick"
            gate.open()
            prefill.sender.finish("slow")
            assert isinstance(prefill.listener.next(), Done)


@pytest.mark.parametrize(
    ("wire", "cut"),
    [
        ("shm", "before the frame"),
        ("shm", "inside the frame"),
        ("tcp", "before the frame"),
        ("tcp", "inside the frame"),
        ("tcp", "inside the payload"),
        ("tcp", "between two payloads"),
    ],
    indirect=["wire"],
)
def test_a_sender_that_dies_in_the_middle_loses_its_tickets_and_no_others(wire: Wire, cut: str) -> None:
    def die(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if not isinstance(frame, Blocks) or frame.entries[0].ordinal != 1:
            return [encoded + payload]
        kept = {
            "before the frame": b"",
            "inside the frame": encoded[:20],
            "inside the payload": encoded + payload[:9999],
            "between two payloads": encoded + payload[:BLOCK_BYTES],
        }
        return [kept[cut], None]

    wire.decode.expect("somebody else's", [20])
    wire.proxy.to_receiver = die
    wire.begin("t", [5, 6, 7])
    wire.send("t", [0])
    assert wire.decode.listener.next() == Adopted("t", 0, BLOCK_BYTES, wire.transport)
    wire.send("t", [1, 2])

    assert wire.decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
    assert wire.decode.table.missing("t") == (1, 2)
    assert wire.decode.table.close("t") == frozenset()
    assert wire.prefill.listener.next() == Failed("t", LinkClosed)
    assert wire.decode.table.missing("somebody else's") == (0,)


def test_a_sender_that_dies_after_its_last_block_loses_nothing(wire: Wire) -> None:
    wire.begin("t", [5])
    wire.send("t", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)

    wire.prefill.sender.close(WAIT_S)
    wire.decode.receiver.close(WAIT_S)

    assert wire.decode.listener.events.empty()


def test_a_receiver_that_dies_fails_its_transfers_and_the_next_one_opens_a_new_link(wire: Wire) -> None:
    wire.begin("t", [5, 6])
    wire.send("t", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)
    wire.proxy.to_sender = lambda frame, encoded, payload: [None]
    wire.send("t", [1])

    assert wire.prefill.listener.next() == Failed("t", LinkClosed)

    wire.proxy.to_sender = pass_on
    wire.begin("again", [7])
    wire.send("again", [0])
    wire.prefill.sender.finish("again")
    assert isinstance(wire.prefill.listener.next(), Done)
    assert wire.prefill.sender.stats().links_connected == {wire.transport: 2}


def test_a_receiver_that_is_gone_fails_the_transfer_with_a_typed_error(wire: Wire) -> None:
    expected = wire.decode.expect("t", [5])
    endpoint = only(wire.decode.receiver.endpoint(), wire.transport)
    wire.proxy.close()
    wire.decode.receiver.close(WAIT_S)

    wire.prefill.sender.open("t", ticket("t", endpoint, expected), in_time())

    assert wire.prefill.listener.next() == Failed("t", LinkClosed)
    assert wire.prefill.sender.stats().transfers_failed == {"LinkClosed": 1}


def test_a_lease_that_is_renewed_by_nobody_ends_the_ticket_and_the_transfer_hears_of_it(wire: Wire) -> None:
    wire.begin("t", [5, 6])
    wire.send("t", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)
    expiry = wire.decode.table.next_expiry()
    assert expiry is not None

    assert wire.decode.table.expire(expiry) == ["t"]
    assert wire.decode.table.close("t") == frozenset()
    wire.send("t", [1])

    assert wire.prefill.listener.next() == Failed("t", StaleTicket)
    assert wire.untouched(6)


def test_leases_are_renewed_while_the_request_waits_in_the_prefill_queue(wire: Wire) -> None:
    renewed = threading.Event()
    frames: list[Renew] = []

    def note(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Renew):
            frames.append(frame)
            if len(frames) == 3:
                renewed.set()
        return [encoded + payload]

    wire.proxy.to_receiver = note
    expected = wire.decode.expect("t", [5])
    short = replace(ticket("t", wire.proxy.endpoint, expected), lease_s=0.1)
    wire.prefill.sender.open("t", short, in_time())

    assert renewed.wait(WAIT_S)
    assert frames == [Renew(ticket_ids=("t",))] * len(frames)


def test_a_closed_ticket_is_reported_to_its_sender_at_the_next_renewal(wire: Wire) -> None:
    wire.begin("first", [6])
    wire.send("first", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)
    expected = wire.decode.expect("t", [5])
    wire.decode.table.close("t")

    wire.prefill.sender.open("t", ticket("t", wire.proxy.endpoint, expected), in_time())

    assert wire.prefill.listener.next() == Failed("t", StaleTicket)


def test_an_aborted_transfer_is_reported_on_both_sides(wire: Wire) -> None:
    wire.begin("t", [5, 6])
    wire.send("t", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)

    wire.prefill.sender.abort("t")
    wire.prefill.sender.abort("t")

    assert wire.prefill.listener.next() == Failed("t", RequestCancelled)
    assert wire.decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
    assert wire.prefill.listener.events.empty()


def test_a_transfer_that_finishes_short_is_reported_on_both_sides(wire: Wire) -> None:
    wire.begin("t", [5, 6])
    wire.send("t", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)

    wire.prefill.sender.finish("t")

    assert wire.prefill.listener.next() == Failed("t", SlotMismatch)
    assert wire.decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)


def test_a_deadline_that_passes_ends_the_transfer_without_traffic(wire: Wire) -> None:
    expected = wire.decode.expect("t", [5])

    wire.prefill.sender.open("t", ticket("t", wire.proxy.endpoint, expected), deadline=time.monotonic() + 0.05)

    assert wire.prefill.listener.next() == Failed("t", DeadlineExceeded)


def test_a_late_block_leaves_a_slot_alone_that_has_a_new_ticket(wire: Wire) -> None:
    gate = Gate()

    def hold_block(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Blocks) and frame.ticket_id == "old":
            gate.hold()
        return [encoded + payload]

    wire.proxy.to_receiver = hold_block
    wire.begin("old", [5])
    wire.send("old", [0])
    gate.wait_until_reached()
    assert wire.decode.table.close("old") == frozenset()
    wire.begin("new", [5], generation=2)
    wire.send("new", [0], first_source=8)
    wire.prefill.sender.finish("new")
    gate.open()

    assert {wire.prefill.listener.next().request_id for _ in range(2)} == {"old", "new"}
    assert wire.decode.listener.next() == Adopted("new", 0, BLOCK_BYTES, wire.transport)
    assert wire.arrived([5], first_source=8)
    assert wire.decode.receiver.stats().blocks_refused == {"StaleTicket": 1}


def test_a_slot_that_is_written_when_its_ticket_ends_is_busy_until_reported_quiet(wire: Wire) -> None:
    gate = Gate()
    wire.decode.pool.before_block = lambda block: gate.hold()
    wire.begin("old", [5])
    wire.send("old", [0])
    gate.wait_until_reached()

    assert wire.decode.table.close("old") == {5}
    with pytest.raises(SlotMismatch, match="not quiet"):
        wire.decode.expect("new", [5], generation=2)
    gate.open()

    assert wire.decode.listener.next() == Quiet("old", frozenset([5]))
    assert wire.prefill.listener.next() == Failed("old", StaleTicket)
    wire.decode.pool.before_block = lambda block: None
    wire.begin("new", [5], generation=2)
    wire.send("new", [0], first_source=8)
    wire.prefill.sender.finish("new")
    assert isinstance(wire.prefill.listener.next(), Done)
    assert wire.arrived([5], first_source=8)


def test_closing_the_sender_ends_its_transfers_before_it_returns(wire: Wire) -> None:
    wire.begin("t", [5])
    wire.send("t", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)

    wire.prefill.sender.close(WAIT_S)

    assert wire.prefill.listener.events.get_nowait() == Failed("t", LinkClosed)
    with pytest.raises(LinkClosed):
        wire.begin("other", [6])


def test_closing_the_receiver_leaves_no_writer(wire: Wire) -> None:
    wire.begin("t", [5, 6])
    wire.send("t", [0])
    assert isinstance(wire.decode.listener.next(), Adopted)

    wire.decode.receiver.close(WAIT_S)

    assert wire.decode.listener.events.get_nowait() == Lost(frozenset(["t"]), LinkClosed)
    assert wire.decode.receiver.stats().links_open == 0
    assert wire.decode.table.close("t") == frozenset()


def test_a_frame_that_only_a_receiver_may_send_ends_the_link(wire: Wire) -> None:
    forged = encode(Ack(ticket_id="t", ordinals=(0,)))
    wire.proxy.to_receiver = lambda frame, encoded, payload: [forged]
    wire.begin("t", [5])

    assert wire.prefill.listener.next() == Failed("t", LinkClosed)
    assert wire.decode.receiver.stats().links_lost == {"ProtocolError": 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: replace(frame, length=frame.length - 1),
        lambda frame: replace(frame, length=2**32 - 1),
        lambda frame: with_entry(frame, offset=32 * BLOCK_BYTES if frame.entries[0].offset is not None else 0),
        lambda frame: with_entry(frame, offset=2**63),
        lambda frame: with_entry(frame, offset=1),
    ],
    ids=["short", "huge", "behind the pool", "far away", "between blocks"],
)
def test_a_block_frame_that_is_impossible_ends_the_link(wire: Wire, change: Callable[[Blocks], Blocks]) -> None:
    wire.change_blocks(change)
    wire.begin("t", [5])
    wire.send("t", [0])

    assert wire.decode.listener.next() == Lost(frozenset(["t"]), ProtocolError)
    assert wire.prefill.listener.next() == Failed("t", LinkClosed)
    assert wire.untouched(5)
    assert wire.decode.table.close("t") == frozenset()


def test_frames_about_tickets_that_never_were_are_counted_and_harmless(wire: Wire) -> None:
    def chatter(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Blocks):
            noise = encode(Finish(ticket_id="ghost", count=1)) + encode(Abort(ticket_id="ghost"))
            return [noise + encode(Renew(ticket_ids=("ghost",))) + encoded + payload]
        return [encoded]

    wire.proxy.to_receiver = chatter
    wire.begin("t", [5])
    wire.send("t", [0])
    wire.prefill.sender.finish("t")

    assert isinstance(wire.prefill.listener.next(), Done)
    assert wire.decode.receiver.stats().frames_ignored == 3
    assert wire.prefill.sender.stats().answers_ignored == 1


def test_a_group_of_more_bytes_than_allowed_ends_the_link(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_link, "MAX_GROUP_BYTES", 2 * BLOCK_BYTES)
    wire.begin("t", [5, 6, 7])
    wire.send("t", [0, 1])
    assert isinstance(wire.decode.listener.next(), Adopted)
    assert isinstance(wire.decode.listener.next(), Adopted)
    wire.begin("large", [8, 9, 10])
    wire.send("large", [0, 1, 2])

    assert wire.decode.listener.next() == Lost(frozenset(["t", "large"]), ProtocolError)
    assert wire.untouched(8)
