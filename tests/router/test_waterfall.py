from __future__ import annotations

import random

import pytest

from kvrelay.v1 import router_pb2
from router.waterfall import WaterfallRecorder


def parts(message: router_pb2.Waterfall) -> dict[str, int]:
    return {part.name: part.duration_us for part in message.parts}


def test_reported_durations_are_taken_out_of_the_round_trip() -> None:
    waterfall = WaterfallRecorder(100.0)
    waterfall.admitted(100.001)
    waterfall.mark("prefill_rpc", 100.011, [("prefill_queue", 2000), ("prefill_compute", 5000)])
    waterfall.emitted(1, 100.0115)
    message = waterfall.to_proto(1)
    assert parts(message) == {
        "admit": 1000,
        "prefill_queue": 2000,
        "prefill_compute": 5000,
        "prefill_rpc": 3000,
        "emit": 500,
    }
    assert message.ttft_us == 11500


def test_a_report_longer_than_the_round_trip_never_makes_a_part_negative() -> None:
    waterfall = WaterfallRecorder(0.0)
    waterfall.mark("prefill_rpc", 0.001, [("prefill_queue", 700), ("prefill_compute", 10**9)])
    waterfall.emitted(1, 0.001)
    assert parts(waterfall.to_proto(1)) == {"prefill_queue": 700, "prefill_compute": 300, "prefill_rpc": 0, "emit": 0}


@pytest.mark.parametrize("seed", range(20))
def test_parts_always_add_up_exactly(seed: int) -> None:
    rng = random.Random(seed)
    now = rng.uniform(0, 1e6)
    waterfall = WaterfallRecorder(now)
    for n in range(rng.randint(1, 9)):
        now += rng.choice([0.0, rng.expovariate(1000.0)])
        reported = [(f"{n}-{i}", rng.randrange(3000)) for i in range(rng.randrange(3))]
        waterfall.mark(str(n), now, reported)
        if rng.random() < 0.3:
            waterfall.begin_attempt(now)
    now += 0.0001
    waterfall.emitted(1, now)
    message = waterfall.to_proto(1)
    assert sum(part.duration_us for part in message.parts) == message.ttft_us


def test_a_failed_attempt_becomes_one_part() -> None:
    waterfall = WaterfallRecorder(0.0)
    waterfall.admitted(0.001)
    waterfall.mark("place", 0.002)
    waterfall.mark("reserve_rpc", 0.003)
    waterfall.begin_attempt(0.010)
    waterfall.mark("place", 0.011)
    waterfall.emitted(1, 0.012)
    message = waterfall.to_proto(1)
    assert parts(message) == {"admit": 1000, "failed_attempt": 9000, "place": 1000, "emit": 1000}
    assert message.ttft_us == 12000


def test_nothing_after_the_first_token_changes_the_time_to_it() -> None:
    waterfall = WaterfallRecorder(0.0)
    waterfall.emitted(1, 0.005)
    waterfall.mark("place", 0.009)
    waterfall.begin_attempt(0.010)
    waterfall.emitted(2, 0.020)
    message = waterfall.to_proto(2)
    assert parts(message) == {"emit": 5000}
    assert message.ttft_us == 5000
    assert message.second_token_us == 15000


def test_the_wait_for_the_second_token_is_transfer_then_decode_step() -> None:
    waterfall = WaterfallRecorder(0.0)
    waterfall.emitted(1, 0.010)
    waterfall.handed_over(0.013)
    waterfall.emitted(2, 0.018)
    waterfall.emitted(5, 0.030)
    message = waterfall.to_proto(5)
    assert [(part.name, part.duration_us) for part in message.after_first] == [
        ("transfer", 3000),
        ("first_decode_step", 5000),
    ]
    assert message.decode_tokens_per_s == pytest.approx(4 / 0.020)


def test_a_hand_over_before_the_first_token_costs_no_wait() -> None:
    waterfall = WaterfallRecorder(0.0)
    waterfall.handed_over(0.008)
    waterfall.emitted(1, 0.010)
    waterfall.emitted(2, 0.014)
    assert [part.duration_us for part in waterfall.to_proto(2).after_first] == [0, 4000]


def test_only_the_first_hand_over_counts() -> None:
    waterfall = WaterfallRecorder(0.0)
    waterfall.emitted(1, 0.010)
    waterfall.handed_over(0.011)
    waterfall.handed_over(0.019)
    waterfall.emitted(2, 0.020)
    assert waterfall.to_proto(2).after_first[0].duration_us == 1000


def test_one_token_has_no_second_token() -> None:
    waterfall = WaterfallRecorder(0.0)
    waterfall.emitted(1, 0.010)
    message = waterfall.to_proto(1)
    assert not message.after_first
    assert (message.second_token_us, message.decode_tokens_per_s) == (0, 0.0)
