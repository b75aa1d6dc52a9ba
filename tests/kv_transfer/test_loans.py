from __future__ import annotations

import pytest

from engine.errors import LinkClosed, ProtocolError
from kv_transfer.frames import AskLoans, Release
from kv_transfer.loans import OutgoingLoans

ASK_S, LEASE_S = 0.5, 5.0


@pytest.fixture
def loans() -> OutgoingLoans:
    """Three blocks of ticket t, request r, held."""
    loans = OutgoingLoans(ASK_S, LEASE_S)
    loans.hold("t", "r", range(3))
    return loans


def lend(loans: OutgoingLoans, *ordinals: int, now: float = 0.0) -> None:
    loans.acked("t", ordinals, now)


def release(number: int, count: int, ticket_id: str = "t") -> Release:
    return Release(number=number, ticket_ids=(ticket_id,), counts=(count,))


def test_blocks_that_are_not_to_be_lent_are_none_of_its_business(loans: OutgoingLoans) -> None:
    lend(loans, 3, 4)
    loans.acked("other", (0,), now=0.0)
    assert loans.num_lent == 0


def test_a_refused_block_is_over_once(loans: OutgoingLoans) -> None:
    loans.drop("t", (0,))
    loans.drop("t", (0, 9))
    assert loans.take_over() == [("r", 1)]
    assert not loans.has_over()


def test_a_lent_block_is_over_when_it_is_given_back(loans: OutgoingLoans) -> None:
    lend(loans, 0, 1)
    assert not loans.has_over()

    loans.released(release(0, 2), now=1.0)

    assert loans.take_over() == [("r", 2)]
    assert loans.num_lent == 0


def test_with_the_link_everything_is_over_once(loans: OutgoingLoans) -> None:
    lend(loans, 0, 1)
    loans.end_all()
    loans.end_all()
    assert loans.take_over() == [("r", 3)]


@pytest.mark.parametrize(
    "frame",
    [
        release(0, 3),
        release(0, 0),
        release(0, 1, "other"),
        release(7, 1),
        Release(number=0, ticket_ids=("t",), counts=()),
    ],
    ids=["too many", "none", "another ticket", "not asked", "no count"],
)
def test_whoever_gives_back_what_it_has_not_ends_the_link(loans: OutgoingLoans, frame: Release) -> None:
    lend(loans, 0, 1)
    with pytest.raises(ProtocolError):
        loans.released(frame, now=1.0)


def test_nobody_is_asked_while_nothing_is_lent(loans: OutgoingLoans) -> None:
    assert loans.next_wake() is None
    assert loans.next_question(now=100.0) is None


def test_whoever_reads_is_asked_now_and_then_and_lives_as_long_as_it_answers(loans: OutgoingLoans) -> None:
    lend(loans, 0, now=10.0)
    assert loans.next_wake() == 10.5
    assert loans.next_question(10.4) is None
    assert loans.next_question(10.5) == AskLoans(number=1)
    assert loans.next_wake() == 11.0

    loans.released(Release(number=1, ticket_ids=(), counts=()), now=14.0)

    assert loans.next_question(18.9) == AskLoans(number=2)
    with pytest.raises(LinkClosed, match="has not answered for 5 s"):
        loans.next_question(19.0)


def test_an_answer_to_an_older_question_does_not_renew(loans: OutgoingLoans) -> None:
    lend(loans, 0, now=10.0)
    loans.next_question(10.5)
    loans.next_question(11.0)

    loans.released(Release(number=1, ticket_ids=(), counts=()), now=14.9)

    with pytest.raises(LinkClosed):
        loans.next_question(15.0)
