from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from router.costs import PRIOR_PREFILL_MS_PER_TOKEN
from router.learnt_rates import LearntRates
from router.policy import AFFINITY, HANDOVER_MS, Fleet, PlacementRequest, PricedPair
from router.prefix_index import Match
from router.snapshot import DECODE, PREFILL, WorkerSnapshot

REQUEST = PlacementRequest(num_tokens=100, max_total_tokens=150, key=1)
KEYS = [random.Random(n).getrandbits(60) for n in range(256)]

ValueT = TypeVar("ValueT", WorkerSnapshot, PlacementRequest)


def replace(value: ValueT, **fields: Any) -> ValueT:
    return value._replace(**fields)


def worker(worker_id: str, role: str, **fields: Any) -> WorkerSnapshot:
    base = WorkerSnapshot(
        worker_id=worker_id, role=role, block_size=16, num_blocks=100, max_model_len=1000, blocks_available=100
    )
    return replace(base, **fields)


def prefill_worker(worker_id: str, **fields: Any) -> WorkerSnapshot:
    """A millisecond a token."""
    return worker(worker_id, PREFILL, **{"prefill_tokens_per_s": 1000.0} | fields)


def decode_worker(worker_id: str, **fields: Any) -> WorkerSnapshot:
    return worker(worker_id, DECODE, **{"decode_step_ms": 20.0, "prefill_tokens_per_s": 1000.0} | fields)


def place(
    workers: Sequence[WorkerSnapshot], request: PlacementRequest = REQUEST, rates: LearntRates | None = None
) -> list[PricedPair]:
    """Everything considered, the chosen pair first."""
    fleet = Fleet(rates or LearntRates())
    fleet.refresh(workers)
    placement = fleet.place(request)
    if placement is None:
        return []
    pairs = placement.considered(1000)
    assert (placement.prefill_worker, placement.decode_worker) == (pairs[0].prefill_worker, pairs[0].decode_worker)
    return pairs


def chosen(workers: Sequence[WorkerSnapshot], request: PlacementRequest = REQUEST) -> tuple[str, str]:
    pair = place(workers, request)[0]
    return pair.prefill_worker, pair.decode_worker


def holds(num_blocks: int, *workers: WorkerSnapshot) -> Match:
    return Match(num_blocks, sum(1 << w.slot for w in workers if w.slot is not None))


def terms(pair: PricedPair) -> dict[str, float]:
    return {term.name: term.ms for term in pair.terms}


def test_a_change_is_seen_in_a_list_that_was_given_before() -> None:
    workers = [decode_worker("a"), decode_worker("b", waiting_tokens=500)]
    fleet = Fleet(LearntRates())
    fleet.refresh(workers)
    workers[0] = replace(workers[0], waiting_tokens=1000)
    fleet.refresh(workers)
    placement = fleet.place(REQUEST)
    assert placement is not None
    assert placement.decode_worker == "b"


def test_a_price_is_what_the_request_waits_for_and_what_it_costs_others_in_milliseconds() -> None:
    (pair,) = place([prefill_worker("p", waiting_tokens=500), decode_worker("d", running=4)])
    assert terms(pair) == {
        "prefill_queue": 500.0,
        "prefill_compute": 100.0,
        "transfer": HANDOVER_MS,
        "decode_blocks": 0.0,
        "decode_step": pytest.approx(24.0),
        "decode_slowdown": pytest.approx(4.0),
    }


def test_cached_tokens_are_not_computed_again() -> None:
    p, d = prefill_worker("p", slot=3), decode_worker("d", slot=5)
    (pair,) = place([p, d], replace(REQUEST, matches=[holds(5, p), holds(2, d)]))
    assert terms(pair)["prefill_compute"] == 20.0
    assert pair.cached_tokens == 80


