from __future__ import annotations

import random

import pytest

from engine.output_lengths import UNBOUNDED, OutputLengths


def seen(*lengths: int, times: int = 1) -> OutputLengths:
    outputs = OutputLengths()
    for _ in range(times):
        for length in lengths:
            outputs.observe(length)
    return outputs


def test_before_anything_was_seen_an_output_is_expected_never_to_end() -> None:
    assert OutputLengths().forecast(0) == OutputLengths().forecast(1000) == UNBOUNDED


def test_a_few_outputs_are_not_believed() -> None:
    assert seen(20, times=2).forecast(0) == UNBOUNDED
    assert seen(20, times=3).forecast(0) == 20


def test_outputs_that_are_all_alike_are_forecast_exactly() -> None:
    assert seen(64, times=50).forecast(0) == seen(64, times=50).forecast(63) == 64


def test_an_output_longer_than_all_seen_is_expected_never_to_end() -> None:
    assert seen(64, times=50).forecast(100) == UNBOUNDED


def test_a_long_output_is_compared_with_long_ones() -> None:
    outputs = seen(*[8] * 9, 500, times=20)
    assert outputs.forecast(0) == 8
    assert outputs.forecast(20) == 500


def test_old_outputs_fade() -> None:
    outputs = seen(400, times=500)
    for _ in range(300):
        outputs.observe(16)
    assert outputs.forecast(0) == 16


@pytest.mark.parametrize("longest", [10, 300, 5000])
def test_two_of_five_outputs_of_what_is_left_are_shorter_than_forecast(longest: int) -> None:
    dice = random.Random(3)
    lengths = [dice.randint(1, longest) for _ in range(600)]
    outputs = seen(*lengths)
    for so_far in (0, longest // 3, longest // 2):
        longer = sorted(length for length in lengths[-256:] if length > so_far)
        assert outputs.forecast(so_far) == pytest.approx(longer[len(longer) * 2 // 5], rel=0.2, abs=1)


def test_a_forecast_is_more_than_what_there_is() -> None:
    outputs = seen(*range(1, 200), times=3)
    assert all(outputs.forecast(so_far) > so_far for so_far in range(1000))
