"""Links of `adopt`: blocks are lent over real sockets, between pools with windows. For what is copied over such a link
see `test_link_conformance`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from kv_links import (
    SETTINGS,
    Adopted,
    BlockRefused,
    Done,
    Failed,
    Lost,
    MemoryPool,
    Pieces,
    block_hash,
    columns,
    in_time,
    only,
    ticket,
)
from kv_wire import Wire, open_wire

from engine.borrowing import Loan
from engine.errors import LinkClosed, ProtocolError, SlotMismatch
from kv_transfer.block_records import LOAN
from kv_transfer.frames import AskLoans, Frame, Lend, Release, encode
from kv_transfer.outgoing import lend
from kv_transfer.sender import OutgoingBlock

BLOCK_BYTES = 32 * 1024
SETTINGS_ADOPT = replace(SETTINGS, transports=("adopt",))
QUICK = replace(SETTINGS, ask_loans_s=0.02, loan_lease_s=0.3, transports=("adopt",))


@pytest.fixture
def wire() -> Iterator[Wire]:
    with open_wire("adopt", QUICK, SETTINGS_ADOPT) as wire:
        yield wire


def send(wire: Wire, ticket_id: str, ordinals: Sequence[int], generation: int = 0) -> None:
    """Blocks of which all but the last of four are lent."""
    if first := [n for n in ordinals if n < 3]:
        wire.prefill.sender.send(ticket_id, [columns(first, generation=generation, lendable=True)])
    if last := [OutgoingBlock(n, n, block_hash(n), (), generation) for n in ordinals if n >= 3]:
        wire.prefill.sender.send(ticket_id, last)


def lent(wire: Wire) -> Loan:
    return wire.decode.listener.loans.get(timeout=20.0)


def over(wire: Wire, count: int) -> None:
    """The prefill worker hears of so many blocks, in any number of messages."""
    while count:
        request_id, number = wire.prefill.listener.loans_over.get(timeout=20.0)
        assert request_id == "t"
        count -= number
    assert not count


def test_lent_blocks_are_read_where_they_are_and_only_the_last_is_copied(wire: Wire) -> None:
    wire.begin("t", [5, 6, 7, 8], direct=True)
    send(wire, "t", range(4))
    wire.prefill.sender.finish("t")

    loan = lent(wire)
    done = wire.prefill.listener.next()

    assert isinstance(done, Done)
    assert (done.stats.blocks, done.stats.transport) == (4, "adopt")
    assert [block.ordinal for block in loan.blocks] == [0, 1, 2]
    for block in loan.blocks:
        there = wire.decode.pool.block(loan.lender.first_block + block.source)
        assert bytes(there) == bytes(wire.prefill.pool.block(block.source))
    assert not any(map(any, (wire.decode.pool.block(slot) for slot in (5, 6, 7))))
    assert wire.decode.listener.next() == Adopted("t", 3, BLOCK_BYTES, "adopt")
    assert wire.decode.receiver.stats().blocks_adopted == {"adopt": 4}
    assert wire.decode.table.progress("t") is not None
    assert wire.prefill.listener.loans_over.empty()
    loan.give_back(3)


def test_what_is_given_back_comes_back_once(wire: Wire) -> None:
    wire.begin("t", [5, 6, 7, 8], direct=True)
    send(wire, "t", [0, 1, 2])
    loan = lent(wire)

    loan.give_back(1)
    over(wire, 1)
    loan.give_back(2)
    over(wire, 2)

    assert wire.prefill.listener.loans_over.empty()


@pytest.mark.parametrize("refused", [None, 1])
def test_blocks_that_are_given_back_before_they_are_acknowledged_do_not_end_the_link(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    monkeypatch.setattr(wire.decode.listener, "blocks_lent", lambda loan: loan.give_back(len(loan.blocks)))
    if refused is not None:  # and a refusal sends what was to be sent before it
        wire.prefill.pool.generations[refused] = 1
    wire.begin("t", [5, 6, 7, 8], direct=True)
    send(wire, "t", [0, 1, 2])

    over(wire, 3)

    assert wire.prefill.sender.stats().links_lost == {}


def test_an_answer_to_a_question_does_not_overtake_acknowledgements() -> None:
    """The question comes together with the blocks."""
    asked = threading.Event()

    def ask_at_once(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Lend) and frame.ticket_id == "t":
            asked.set()
            return [encoded + encode(AskLoans(number=0))]
        return [encoded]

    with open_wire("adopt", SETTINGS_ADOPT, SETTINGS_ADOPT) as wire:
        wire.proxy.to_receiver = ask_at_once
        wire.decode.listener.blocks_lent = lambda loan: loan.give_back(len(loan.blocks))  # type: ignore[method-assign]
        wire.begin("t", [5, 6, 7, 8])
        send(wire, "t", [0, 1, 2])

        over(wire, 3)

        assert asked.is_set()
        assert wire.prefill.sender.stats().links_lost == {}


def test_blocks_that_are_given_back_together_come_in_one_frame(wire: Wire) -> None:
    frames: list[Release] = []

    def note(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Release) and frame.ticket_ids:
            frames.append(frame)
        return [encoded]

    wire.proxy.to_sender = note
    wire.begin("t", [5, 6, 7, 8])
    send(wire, "t", [0, 1, 2])
    loan = lent(wire)
    for _ in range(3):
        loan.give_back(1)

    over(wire, 3)

    assert sum(sum(frame.counts) for frame in frames) == 3
    assert len(frames) <= 2  # the three may fall around a question


def test_a_block_that_was_reused_before_it_was_adopted_is_refused(wire: Wire) -> None:
    wire.begin("t", [5, 6, 7, 8], direct=True)
    wire.prefill.pool.generations[1] = 1
    send(wire, "t", [0, 1, 2])

    assert [block.ordinal for block in lent(wire).blocks] == [0, 2]
    assert wire.decode.listener.next() == BlockRefused("t", 1, SlotMismatch)
    assert wire.prefill.listener.next() == Failed("t", SlotMismatch)
    over(wire, 1)


def test_the_last_block_of_a_ticket_is_not_borrowed(wire: Wire) -> None:
    wire.begin("t", [5, 6], direct=True)
    send(wire, "t", [0, 1])

    assert [block.ordinal for block in lent(wire).blocks] == [0]
    assert wire.decode.listener.next() == BlockRefused("t", 1, SlotMismatch)


def test_one_block_is_not_borrowed_for_two_of_a_ticket(wire: Wire) -> None:
    wire.begin("t", [5, 6, 7], direct=True)
    wire.prefill.sender.send("t", [columns([0, 1], sources=[4, 4], lendable=True)])

    assert [block.ordinal for block in lent(wire).blocks] == [0]
    assert wire.decode.listener.next() == BlockRefused("t", 1, SlotMismatch)


def test_a_block_outside_the_pool_ends_the_link(wire: Wire) -> None:
    def forge(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        if isinstance(frame, Lend):
            records = np.frombuffer(frame.records, dtype=LOAN).copy()
            records["source"] = 1000
            return [encode(lend(frame.ticket_id, frame.incarnation, records.tobytes()))]
        return [encoded]

    wire.proxy.to_receiver = forge
    wire.begin("t", [5, 6, 7, 8])
    send(wire, "t", [0])

    assert wire.decode.listener.next() == Lost(frozenset({"t"}), ProtocolError)
    over(wire, 1)


def test_with_the_link_all_loans_are_over_and_what_was_lent_can_be_read_still(wire: Wire) -> None:
    wire.begin("t", [5, 6, 7, 8], direct=True)
    send(wire, "t", [0, 1, 2])
    loan = lent(wire)
    content = bytes(wire.prefill.pool.block(0))

    wire.prefill.sender.close(timeout_s=20.0)
    over(wire, 3)

    assert wire.decode.listener.next() == Lost(frozenset({"t"}), LinkClosed)
    assert bytes(wire.decode.pool.block(loan.lender.first_block)) == content
    assert wire.decode.pool.windows is not None
    assert wire.decode.pool.windows.num_open == 1
    loan.give_back(3)
    assert wire.decode.pool.windows.num_open == 0


def test_whoever_does_not_say_that_it_lives_loses_what_it_was_lent(wire: Wire) -> None:
    def swallow(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
        return [] if isinstance(frame, AskLoans) else [encoded]

    wire.proxy.to_receiver = swallow
    wire.begin("t", [5, 6, 7, 8])
    send(wire, "t", [0, 1, 2])
    lent(wire)

    over(wire, 3)

    assert wire.prefill.sender.stats().links_lost == {"LinkClosed": 1}


def test_blocks_that_nobody_asked_for_are_over_at_once(wire: Wire) -> None:
    expected = wire.decode.expect("t", [5, 6], first=2)
    endpoint = only(wire.decode.receiver.endpoint(), "adopt")
    wire.prefill.sender.open("t", ticket("t", endpoint, expected), in_time())
    send(wire, "t", [0, 1, 2])

    over(wire, 2)


def test_over_another_transport_nothing_is_lent() -> None:
    with open_wire("shm") as wire:
        wire.begin("t", [5, 6, 7, 8], direct=True)
        send(wire, "t", range(4))
        wire.prefill.sender.finish("t")

        assert isinstance(wire.prefill.listener.next(), Done)
        over(wire, 3)
        assert wire.decode.listener.loans.empty()


def test_without_a_free_window_the_next_transport_is_taken() -> None:
    with open_wire("adopt") as wire:
        windows = wire.decode.pool.windows
        assert windows is not None
        other = MemoryPool()
        assert other.fd is not None
        opened = [windows.open(other.fd, other.num_blocks) for _ in range(8)]
        expected = wire.decode.expect("t", [5])
        wire.prefill.sender.open("t", ticket("t", wire.decode.receiver.endpoint(), expected), in_time())
        wire.send("t", [0])
        wire.prefill.sender.finish("t")

        done = wire.prefill.listener.next()

        assert isinstance(done, Done)
        assert done.stats.transport == "shm"
        for window in opened:
            window.retire()
        other.close()
