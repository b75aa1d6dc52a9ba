from __future__ import annotations

import pytest
from factories import make_request

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.step_rates import StepRates


def batch(*counts: int) -> ScheduledBatch:
    return ScheduledBatch(tuple(ScheduledSequence(make_request([1]), count, samples=True) for count in counts))


def test_rates_are_zero_while_unknown() -> None:
    rates = StepRates()
    assert (rates.prefill_tokens_per_s, rates.decode_step_ms) == (0.0, 0.0)


def test_a_step_of_single_tokens_is_a_decode_step() -> None:
    rates = StepRates()
    rates.record(batch(1, 1, 1), 0.02)
    assert (rates.prefill_tokens_per_s, rates.decode_step_ms) == (0.0, 20.0)


def test_a_short_last_chunk_hardly_changes_the_prefill_rate() -> None:
    rates = StepRates()
    rates.record(batch(500), 0.5)
    rates.record(batch(2), 0.01)
    assert rates.prefill_tokens_per_s == pytest.approx(1000, rel=0.01)


def test_rates_follow_a_lasting_change() -> None:
    rates = StepRates()
    rates.record(batch(1), 0.02)
    for _ in range(60):
        rates.record(batch(1), 0.04)
    assert rates.decode_step_ms == pytest.approx(40.0, rel=0.01)
