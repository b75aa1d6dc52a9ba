from __future__ import annotations

import pytest
from fake_worker import COMPUTE_US, QUEUE_US, WAIT_US, FakeWorker, expected_output
from router_fleet import Fleet

from engine.block_hash import pack_tokens
from engine.errors import (
    DeadlineExceeded,
    NoWorkers,
    QueueFull,
    RequestCancelled,
    RequestError,
)
from kvrelay._wire import SAMPLING_FIELDS
from kvrelay.v1 import common_pb2

PROMPT = b"hello world"


def one_pair() -> list[FakeWorker]:
    return [FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")]


async def test_a_split_request_brings_every_token_once_with_usage_and_route(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    call = fleet.call(PROMPT)
    finished = await call.done()
    assert call.token_ids == expected_output(PROMPT, 6)
    assert call.text == bytes(call.token_ids).decode()
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (11, 6)
    route = finished.route
    assert (route.prefill_worker, route.decode_worker, route.attempts) == ("p0", "d0", 1)
    assert (route.blocks_computed, route.blocks_adopted, route.bytes_sent, route.transport) == (3, 3, 300, "shm")
    assert route.recomputed_tokens == 0


async def test_workers_get_the_prompt_the_complete_sampling_and_the_ticket_unread(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    await fleet.call(PROMPT, sampling={"temperature": 0.5}).done()
    reserve = (await fleet.workers["d0"].got("reserve")).reserve
    prefill = (await fleet.workers["p0"].got("prefill")).prefill
    start = (await fleet.workers["d0"].got("start")).start
    for message in (reserve, prefill):
        assert message.token_ids == pack_tokens(list(PROMPT))
        assert message.num_prompt_tokens == 11
        assert (message.sampling.seed, message.sampling.temperature, message.sampling.top_p) == (7, 0.5, 1.0)
        assert 0 < message.timeout_ms <= 10_000
    assert not reserve.compute_here
    assert prefill.ticket.ticket_id == reserve.request_id
    assert start.token_ids == pack_tokens(expected_output(PROMPT, 1))
    assert not start.compute_missing


async def test_the_parts_add_up_to_the_time_to_first_token(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    waterfall = (await fleet.call().done()).waterfall
    parts = {part.name: part.duration_us for part in waterfall.parts}
    assert list(parts) == [
        "admit",
        "place",
        "reserve_wait",
        "reserve_rpc",
        "prefill_queue",
        "prefill_compute",
        "prefill_rpc",
        "emit",
    ]
    assert sum(parts.values()) == waterfall.ttft_us > 0
    assert (parts["reserve_wait"], parts["prefill_queue"], parts["prefill_compute"]) == (WAIT_US, QUEUE_US, COMPUTE_US)
    assert [part.name for part in waterfall.after_first] == ["transfer", "first_decode_step"]
    assert sum(part.duration_us for part in waterfall.after_first) == waterfall.second_token_us
    assert waterfall.decode_tokens_per_s > 0


async def test_the_first_token_reaches_the_client_before_the_hand_over(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    fleet.workers["d0"].hold("handed_over")
    call = fleet.call()
    await call.tokens(1)
    assert call.token_ids == expected_output(PROMPT, 1)
    fleet.workers["d0"].release("handed_over")
    await call.done()


async def test_a_first_token_that_is_the_last_ends_the_reservation_without_a_start(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    call = fleet.call(sampling={"max_tokens": 1})
    finished = await call.done()
    assert call.token_ids == expected_output(PROMPT, 1)
    assert (finished.reason, finished.usage.completion_tokens) == (common_pb2.FINISH_REASON_LENGTH, 1)
    await fleet.workers["d0"].got("cancel")
    assert fleet.workers["d0"].all("start") == []


@pytest.mark.parametrize("index", [0, 2])
async def test_a_stop_token_counts_but_gives_no_text(fleet: Fleet, index: int) -> None:
    await fleet.start(one_pair())
    for worker in fleet.workers.values():
        worker.stop_token_at = index
    call = fleet.call()
    finished = await call.done()
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert call.token_ids == expected_output(PROMPT, index + 1)
    assert call.text == bytes(call.token_ids[:-1]).decode()


async def test_a_stop_string_ends_the_request_at_the_worker_too(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    expected = expected_output(PROMPT, 50)
    call = fleet.call(sampling={"max_tokens": 50, "stop": [bytes(expected[3:5]).decode()]})
    fleet.workers["d0"].hold(("output", 5))
    finished = await call.done()
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert call.token_ids == expected[:5]
    assert call.text == bytes(expected[:3]).decode()
    assert finished.usage.completion_tokens == 5
    await fleet.workers["d0"].got("cancel")


async def test_logprobs_come_with_every_token_where_asked_for(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    call = fleet.call(sampling={"logprobs": 0})
    await call.done()
    logprobs = [entry.logprob for event in call.events for entry in event.tokens.logprobs]
    assert logprobs == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]


async def test_cached_tokens_are_the_most_that_any_cache_had(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    fleet.workers["d0"].cached_tokens = 4
    fleet.workers["p0"].cached_tokens = 8
    finished = await fleet.call().done()
    assert finished.usage.cached_tokens == 8
    assert finished.route.blocks_cached == 1


async def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt(fleet: Fleet) -> None:
    await fleet.start([FakeWorker("decode", "d0")])
    call = fleet.call()
    finished = await call.done()
    assert call.token_ids == expected_output(PROMPT, 6)
    assert (await fleet.workers["d0"].got("reserve")).reserve.compute_here
    assert fleet.workers["d0"].all("start") == []
    assert finished.route.prefill_worker == ""
    parts = {part.name: part.duration_us for part in finished.waterfall.parts}
    assert list(parts) == ["admit", "place", "reserve_wait", "decode_prefill", "emit"]
    assert sum(parts.values()) == finished.waterfall.ttft_us


async def test_a_prompt_under_the_local_limit_is_computed_by_the_decode_worker_where_that_is_faster(
    fleet: Fleet,
) -> None:
    workers = one_pair()
    workers[0].load.waiting_tokens = 5000
    await fleet.start(workers, local_prefill_max_tokens=11)
    await workers[0].heartbeats(2)
    short, long = fleet.call(PROMPT), fleet.call(PROMPT + b"!")
    assert (await short.done()).route.prefill_worker == ""
    assert (await long.done()).route.prefill_worker == "p0"


async def test_a_second_request_with_a_live_id_is_refused_and_the_first_goes_on(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    fleet.workers["p0"].hold("prefill")
    first = fleet.call(request_id="same")
    await fleet.workers["p0"].reached("prefill")
    error = await fleet.call(request_id="same").error()
    assert isinstance(error, RequestError)
    assert error.field == "request_id"
    fleet.workers["p0"].release("prefill")
    await first.done()
    await fleet.call(request_id="same").done()


async def test_requests_over_the_limit_are_shed_at_once(fleet: Fleet) -> None:
    await fleet.start(one_pair(), max_live_requests=1)
    fleet.workers["p0"].hold("prefill")
    first = fleet.call()
    await fleet.workers["p0"].reached("prefill")
    assert isinstance(await fleet.call().error(), QueueFull)
    fleet.workers["p0"].release("prefill")
    await first.done()


async def test_without_any_worker_the_error_says_why_of_each(fleet: Fleet) -> None:
    dead = FakeWorker("decode", "d0", fingerprint=b"other")
    await fleet.start_router([dead], no_worker_wait_s=0.5)
    error = await fleet.call().error()
    assert isinstance(error, NoWorkers)
    assert "d0" in str(error)
    assert "fingerprint" in str(error)


async def test_a_request_waits_for_a_decode_worker_that_is_about_to_come(fleet: Fleet) -> None:
    await fleet.start([FakeWorker("prefill", "p0")], no_worker_wait_s=5.0)
    call = fleet.call()
    late = fleet.workers["d1"] = FakeWorker("decode", "d1")
    fleet.registry.add_addresses([await late.start()])
    assert (await call.done()).route.decode_worker == "d1"


async def test_a_request_larger_than_every_pool_is_refused(fleet: Fleet) -> None:
    await fleet.start([FakeWorker("decode", "d0", num_blocks=4)])
    error = await fleet.call(PROMPT, sampling={"max_tokens": 7}).error()
    assert isinstance(error, RequestError)
    assert error.field == "max_tokens"
    assert "may be 17 tokens; got 11 + 7 (the KV pool of d0 holds 16 tokens)" in str(error)
    await fleet.call(PROMPT, sampling={"max_tokens": 6}).done()


async def test_a_worker_that_would_ignore_a_field_of_the_request_is_not_asked(fleet: Fleet) -> None:
    older = [FakeWorker(role, f"{role}-old", sampling_fields=()) for role in ("prefill", "decode")]
    await fleet.start([*older, FakeWorker("decode", "d1")], local_prefill_max_tokens=0)
    for _ in range(3):
        finished = await fleet.call(sampling={"min_p": 0.5}).done()
        assert (finished.route.prefill_worker, finished.route.decode_worker) == ("", "d1")
    assert (await fleet.call(b"another prompt", sampling={"min_p": 0.0}).done()).route.prefill_worker == "prefill-old"


async def test_a_field_that_no_decode_worker_acts_upon_is_refused_by_name(fleet: Fleet) -> None:
    known = [name for name in SAMPLING_FIELDS if name != "logit_bias"]
    await fleet.start([FakeWorker("decode", "d0", sampling_fields=known)])
    error = await fleet.call(sampling={"logit_bias": {3: 1.0}, "min_p": 0.5}).error()
    assert isinstance(error, RequestError)
    assert error.field == "logit_bias"
    await fleet.call(sampling={"min_p": 0.5}).done()


STAGES = ["reserve", "prefill", "start", "handed_over", ("output", 3)]


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_a_cancel_at_any_stage_leaves_nothing_anywhere(fleet: Fleet, stage: object) -> None:
    await fleet.start(one_pair())
    at = fleet.workers["p0" if stage == "prefill" else "d0"]
    at.hold(stage)
    call = fleet.call(request_id="r1")
    await at.reached(stage)
    assert fleet.dispatcher.admission.cancel("r1")
    assert isinstance(await call.error(), RequestCancelled)
    assert not fleet.dispatcher.admission.cancel("r1")
    await fleet.check_idle()


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_a_client_that_goes_away_at_any_stage_leaves_nothing_anywhere(fleet: Fleet, stage: object) -> None:
    await fleet.start(one_pair())
    at = fleet.workers["p0" if stage == "prefill" else "d0"]
    at.hold(stage)
    call = fleet.call(request_id="r1")
    await at.reached(stage)
    await call.leave()
    await fleet.check_idle()
    assert fleet.dispatcher.history.find("r1").outcome.startswith("CANCELLED")


@pytest.mark.parametrize("stage", STAGES, ids=str)
async def test_a_deadline_at_any_stage_leaves_nothing_anywhere(fleet: Fleet, stage: object) -> None:
    await fleet.start(one_pair(), prefill_share=1.0)
    at = fleet.workers["p0" if stage == "prefill" else "d0"]
    at.hold(stage)
    call = fleet.call(timeout_s=0.3)
    await at.reached(stage)
    assert isinstance(await call.error(), DeadlineExceeded)
    await fleet.check_idle()


async def test_a_client_that_does_not_read_ends_only_its_own_request(fleet: Fleet) -> None:
    await fleet.start(one_pair(), max_unread_messages=8)
    slow = fleet.call(sampling={"max_tokens": 100})
    await slow.tokens(1)
    slow.reading.clear()
    error = await slow.error()
    assert isinstance(error, QueueFull)
    assert "reads too slowly" in str(error)
    await fleet.check_idle()
    await fleet.call().done()


async def test_explain_keeps_prices_route_waterfall_and_outcome(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    finished = await fleet.call(request_id="r1").done()
    explained = fleet.dispatcher.history.find("r1").to_proto()
    assert explained.outcome == "length"
    assert explained.route == finished.route
    assert explained.waterfall == finished.waterfall
    chosen, other = explained.considered
    assert (chosen.prefill_worker, chosen.decode_worker) == ("p0", "d0")
    assert (other.prefill_worker, other.decode_worker) == ("", "d0")
    actual = {term.name: term.actual_ms for term in chosen.terms if term.HasField("actual_ms")}
    assert (actual["prefill_queue"], actual["prefill_compute"]) == (QUEUE_US / 1000, COMPUTE_US / 1000)
    assert actual["decode_blocks"] == WAIT_US / 1000
    assert chosen.found_cached_tokens == 0
    assert fleet.dispatcher.history.term_errors.keys() == actual.keys()
    assert chosen.total_ms == pytest.approx(sum(term.ms for term in chosen.terms))
