from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.policy import DECODE, PREFILL, PlacementRequest, PricedPair, WorkerSnapshot, price_pairs

REQUEST = PlacementRequest(num_tokens=100, max_total_tokens=150, key=b"k")


def worker(worker_id: str, role: str, **fields: float) -> WorkerSnapshot:
    base = WorkerSnapshot(
        worker_id=worker_id, role=role, block_size=16, num_blocks=100, max_model_len=1000, blocks_available=100
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def terms(pair: PricedPair) -> dict[str, float]:
    return {term.name: term.ms for term in pair.terms}


def test_a_price_is_queue_plus_compute_plus_decode_in_milliseconds() -> None:
    (pair,) = price_pairs(
        [
            worker("p", PREFILL, waiting_tokens=500, prefill_tokens_per_s=1000.0),
            worker("d", DECODE, decode_step_ms=20.0, running=4),
        ],
        REQUEST,
    )
    assert terms(pair) == {
        "prefill_queue": 500.0,
        "prefill_compute": 100.0,
        "decode_blocks": 0.0,
        "decode_step": pytest.approx(24.0),
    }
    assert pair.total_ms == pytest.approx(624.0)


def test_the_shorter_wait_wins_over_the_faster_worker() -> None:
    fast = worker("fast", PREFILL, prefill_tokens_per_s=2000.0, waiting_tokens=4000)
    slow = worker("slow", PREFILL, prefill_tokens_per_s=500.0)
    pairs = price_pairs([fast, slow, worker("d", DECODE)], REQUEST)
    assert [pair.prefill_worker for pair in pairs] == ["slow", "fast"]


def test_own_requests_in_flight_count_before_the_worker_reports_them() -> None:
    busy = worker("busy", PREFILL, prefill_tokens_per_s=1000.0, in_flight_tokens=900)
    idle = worker("idle", PREFILL, prefill_tokens_per_s=1000.0)
    pairs = price_pairs([busy, idle, worker("d", DECODE)], REQUEST)
    assert pairs[0].prefill_worker == "idle"


def test_missing_blocks_make_a_decode_worker_dearer() -> None:
    full = worker("full", DECODE, blocks_available=2, decode_step_ms=10.0, running=1)
    roomy = worker("roomy", DECODE, decode_step_ms=10.0, running=8)
    pairs = price_pairs([worker("p", PREFILL), full, roomy], REQUEST)
    assert [pair.decode_worker for pair in pairs] == ["roomy", "full"]
    assert terms(pairs[1])["decode_blocks"] == 8 * 16 * 10.0


def test_an_unknown_rate_is_taken_to_be_the_slowest_known() -> None:
    known = [worker(f"p{n}", PREFILL, prefill_tokens_per_s=rate) for n, rate in enumerate((1000.0, 250.0))]
    pairs = price_pairs([*known, worker("new", PREFILL), worker("d", DECODE)], REQUEST)
    computes = {pair.prefill_worker: terms(pair)["prefill_compute"] for pair in pairs}
    assert computes == {"p0": 100.0, "p1": 400.0, "new": 400.0}


def test_without_a_prefill_worker_the_decode_worker_computes() -> None:
    (pair,) = price_pairs([worker("d", DECODE, prefill_tokens_per_s=1000.0)], REQUEST)
    assert (pair.prefill_worker, pair.decode_worker) == ("", "d")
    assert terms(pair)["prefill_compute"] == 100.0


def test_a_request_that_is_not_to_be_split_leaves_prefill_workers_alone() -> None:
    pairs = price_pairs([worker("p", PREFILL), worker("d", DECODE)], replace(REQUEST, split=False))
    assert [pair.prefill_worker for pair in pairs] == [""]


def test_workers_that_cannot_hold_the_request_are_left_out() -> None:
    small = worker("small", DECODE, num_blocks=9)
    large = worker("large", DECODE, num_blocks=10)
    assert [pair.decode_worker for pair in price_pairs([small, large], REQUEST)] == ["large"]
    assert price_pairs([small], REQUEST) == []
    assert price_pairs([small], replace(REQUEST, max_total_tokens=145)) != []


def test_excluded_workers_are_left_out() -> None:
    fleet = [worker("p", PREFILL), worker("d0", DECODE), worker("d1", DECODE)]
    pairs = price_pairs(fleet, REQUEST, exclude={"p", "d0"})
    assert [(pair.prefill_worker, pair.decode_worker) for pair in pairs] == [("", "d1")]


def test_no_decode_worker_means_no_pair() -> None:
    assert price_pairs([worker("p", PREFILL)], REQUEST) == []


def test_equal_prompts_meet_at_one_worker_whatever_order_the_workers_come_in() -> None:
    fleet = [worker(f"p{n}", PREFILL) for n in range(4)] + [worker(f"d{n}", DECODE) for n in range(4)]
    first = price_pairs(fleet, REQUEST)[0]
    for seed in range(10):
        shuffled = random.Random(seed).sample(fleet, len(fleet))
        assert price_pairs(shuffled, REQUEST)[0] == first


def test_a_difference_within_the_error_of_the_estimate_is_a_tie() -> None:
    fleet = [worker(f"p{n}", PREFILL, prefill_tokens_per_s=1000.0 + n) for n in range(4)] + [worker("d", DECODE)]
    first = price_pairs(fleet, REQUEST)[0]
    reverse = [replace(w, prefill_tokens_per_s=1003.0 - n) for n, w in enumerate(fleet[:4])] + fleet[4:]
    assert price_pairs(reverse, REQUEST)[0].prefill_worker == first.prefill_worker


def test_different_prompts_spread_over_equal_workers() -> None:
    fleet = [worker(f"p{n}", PREFILL) for n in range(4)] + [worker("d", DECODE)]
    chosen = {price_pairs(fleet, replace(REQUEST, key=bytes([n])))[0].prefill_worker for n in range(64)}
    assert chosen == {"p0", "p1", "p2", "p3"}


def test_a_lost_worker_moves_only_the_prompts_that_met_there() -> None:
    fleet = [worker(f"p{n}", PREFILL) for n in range(4)] + [worker("d", DECODE)]
    for n in range(32):
        request = replace(REQUEST, key=bytes([n]))
        before = price_pairs(fleet, request)[0].prefill_worker
        after = price_pairs(fleet, request, exclude={"p0"})[0].prefill_worker
        assert after == before or before == "p0"


def test_the_number_of_pairs_is_bounded() -> None:
    fleet = [worker(f"p{n}", PREFILL) for n in range(100)] + [worker(f"d{n}", DECODE) for n in range(100)]
    assert len(price_pairs(fleet, REQUEST)) == 64


def test_terms_always_add_up_to_the_total() -> None:
    rng = random.Random(3)
    fleet = [
        worker(
            f"{role}{n}",
            role,
            waiting_tokens=rng.randrange(5000),
            prefill_tokens_per_s=rng.choice([0.0, rng.uniform(10, 9000)]),
            decode_step_ms=rng.choice([0.0, rng.uniform(1, 90)]),
            blocks_available=rng.randrange(40),
        )
        for role in (PREFILL, DECODE)
        for n in range(6)
    ]
    pairs = price_pairs(fleet, REQUEST)
    assert len(pairs) == 36
    for pair in pairs:
        assert pair.total_ms == pytest.approx(sum(term.ms for term in pair.terms))
        assert all(term.ms >= 0 for term in pair.terms)
