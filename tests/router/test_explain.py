from __future__ import annotations

import asyncio

import pytest

from engine.errors import DeadlineExceeded, QueueFull, RequestCancelled, RequestError, WorkerLost
from router.explain import History, TermError
from router.learnt_rates import LearntRates
from router.policy import Fleet, Placement, PlacementRequest
from router.snapshot import DECODE, PREFILL, WorkerSnapshot


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
    with pytest.raises(RequestError, match="'a' is not among"):
        history.find("tenant/a", "a")
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


def placement() -> Placement:
    fleet = Fleet(LearntRates())
    fields = {"block_size": 16, "num_blocks": 100, "max_model_len": 1000, "blocks_available": 100}
    workers = [WorkerSnapshot(worker_id="p", role=PREFILL, prefill_tokens_per_s=1000.0, **fields)]
    workers += [WorkerSnapshot(worker_id=f"d{n}", role=DECODE, decode_step_ms=5.0 + 10 * n, **fields) for n in range(3)]
    fleet.refresh(workers)
    placed = fleet.place(PlacementRequest(num_tokens=100, max_total_tokens=120, key=0))
    assert placed is not None
    return placed


def test_prices_are_told_in_their_order() -> None:
    history = History(capacity=2)
    with history.record("a") as record:
        record.placed(placement())
    told = history.find("a").to_proto()
    assert [pair.decode_worker for pair in told.considered] == ["d0", "d1", "d2"]
    for pair in told.considered:
        assert pair.total_ms == pytest.approx(sum(term.ms for term in pair.terms))
        assert not any(term.HasField("actual_ms") for term in pair.terms)
    assert len(history.find("a").to_proto(max_pairs=1).considered) == 1


def test_what_came_of_a_placement_stands_beside_its_estimate_and_is_summed_up_by_term() -> None:
    history = History(capacity=2)
    for actual in (110.0, 60.0):
        with history.record("a") as record:
            record.placed(placement())
            history.settle(record, {"prefill_compute": actual, "unheard_of": 1.0}, found_cached_tokens=7)
    (chosen, *others) = history.find("a").to_proto().considered
    terms = {term.name: term for term in chosen.terms}
    assert (terms["prefill_compute"].ms, terms["prefill_compute"].actual_ms) == (100.0, 60.0)
    assert not terms["decode_step"].HasField("actual_ms")
    assert chosen.found_cached_tokens == 7
    assert not any(pair.HasField("found_cached_tokens") for pair in others)
    assert history.term_errors == {"prefill_compute": TermError(count=2, sum_ms=30.0, sum_abs_ms=50.0)}


def test_a_new_placement_has_no_outcome_yet() -> None:
    history = History(capacity=2)
    with history.record("a") as record:
        record.placed(placement())
        history.settle(record, {"prefill_compute": 1.0}, found_cached_tokens=7)
        record.placed(placement())
    (chosen, *_) = history.find("a").to_proto().considered
    assert not any(term.HasField("actual_ms") for term in chosen.terms)


def test_the_last_requests_are_listed_newest_first() -> None:
    history = History(capacity=3)
    for request_id in ("a", "b", "c"):
        with history.record(request_id):
            pass
    assert [record.request_id for record in history.recent(2)] == ["c", "b"]
    assert [record.request_id for record in history.recent(2, prefix="a")] == ["a"]
