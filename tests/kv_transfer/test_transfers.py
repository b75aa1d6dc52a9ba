"""What a link sends next, and how transfers end, without a socket or a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kv_links import outgoing, ticket

from engine.errors import (
    DeadlineExceeded,
    DigestMismatch,
    EngineError,
    InternalError,
    LinkClosed,
    ProtocolError,
    RequestCancelled,
    SlotMismatch,
    StaleTicket,
)
from kv_transfer.digest import PythonBlockCopier
from kv_transfer.frames import MAX_GROUP_BLOCKS, Abort, Finish, Renew
from kv_transfer.link import LinkSettings
from kv_transfer.outgoing import SendBlocks, Step
from kv_transfer.source_digests import SourceDigests
from kv_transfer.transfers import OutgoingTransfers

BLOCK = 100
SETTINGS = LinkSettings(progress_timeout_s=5.0, max_unacked_bytes=3 * BLOCK)
"""So small a budget that a group is one block."""


@pytest.fixture
def link() -> OutgoingTransfers:
    return OutgoingTransfers(BLOCK, SETTINGS)


def begin(link: OutgoingTransfers, name: str, ordinals: Sequence[int], deadline: float = 1000.0) -> None:
    link.open(f"r-{name}", ticket(name, b"", {ordinal: ordinal for ordinal in ordinals}), deadline, now=0.0)


def take(link: OutgoingTransfers, now: float = 0.0) -> list[Step]:
    """Everything that the link sends at `now`."""
    steps: list[Step] = []
    while (step := link.next_step(now)) is not None:
        steps.append(step)
        if isinstance(step, SendBlocks):
            link.sent(step)
    return steps


def blocks(steps: Sequence[Step]) -> list[tuple[str, int]]:
    return [(step.ticket_id, block.ordinal) for step in steps if isinstance(step, SendBlocks) for block in step.blocks]


def outcomes(link: OutgoingTransfers) -> list[tuple[str, type[EngineError] | None]]:
    ended: list[tuple[str, type[EngineError] | None]] = []
    while (outcome := link.take_outcome()) is not None:
        ended.append((outcome.request_id, None if outcome.error is None else type(outcome.error)))
    return ended


def test_a_ticket_is_announced_before_its_first_block(link: OutgoingTransfers) -> None:
    begin(link, "a", [0])
    link.send("r-a", outgoing([0]))

    assert isinstance(link.next_step(0.0), Renew)
    assert isinstance(link.next_step(0.0), SendBlocks)


def test_only_what_the_ticket_asks_for_is_sent_and_each_block_once(link: OutgoingTransfers) -> None:
    begin(link, "a", [2, 3])
    link.send("r-a", outgoing([0, 1, 2]))
    link.send("r-a", outgoing([2, 3, 4]))

    assert blocks(take(link)) == [("a", 2), ("a", 3)]


def test_requests_take_turns(link: OutgoingTransfers) -> None:
    begin(link, "a", range(10))
    begin(link, "b", range(10))
    link.send("r-a", outgoing(range(10)))
    link.send("r-b", outgoing([0]))

    assert blocks(take(link)) == [("a", 0), ("b", 0), ("a", 1)]


def test_a_group_is_what_is_there_up_to_a_quarter_of_the_budget() -> None:
    link = OutgoingTransfers(BLOCK, LinkSettings(max_unacked_bytes=16 * BLOCK))
    begin(link, "a", range(10))
    link.send("r-a", outgoing([0]))
    link.send("r-a", outgoing([1]))
    first = [step for step in take(link) if isinstance(step, SendBlocks)]
    link.send("r-a", outgoing(range(2, 10)))
    then = [step for step in take(link) if isinstance(step, SendBlocks)]

    assert [len(step.blocks) for step in first] == [2]
    assert [len(step.blocks) for step in then] == [4, 4]
    assert blocks([*first, *then]) == [("a", ordinal) for ordinal in range(10)]


def test_a_group_goes_to_the_places_that_the_ticket_names_and_fits_a_frame() -> None:
    link = OutgoingTransfers(1, LinkSettings())
    link.open("r", ticket("t", b"", {n: 500 - n for n in range(300)}, generation=7), deadline=9.0, now=0.0)
    link.send("r", outgoing(range(300)))

    groups = [step for step in take(link) if isinstance(step, SendBlocks)]

    assert [len(group.blocks) for group in groups] == [MAX_GROUP_BLOCKS, MAX_GROUP_BLOCKS, 300 - 2 * MAX_GROUP_BLOCKS]
    assert [place for group in groups for place in group.places] == [(500 - n, 7) for n in range(300)]


def test_the_first_group_of_an_idle_link_is_small_and_the_next_grow_with_what_is_in_flight() -> None:
    mib = 1024 * 1024
    link = OutgoingTransfers(mib // 2, LinkSettings())
    begin(link, "a", range(128))
    link.send("r-a", outgoing(range(128)))

    groups = [step for step in take(link) if isinstance(step, SendBlocks)]

    assert [len(group.blocks) for group in groups] == [2, 4, 12, 32, 32, 32, 14]


def test_blocks_whose_digest_is_known_leave_at_once_and_not_with_others() -> None:
    mib = 1024 * 1024
    digests = SourceDigests(PythonBlockCopier(), 42)
    digests.take([(n, 1) for n in range(4, 40)], [memoryview(bytes(1))] * 36)
    link = OutgoingTransfers(mib // 2, LinkSettings(), digests)
    begin(link, "a", range(42))
    link.send("r-a", [replace(block, generation=1) for block in outgoing(range(42))])

    groups = [step for step in take(link) if isinstance(step, SendBlocks)]

    assert [len(group.blocks) for group in groups] == [2, 4, 32, 2, 2]


def test_a_group_takes_no_more_than_what_is_left_of_the_budget() -> None:
    link = OutgoingTransfers(BLOCK, LinkSettings(max_unacked_bytes=18 * BLOCK))
    begin(link, "a", range(30))
    link.send("r-a", outgoing(range(30)))

    groups = [step for step in take(link) if isinstance(step, SendBlocks)]

    assert [len(group.blocks) for group in groups] == [4, 4, 4, 4, 2]


def test_bytes_in_flight_keep_to_the_budget(link: OutgoingTransfers) -> None:
    begin(link, "a", range(5))
    link.send("r-a", outgoing(range(5)))

    assert len(blocks(take(link))) == 3
    link.acked("a", [0], now=0.0)
    assert blocks(take(link)) == [("a", 3)]


def test_a_block_larger_than_the_budget_is_sent_alone() -> None:
    link = OutgoingTransfers(BLOCK, LinkSettings(max_unacked_bytes=1))
    begin(link, "a", [0, 1])
    link.send("r-a", outgoing([0, 1]))

    assert blocks(take(link)) == [("a", 0)]
    link.acked("a", [0], now=0.0)
    assert blocks(take(link)) == [("a", 1)]


def test_a_transfer_is_done_when_it_is_finished_and_every_block_is_acknowledged(link: OutgoingTransfers) -> None:
    begin(link, "a", [0, 1])
    link.send("r-a", outgoing([0, 1]))
    take(link)
    link.acked("a", [0, 1], now=1.0)
    assert outcomes(link) == []

    link.finish("r-a")

    assert take(link) == [Finish(ticket_id="a", count=2)]
    assert outcomes(link) == [("r-a", None)]
    assert len(link) == 0


def test_finish_follows_the_last_block(link: OutgoingTransfers) -> None:
    begin(link, "a", range(4))
    link.send("r-a", outgoing(range(4)))
    link.finish("r-a")

    assert not any(isinstance(step, Finish) for step in take(link))
    link.acked("a", [0, 1, 2], now=0.0)

    assert isinstance(take(link)[-1], Finish)
    assert outcomes(link) == []
    link.acked("a", [3], now=0.0)
    assert outcomes(link) == [("r-a", None)]


def test_a_ticket_that_misses_nothing_is_done_at_finish(link: OutgoingTransfers) -> None:
    begin(link, "a", [])
    link.finish("r-a")

    assert outcomes(link) == [("r-a", None)]


def test_finishing_short_fails_the_transfer_and_tells_the_receiver(link: OutgoingTransfers) -> None:
    begin(link, "a", [0, 1])
    link.send("r-a", outgoing([0]))
    link.finish("r-a")

    assert Abort(ticket_id="a") in take(link)
    assert outcomes(link) == [("r-a", SlotMismatch)]


def test_an_aborted_transfer_ends_after_the_block_that_is_in_hand(link: OutgoingTransfers) -> None:
    begin(link, "a", [0, 1])
    link.send("r-a", outgoing([0, 1]))
    assert isinstance(link.next_step(0.0), Renew)
    in_hand = link.next_step(0.0)
    assert isinstance(in_hand, SendBlocks)

    link.abort("r-a")
    assert outcomes(link) == []
    link.sent(in_hand)

    assert outcomes(link) == [("r-a", RequestCancelled)]
    assert take(link) == [Abort(ticket_id="a")]


def test_whatever_comes_for_an_ended_transfer_is_ignored(link: OutgoingTransfers) -> None:
    begin(link, "a", [0, 1])
    link.send("r-a", outgoing([0]))
    take(link)
    link.abort("r-a")
    take(link)

    link.abort("r-a")
    link.send("r-a", outgoing([1]))
    link.finish("r-a")
    link.acked("a", [0], now=0.0)
    assert link.acked("a", [0, 1], now=0.0) == 2
    assert not link.nacked("a", 1, StaleTicket(""), now=0.0)

    assert outcomes(link) == [("r-a", RequestCancelled)]
    assert take(link) == []


def test_a_refused_block_fails_its_transfer_only(link: OutgoingTransfers) -> None:
    begin(link, "a", [0, 1])
    begin(link, "b", [0])
    link.send("r-a", outgoing([0]))
    link.send("r-b", outgoing([0]))
    take(link)

    assert link.nacked("a", 0, DigestMismatch(""), now=0.0)
    link.acked("b", [0], now=0.0)
    link.finish("r-b")

    assert outcomes(link) == [("r-a", DigestMismatch), ("r-b", None)]


def test_a_refused_ticket_fails_unless_all_of_it_is_acknowledged(link: OutgoingTransfers) -> None:
    begin(link, "a", [0])
    begin(link, "b", [0])
    link.send("r-a", outgoing([0]))
    take(link)
    link.acked("a", [0], now=0.0)

    assert not link.nacked("a", None, StaleTicket(""), now=0.0)
    assert link.nacked("b", None, StaleTicket(""), now=0.0)

    assert outcomes(link) == [("r-b", StaleTicket)]


def test_leases_are_renewed_while_nothing_is_sent(link: OutgoingTransfers) -> None:
    begin(link, "a", [0])
    begin(link, "b", [0])
    take(link)

    wake = link.next_wake()
    assert wake is not None
    assert wake == pytest.approx(5.0 / 3)
    assert take(link, now=wake) == [Renew(ticket_ids=("a", "b"))]
    assert link.next_wake() == pytest.approx(10.0 / 3)


def test_an_acknowledged_ticket_is_not_renewed(link: OutgoingTransfers) -> None:
    begin(link, "a", [0])
    link.send("r-a", outgoing([0]))
    take(link)
    link.acked("a", [0], now=0.0)

    assert take(link, now=2.0) == []
    assert link.next_wake() == 1000.0


def test_many_leases_take_several_frames(link: OutgoingTransfers) -> None:
    for number in range(150):
        begin(link, f"t{number}", [0])
    take(link)

    renewals = take(link, now=2.0)

    assert sorted(len(frame.ticket_ids) for frame in renewals if isinstance(frame, Renew)) == [22, 64, 64]


def test_a_passed_deadline_ends_the_transfer_without_traffic(link: OutgoingTransfers) -> None:
    begin(link, "a", [0], deadline=1.0)
    begin(link, "b", [0], deadline=3.0)
    take(link)

    assert link.next_wake() == 1.0
    assert Abort(ticket_id="a") in take(link, now=1.0)
    assert outcomes(link) == [("r-a", DeadlineExceeded)]


def test_a_block_that_is_not_answered_in_time_ends_the_link(link: OutgoingTransfers) -> None:
    begin(link, "a", [0])
    link.send("r-a", outgoing([0]))
    take(link, now=1.0)

    assert link.next_step(5.9) is not None  # a renewal
    with pytest.raises(LinkClosed, match="not answered for 5 s"):
        link.next_step(6.0)


def test_answers_to_later_blocks_do_not_excuse_a_lost_one(link: OutgoingTransfers) -> None:
    begin(link, "a", [0, 1])
    link.send("r-a", outgoing([0, 1]))
    take(link, now=0.0)
    link.acked("a", [1], now=4.0)

    with pytest.raises(LinkClosed):
        link.next_step(5.0)


def test_waiting_long_between_blocks_is_no_stall(link: OutgoingTransfers) -> None:
    begin(link, "a", [0, 1])
    link.send("r-a", outgoing([0]))
    take(link, now=0.0)
    link.acked("a", [0], now=0.1)
    take(link, now=60.0)
    link.send("r-a", outgoing([1]))

    assert blocks(take(link, now=100.0)) == [("a", 1)]
    assert take(link, now=104.9) != []


def test_a_lost_link_ends_every_transfer_once(link: OutgoingTransfers) -> None:
    begin(link, "a", [0])
    begin(link, "b", [0])
    link.send("r-a", outgoing([0]))
    take(link)
    link.abort("r-b")

    link.fail_all(LinkClosed("gone"))

    assert outcomes(link) == [("r-b", RequestCancelled), ("r-a", LinkClosed)]
    assert link.next_step(100.0) is None


def test_a_second_transfer_of_a_request_or_ticket_is_refused(link: OutgoingTransfers) -> None:
    begin(link, "a", [0])

    with pytest.raises(InternalError):
        link.open("r-a", ticket("other", b"", {}), deadline=1.0, now=0.0)
    with pytest.raises(InternalError):
        link.open("r-other", ticket("a", b"", {}), deadline=1.0, now=0.0)

    assert len(link) == 1


@pytest.mark.parametrize("slots", [{-1: 0}, {0: 2**32}])
def test_a_ticket_that_fits_no_frame_is_refused(slots: dict[int, int]) -> None:
    with pytest.raises(ProtocolError, match="asks for block"):
        ticket("a", b"", slots)
    with pytest.raises(ProtocolError, match="ticket_id"):
        ticket("x" * 129, b"", {})