def test_a_placement_says_how_much_is_left_to_compute() -> None:
    p, d = prefill_worker("p", slot=3), decode_worker("d", slot=5)
    fleet = Fleet(LearntRates())
    fleet.refresh([p, d])
    split = fleet.place(replace(REQUEST, matches=[holds(5, p), holds(2, d)]))
    local = fleet.place(replace(REQUEST, matches=[holds(5, p), holds(2, d)], exclude={"p"}))
    assert split is not None
    assert local is not None
    assert (split.tokens_to_compute, local.tokens_to_compute) == (20, 68)


def test_the_last_token_is_computed_even_if_all_is_cached() -> None:
    p = prefill_worker("p", slot=0)
    (pair,) = place([p, decode_worker("d")], replace(REQUEST, num_tokens=96, matches=[holds(6, p)]))
    assert terms(pair)["prefill_compute"] == 1.0


def test_a_transfer_costs_what_computing_does_not_hide() -> None:
    rates = LearntRates()
    rates.received("d", 100, 300.0)
    d, p = decode_worker("d", slot=1), prefill_worker("p", slot=0)
    (pair,) = place([p, d], rates=rates)
    assert terms(pair)["transfer"] == pytest.approx(HANDOVER_MS + 300.0 - 100.0)
    (pair,) = place([p, d], replace(REQUEST, matches=[holds(5, d)]), rates)
    assert terms(pair)["transfer"] == pytest.approx(HANDOVER_MS)


def test_rates_that_were_learnt_count_before_those_reported() -> None:
    rates = LearntRates()
    rates.prefilled("p", 100, 50.0)
    (pair,) = place([prefill_worker("p", waiting_tokens=10), decode_worker("d")], rates=rates)
    assert (terms(pair)["prefill_queue"], terms(pair)["prefill_compute"]) == (5.0, 50.0)


def test_the_shorter_wait_wins_over_the_faster_worker() -> None:
    fast = prefill_worker("fast", prefill_tokens_per_s=2000.0, waiting_tokens=4000)
    slow = prefill_worker("slow", prefill_tokens_per_s=500.0)
    pairs = place([fast, slow, decode_worker("d")])
    assert [pair.prefill_worker for pair in pairs] == ["slow", "fast"]


def test_own_requests_in_flight_count_before_the_worker_reports_them() -> None:
    busy, idle = prefill_worker("busy", in_flight_tokens=900), prefill_worker("idle")
    assert chosen([busy, idle, decode_worker("d")])[0] == "idle"


def test_running_streams_make_a_decode_worker_dearer_for_what_they_lose() -> None:
    assert chosen([prefill_worker("p"), decode_worker("busy", running=30), decode_worker("idle")])[1] == "idle"


def test_missing_blocks_make_a_decode_worker_dearer() -> None:
    full = decode_worker("full", blocks_available=2, decode_step_ms=10.0, running=1)
    roomy = decode_worker("roomy", decode_step_ms=10.0, running=8)
    pairs = place([prefill_worker("p"), full, roomy])
    assert [pair.decode_worker for pair in pairs] == ["roomy", "full"]
    assert terms(pairs[1])["decode_blocks"] == (150 - 32) * 10.0


def test_an_unknown_rate_is_taken_to_be_the_slowest_known() -> None:
    known = [worker(f"p{n}", PREFILL, prefill_tokens_per_s=rate) for n, rate in enumerate((1000.0, 250.0))]
    pairs = place([*known, worker("new", PREFILL), decode_worker("d")])
    computes = {pair.prefill_worker: terms(pair)["prefill_compute"] for pair in pairs}
    assert computes == {"p0": 100.0, "p1": 400.0, "new": 400.0}
    (pair,) = place([worker("p", PREFILL), worker("d", DECODE)])
    assert terms(pair)["prefill_compute"] == 100 * PRIOR_PREFILL_MS_PER_TOKEN


