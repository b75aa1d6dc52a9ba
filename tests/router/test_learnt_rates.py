from __future__ import annotations

import pytest

from router.learnt_rates import MAX_WORKERS, LearntRates


def test_nothing_is_known_of_a_worker_that_did_nothing() -> None:
    rates = LearntRates()
    rates.prefilled("a", 0, 5.0)
    rates.received("a", 10, 0.0)
    assert (rates.prefill_ms_per_token("a"), rates.link_ms_per_token("a")) == (0.0, 0.0)


def test_a_few_slow_tokens_hardly_change_the_rate_of_many() -> None:
    rates = LearntRates()
    rates.prefilled("a", 1000, 1000.0)
    rates.prefilled("a", 1, 20.0)
    assert rates.prefill_ms_per_token("a") == pytest.approx(1.02, abs=0.01)


def test_a_worker_that_became_slower_is_believed_soon() -> None:
    rates = LearntRates()
    rates.prefilled("a", 100, 100.0)
    for _ in range(20):
        rates.prefilled("a", 100, 300.0)
    assert rates.prefill_ms_per_token("a") == pytest.approx(300 / 100, rel=0.1)


def test_transfers_that_waited_for_the_prompt_do_not_make_a_link_slow() -> None:
    rates = LearntRates()
    rates.received("a", 100, 10.0)
    for _ in range(5):
        rates.received("a", 100, 1000.0)
    assert rates.link_ms_per_token("a") == pytest.approx(0.1, rel=0.15)
    rates.received("a", 100, 5.0)
    assert rates.link_ms_per_token("a") == 0.05


def test_a_link_that_stays_slow_is_believed_in_the_end() -> None:
    rates = LearntRates()
    rates.received("a", 100, 10.0)
    for _ in range(200):
        rates.received("a", 100, 1000.0)
    assert rates.link_ms_per_token("a") > 4.0


def test_the_number_of_workers_is_bounded() -> None:
    rates = LearntRates()
    for n in range(MAX_WORKERS + 1):
        rates.prefilled(f"w{n}", 1, 1.0)
    assert rates.prefill_ms_per_token("w0") == 0.0
    assert rates.prefill_ms_per_token("w1") == 1.0
