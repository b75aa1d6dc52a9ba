from __future__ import annotations

import asyncio

import pytest

from engine.errors import DeadlineExceeded, QueueFull, RequestCancelled, RequestError, WorkerLost
from router.explain import History
from router.policy import PricedPair, PriceTerm


def test_only_the_last_requests_are_kept() -> None:
    history = History(capacity=2)
    for request_id in ("a", "b", "c"):
        with history.record(request_id) as record:
            record.outcome = "stop"
    assert history.find("c").outcome == "stop"
    assert history.find("b").outcome == "stop"
    with pytest.raises(RequestError, match="'a' is not among the last 2 requests") as raised:
        history.find("a")
    assert raised.value.field == "request_id"
    assert (history.requests_total, history.requests_failed) == (3, 0)


def test_a_live_request_is_running() -> None:
    history = History(capacity=2)
    with history.record("a"):
        assert history.find("a").to_proto().outcome == "running"


def test_an_error_is_kept_as_status_name_and_message() -> None:
    history = History(capacity=2)
    with pytest.raises(QueueFull), history.record("a"):
        raise QueueFull("no room")
    assert history.find("a").outcome == "RESOURCE_EXHAUSTED: no room"
    assert history.requests_failed == 1


@pytest.mark.parametrize(
    ("error", "outcome", "failed_cancelled_refused"),
    [
        (asyncio.CancelledError(), "CANCELLED", (0, 1, 0)),
        (RequestCancelled("by id"), "CANCELLED", (0, 1, 0)),
        (RequestError("prompt", "too long"), "INVALID_ARGUMENT", (0, 0, 1)),
        (WorkerLost("gone"), "UNAVAILABLE", (1, 0, 0)),
        (DeadlineExceeded("late"), "DEADLINE_EXCEEDED", (1, 0, 0)),
        (KeyError("x"), "INTERNAL", (1, 0, 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_way_to_leave_settles_the_outcome_and_is_counted_as_one_kind_of_end(
    error: BaseException, outcome: str, failed_cancelled_refused: tuple[int, int, int]
) -> None:
    history = History(capacity=2)
    with pytest.raises(type(error)), history.record("a"):
        raise error
    assert history.find("a").outcome.startswith(outcome)
    counted = (history.requests_failed, history.requests_cancelled, history.requests_refused)
    assert counted == failed_cancelled_refused


def test_prices_are_told_in_their_order() -> None:
    history = History(capacity=2)
    pairs = [PricedPair("p", f"d{n}", (PriceTerm("x", 1.0), PriceTerm("y", float(n)))) for n in range(3)]
    with history.record("a") as record:
        record.placed(pairs)
    considered = history.find("a").to_proto().considered
    assert [(pair.decode_worker, pair.total_ms) for pair in considered] == [("d0", 1.0), ("d1", 2.0), ("d2", 3.0)]
    assert [(term.name, term.ms) for term in considered[2].terms] == [("x", 1.0), ("y", 2.0)]