def test_the_holder_of_a_prefix_is_chosen_until_its_queue_costs_more_than_holding_is_worth() -> None:
    request = replace(REQUEST, num_tokens=960, max_total_tokens=970)
    saved = 800.0
    for waiting, expected in ((saved * (1 + AFFINITY) - 60, "holder"), (saved * (1 + AFFINITY) + 60, "idle")):
        holder = prefill_worker("holder", slot=0, waiting_tokens=int(waiting))
        fleet = [holder, prefill_worker("idle", slot=1), decode_worker("d")]
        assert chosen(fleet, replace(request, matches=[holds(50, holder)]))[0] == expected


def test_of_two_holders_the_slower_one_is_worth_no_more() -> None:
    fast, slow = prefill_worker("fast", slot=0), prefill_worker("slow", slot=1, prefill_tokens_per_s=100.0)
    assert chosen([slow, fast, decode_worker("d")], replace(REQUEST, matches=[holds(5, slow, fast)]))[0] == "fast"


def test_one_hot_worker_leaves_the_affinity_of_others_alone() -> None:
    hot, warm = prefill_worker("hot", slot=0, waiting_tokens=9000), prefill_worker("warm", slot=1)
    fleet = [hot, warm, prefill_worker("cold", slot=2), decode_worker("d")]
    assert chosen(fleet, replace(REQUEST, matches=[holds(4, warm)]))[0] == "warm"
    assert chosen(fleet, replace(REQUEST, matches=[holds(4, hot)]))[0] != "hot"


def test_of_equal_decode_workers_the_one_that_holds_the_prompt_is_chosen() -> None:
    decode = [decode_worker(f"d{n}", slot=n) for n in range(8)]
    for holder in decode:
        assert (
            chosen([prefill_worker("p"), *decode], replace(REQUEST, matches=[holds(4, holder)]))[1] == holder.worker_id
        )


def test_a_short_tail_is_computed_by_the_decode_worker_that_holds_the_rest() -> None:
    p, d = prefill_worker("p", slot=0), decode_worker("d", slot=1)
    request = replace(REQUEST, max_local_tokens=40, matches=[holds(4, d)])
    assert chosen([p, d], request) == ("", "d")
    assert chosen([p, d], replace(request, max_local_tokens=35)) == ("p", "d")


def test_a_tail_is_not_computed_where_many_streams_would_wait_for_it() -> None:
    p, d = prefill_worker("p", slot=0), decode_worker("d", slot=1, running=20)
    pairs = place([p, d], replace(REQUEST, max_local_tokens=40, matches=[holds(4, p, d)]))
    assert [pair.prefill_worker for pair in pairs] == ["p", ""]
    assert terms(pairs[1])["decode_stall"] == 36.0 * 20


def test_a_long_queue_sends_a_short_prompt_to_a_decode_worker() -> None:
    fleet = [prefill_worker("p", waiting_tokens=5000), decode_worker("d")]
    assert chosen(fleet, replace(REQUEST, max_local_tokens=100)) == ("", "d")
    assert chosen(fleet, replace(REQUEST, max_local_tokens=99)) == ("p", "d")


def test_without_a_prefill_worker_the_decode_worker_computes() -> None:
    (pair,) = place([decode_worker("d")])
    assert (pair.prefill_worker, pair.decode_worker) == ("", "d")
    assert terms(pair)["prefill_compute"] == 100.0


def test_a_prefill_worker_that_cannot_hold_the_prompt_is_not_asked() -> None:
    assert chosen([prefill_worker("p", max_model_len=100), decode_worker("d")]) == ("", "d")
    assert chosen([prefill_worker("p", max_model_len=101), decode_worker("d")]) == ("p", "d")


def test_a_decode_worker_that_cannot_hold_the_request_is_not_asked() -> None:
    small, large = decode_worker("small", num_blocks=9), decode_worker("large", running=40)
    assert {pair.decode_worker for pair in place([prefill_worker("p"), small, large])} == {"large"}
    assert place([prefill_worker("p"), small]) == []


