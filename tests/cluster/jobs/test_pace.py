from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.jobs.pace import MAX_PAUSE_S, Pace


def test_nothing_is_sent_before_the_time_that_a_refusal_named() -> None:
    pace = Pace(8)
    pace.refused(sent_at=0.0, retry_after_s=2.0, now=1.0)
    assert not pace.may_send(0, 2.9)
    assert pace.may_send(0, 3.0)


def test_requests_that_were_sent_before_a_refusal_halve_the_limit_once() -> None:
    pace = Pace(8)
    for _ in range(5):
        pace.refused(sent_at=0.0, retry_after_s=1.0, now=1.0)
    assert (pace.limit, pace.refusals) == (4.0, 5)
    pace.refused(sent_at=2.5, retry_after_s=1.0, now=3.0)
    assert pace.limit == 2.0


def test_a_round_of_answers_allows_one_request_more() -> None:
    pace = Pace(8)
    pace.refused(0.0, 0.0, 1.0)
    for _ in range(5):
        pace.answered()
    assert 5.0 <= pace.limit < 6.0


@given(st.lists(st.one_of(st.none(), st.floats(-10, 1e9)), max_size=50))
def test_it_never_stands_still_and_never_exceeds_what_was_allowed(events: list[float | None]) -> None:
    pace, now = Pace(16), 0.0
    for hint_s in events:
        now += 1.0
        if hint_s is None:
            pace.answered()
        else:
            pace.refused(now, hint_s, now)
        assert 1.0 <= pace.limit <= 16.0
        assert pace.may_send(0, now + MAX_PAUSE_S)
        assert not pace.may_send(16, now + MAX_PAUSE_S)
