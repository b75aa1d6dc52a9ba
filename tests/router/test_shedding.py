"""Requests whose time would be over before their turn are refused at once, with a hint."""

from __future__ import annotations

import pytest
from fake_worker import FakeWorker, expected_output
from router_fleet import Fleet

from engine.errors import QueueFull
from kvrelay.v1 import worker_pb2
from router.policy import PricedPair, PriceTerm
from router.shedding import check_in_time

PROMPT = b"hello world"


def pair(**terms: float) -> PricedPair:
    return PricedPair("p0", "d0", tuple(PriceTerm(name, ms) for name, ms in terms.items()))


def test_more_work_ahead_than_time_left_is_refused_with_the_difference() -> None:
    with pytest.raises(QueueFull, match=r"about 3\.5 s of work are ahead") as caught:
        check_in_time(pair(prefill_queue=2000, decode_blocks=1500, prefill_compute=1), remaining_s=3.0)
    assert caught.value.retry_after_s == pytest.approx(0.5)


@pytest.mark.parametrize(("priority", "limit_s"), [(8, 5.0), (4, 7.5), (0, 10.0), (-8, 15.0)])
def test_a_worse_priority_is_shed_for_less_work_ahead(priority: int, limit_s: float) -> None:
    check_in_time(pair(prefill_queue=1000 * limit_s), remaining_s=10.0, priority=priority)
    with pytest.raises(QueueFull, match=f"at priority {priority}"):
        check_in_time(pair(prefill_queue=1000 * limit_s + 1), remaining_s=10.0, priority=priority)


def test_a_requests_own_work_is_no_reason_to_refuse_it() -> None:
    best = pair(prefill_queue=10, prefill_compute=60_000, transfer=60_000, decode_slowdown=60_000)
    check_in_time(best, remaining_s=1.0)
    assert best.total_ms > 1000


async def test_a_busy_fleet_sheds_what_it_cannot_begin_in_time_and_nothing_is_sent_to_a_worker(fleet: Fleet) -> None:
    prefill, decode = FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")
    prefill.load = worker_pb2.Load(waiting=9, waiting_tokens=50_000, prefill_tokens_per_s=1000.0, blocks_free=64)
    await fleet.start([prefill, decode], local_prefill_max_tokens=0)
    await prefill.heartbeats(2)
    error = await fleet.call(PROMPT, timeout_s=5.0).error()
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == pytest.approx(45.0, rel=0.1)
    assert decode.all("reserve") == []
    error = await fleet.call(PROMPT, timeout_s=90.0, priority=8).error()  # would be overtaken
    assert isinstance(error, QueueFull)
    call = fleet.call(PROMPT, timeout_s=90.0)  # has the time
    await call.done()
    assert call.token_ids == expected_output(PROMPT, 6)


async def test_nobody_is_refused_by_the_speed_that_a_worker_is_taken_to_have(fleet: Fleet) -> None:
    prefill, decode = FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")
    prefill.load = worker_pb2.Load(waiting=9, waiting_tokens=50_000, blocks_free=64)
    await fleet.start([prefill, decode], local_prefill_max_tokens=0)
    await prefill.heartbeats(2)
    call = fleet.call(PROMPT, timeout_s=5.0)
    await call.done()
    assert call.token_ids == expected_output(PROMPT, 6)