def test_excluded_workers_are_not_asked() -> None:
    fleet = [prefill_worker("p"), decode_worker("d"), decode_worker("e")]
    request = replace(REQUEST, exclude={"p", "d"})
    assert [(pair.prefill_worker, pair.decode_worker) for pair in place(fleet, request)] == [("", "e")]
    assert place(fleet, replace(REQUEST, exclude={"d", "e"})) == []


def test_equal_prompts_meet_at_one_worker_whatever_order_the_workers_come_in() -> None:
    fleet = [prefill_worker(f"p{n}") for n in range(20)] + [decode_worker(f"d{n}") for n in range(20)]
    first = chosen(fleet)
    for seed in range(10):
        assert chosen(random.Random(seed).sample(fleet, len(fleet))) == first


def test_a_difference_within_the_error_of_the_estimate_is_a_tie() -> None:
    fleet = [prefill_worker(f"p{n}", prefill_tokens_per_s=1000.0 + n) for n in range(4)]
    reverse = [replace(w, prefill_tokens_per_s=1003.0 - n) for n, w in enumerate(fleet)]
    assert chosen([*fleet, decode_worker("d")]) == chosen([*reverse, decode_worker("d")])


def test_different_prompts_spread_over_equal_workers() -> None:
    fleet = [prefill_worker(f"p{n}") for n in range(12)] + [decode_worker("d")]
    assert len({chosen(fleet, replace(REQUEST, key=key))[0] for key in KEYS}) == 12


def test_a_lost_worker_moves_only_the_prompts_that_met_there() -> None:
    fleet = [prefill_worker(f"p{n}") for n in range(4)] + [decode_worker("d")]
    for key in KEYS:
        request = replace(REQUEST, key=key)
        before = chosen(fleet, request)[0]
        assert chosen(fleet, replace(request, exclude={"p0"}))[0] == before or before == "p0"


def test_the_number_of_pairs_is_bounded() -> None:
    fleet = [prefill_worker(f"p{n}") for n in range(100)] + [decode_worker(f"d{n}") for n in range(100)]
    assert len(place(fleet)) == 64


def test_a_refresh_takes_every_change() -> None:
    fleet = Fleet(LearntRates())
    p, q, d = prefill_worker("p"), prefill_worker("q", waiting_tokens=10_000), decode_worker("d")
    steps = [
        ([p, q, d], "p"),
        ([replace(p, waiting_tokens=20_000), q, d], "q"),
        ([p, d], "p"),
        ([q, d], "q"),
    ]
    for workers, expected in steps:
        fleet.refresh(workers)
        placement = fleet.place(REQUEST)
        assert placement is not None
        assert placement.prefill_worker == expected


def test_terms_are_never_negative_and_nothing_cheaper_is_passed_over_by_more_than_affinity_and_tie() -> None:
    rng = random.Random(3)
    for _ in range(200):
        fleet = [
            worker(
                f"{role}{n}",
                role,
                waiting_tokens=rng.randrange(5000),
                running=rng.randrange(9),
                prefill_tokens_per_s=rng.choice([0.0, rng.uniform(10, 9000)]),
                decode_step_ms=rng.choice([0.0, rng.uniform(1, 90)]),
                blocks_available=rng.randrange(40),
                slot=10 * (role == DECODE) + n,
            )
            for role in (PREFILL, DECODE)
            for n in range(6)
        ]
        matches = [holds(5, *rng.sample(fleet, 2)), holds(3, fleet[0])]
        pairs = place(fleet, replace(REQUEST, matches=matches, max_local_tokens=rng.choice([0, 50, 100])))
        assert len(pairs) >= 36
        for pair in pairs:
            assert all(term.ms >= 0 for term in pair.terms)
            allowed = pairs[0].affinity_ms - pair.affinity_ms
            assert pairs[0].total_ms <= pair.total_ms * 1.05 + 1.0 + max(allowed, allowed * 1.05) + 1e-6
