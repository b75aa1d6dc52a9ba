"""What a client sees when workers fail: the same stream, or one typed error."""

from __future__ import annotations

import re

import pytest
from fake_worker import FakeWorker, expected_output
from router_fleet import Fleet

from engine.block_hash import pack_tokens
from engine.errors import InternalError, NoFreeBlocks, NoWorkers, QueueFull, RequestError, WorkerLost

PROMPT = b"hello world"
EXPECTED = expected_output(PROMPT, 6)


def two_pairs() -> list[FakeWorker]:
    return [FakeWorker(role, f"{role[0]}{n}") for role in ("prefill", "decode") for n in range(2)]


def one_pair() -> list[FakeWorker]:
    return [FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")]


@pytest.mark.parametrize("stage", ["reserve", "start", "handed_over", ("output", 1), ("output", 4)], ids=str)
async def test_a_decode_worker_that_dies_at_any_stage_changes_no_token(fleet: Fleet, stage: object) -> None:
    await fleet.start(two_pairs())
    dying = [worker for worker in fleet.workers.values() if worker.role == "decode"]
    for worker in dying:
        worker.hold(stage)
    call = fleet.call(request_id="r1")
    chosen = await fleet.first_to_reach(stage, dying)
    chosen.die_at = stage
    for worker in dying:
        worker.release(stage)
    finished = await call.done()
    assert call.token_ids == EXPECTED
    assert call.text == bytes(EXPECTED).decode()
    assert finished.route.attempts == 2
    assert finished.route.decode_worker != chosen.worker_id
    assert sum(part.duration_us for part in finished.waterfall.parts) == finished.waterfall.ttft_us


async def test_a_resumed_request_is_placed_with_the_prompt_and_all_tokens_so_far(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    decode = fleet.workers["d0"]
    decode.die_at = ("output", 3)
    call = fleet.call()
    await call.tokens(3)
    decode.revive()
    await call.done()
    again = (await decode.got("reserve", 2)).reserve
    assert again.token_ids == pack_tokens([*PROMPT, *EXPECTED[:3]])
    assert again.num_prompt_tokens == len(PROMPT)
    assert again.sampling.seed == 7
    first = (await decode.got("reserve", 1)).reserve
    assert again.request_id != first.request_id
    assert call.token_ids == EXPECTED


async def test_a_prefill_worker_that_dies_before_the_first_token_needs_no_new_placement(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    fleet.workers["p0"].die_at = "prefill"
    call = fleet.call()
    finished = await call.done()
    assert call.token_ids == EXPECTED
    (start,) = fleet.workers["d0"].all("start")
    assert start.start.compute_missing
    assert len(fleet.workers["d0"].all("reserve")) == 1
    assert (finished.route.attempts, finished.route.recomputed_tokens) == (1, len(PROMPT))
    assert "prefill_failed" in [part.name for part in finished.waterfall.parts]
    assert sum(part.duration_us for part in finished.waterfall.parts) == finished.waterfall.ttft_us


async def test_a_prefill_worker_that_dies_between_first_token_and_hand_over_changes_no_token(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    prefill, decode = fleet.workers["p0"], fleet.workers["d0"]
    prefill.hold("held")
    decode.hold("handed_over")
    call = fleet.call()
    await decode.reached("handed_over")
    await prefill.reached("held")
    prefill.die_at = "held"
    prefill.release("held")
    second = (await decode.got("start", 2)).start
    assert second.compute_missing
    assert second.token_ids == b""
    decode.release("handed_over")
    await call.done()
    assert call.token_ids == EXPECTED


async def test_a_prefill_worker_that_fails_is_not_asked_again_for_the_request(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    fleet.workers["p0"].fail_at["prefill"] = InternalError("fault")
    fleet.workers["d0"].die_at = ("output", 2)
    call = fleet.call()
    await call.tokens(2)
    fleet.workers["d0"].revive()
    await call.done()
    assert call.token_ids == EXPECTED
    assert len(fleet.workers["p0"].all("prefill")) == 1
    assert fleet.workers["d0"].all("reserve")[1].reserve.compute_here


async def test_a_prefill_worker_that_takes_too_long_is_cancelled_and_replaced(fleet: Fleet) -> None:
    await fleet.start(one_pair(), prefill_share=0.02)
    fleet.workers["p0"].hold("prefill")
    call = fleet.call(timeout_s=5.0)
    await call.done()
    assert call.token_ids == EXPECTED
    await fleet.workers["p0"].got("cancel")
    fleet.workers["p0"].release("prefill")


async def test_a_decode_worker_that_has_no_blocks_in_time_is_cancelled_and_another_one_asked(fleet: Fleet) -> None:
    await fleet.start(two_pairs(), reserve_share=0.02)
    decode = [worker for worker in fleet.workers.values() if worker.role == "decode"]
    for worker in decode:
        worker.hold("reserve")
    call = fleet.call(timeout_s=5.0)
    first = await fleet.first_to_reach("reserve", decode)
    (second,) = (worker for worker in decode if worker is not first)
    second.release("reserve")
    finished = await call.done()
    assert finished.route.decode_worker == second.worker_id
    await first.got("cancel")


async def test_a_refusal_for_want_of_room_goes_to_the_other_worker(fleet: Fleet) -> None:
    await fleet.start(two_pairs())
    decode = [worker for worker in fleet.workers.values() if worker.role == "decode"]
    for worker in decode:
        worker.hold("reserve")
    call = fleet.call()
    first = await fleet.first_to_reach("reserve", decode)
    first.fail_at["reserve"] = QueueFull("full")
    for worker in decode:
        worker.release("reserve")
    finished = await call.done()
    assert finished.route.decode_worker != first.worker_id
    assert len(first.all("reserve")) == 1


async def test_when_every_worker_refuses_the_client_gets_their_error_at_once(fleet: Fleet) -> None:
    await fleet.start(one_pair(), no_worker_wait_s=60.0)
    fleet.workers["d0"].fail_at["reserve"] = NoFreeBlocks("none free")
    assert isinstance(await fleet.call().error(), NoFreeBlocks)


async def test_an_error_that_no_other_worker_can_mend_ends_the_request(fleet: Fleet) -> None:
    await fleet.start(two_pairs())
    for worker in fleet.workers.values():
        worker.fail_at["reserve"] = RequestError("max_tokens", "too many")
    error = await fleet.call().error()
    assert isinstance(error, RequestError)
    assert error.field == "max_tokens"
    assert sum(len(worker.all("reserve")) for worker in fleet.workers.values()) == 1


async def test_a_wrong_index_never_reaches_the_client(fleet: Fleet) -> None:
    await fleet.start(two_pairs())
    for worker in fleet.workers.values():
        if worker.role == "decode":
            worker.wrong_index_at = 3
    call = fleet.call()
    finished = await call.done()
    assert call.token_ids == EXPECTED
    assert finished.route.attempts == 2


async def test_attempts_are_bounded_and_what_came_before_the_end_is_delivered(fleet: Fleet) -> None:
    await fleet.start(one_pair(), max_attempts=2, no_worker_wait_s=5.0)
    decode = fleet.workers["d0"]
    decode.die_at = ("output", 2)
    call = fleet.call()
    await call.tokens(2)
    decode.revive()
    decode.die_at = ("output", 4)
    assert isinstance(await call.error(), WorkerLost)
    assert call.token_ids == EXPECTED[:4]
    assert len(decode.all("reserve")) == 2


async def test_a_lost_last_decode_worker_ends_the_request_after_the_wait(fleet: Fleet) -> None:
    await fleet.start(one_pair(), no_worker_wait_s=0.1)
    fleet.workers["d0"].die_at = ("output", 2)
    call = fleet.call()
    error = await call.error()
    assert isinstance(error, NoWorkers)
    assert "d0" in str(error)
    assert call.token_ids == EXPECTED[:2]


async def test_a_request_outlasts_the_replacement_of_the_only_decode_worker(fleet: Fleet) -> None:
    await fleet.start(one_pair(), no_worker_wait_s=5.0, cold_wait_s=1e-6)
    fleet.workers["d0"].die_at = ("output", 2)
    prefill = {"p0": fleet.workers["p0"].address}
    fleet.registry.set_workers(prefill | {"d0": fleet.workers["d0"].address})
    await fleet.ready(2)
    call = fleet.call()
    await call.tokens(2)
    fleet.registry.set_workers(prefill)
    successor = fleet.workers["d0-again"] = FakeWorker("decode", "d0")
    fleet.registry.set_workers(prefill | {"d0": await successor.start()})
    await call.done()
    assert call.token_ids == EXPECTED


async def test_a_decode_worker_that_was_taken_away_is_named_to_the_client_with_the_reason(fleet: Fleet) -> None:
    await fleet.start(one_pair(), no_worker_wait_s=1.0)
    fleet.workers["d0"].die_at = ("output", 2)
    call = fleet.call()
    await call.tokens(2)
    while fleet.registry.is_ready():
        await fleet.registry.changed()
    fleet.registry.set_workers({"p0": fleet.workers["p0"].address})
    error = await call.error()
    assert isinstance(error, NoWorkers)
    assert re.search(r"d0 \(127.0.0.1:\d+\): lost \d+ s ago: .*this worker died", str(error))


async def test_without_a_decode_worker_in_memory_the_wait_is_the_short_one(fleet: Fleet) -> None:
    await fleet.start([FakeWorker("prefill", "p0")], no_worker_wait_s=60.0, cold_wait_s=0.01)
    assert str(await fleet.call().error()).startswith("no decode worker within 0.01 s")


async def test_one_lost_prefill_worker_fails_over_only_the_requests_on_it(fleet: Fleet) -> None:
    await fleet.start(two_pairs())
    prefill = [worker for worker in fleet.workers.values() if worker.role == "prefill"]
    for worker in prefill:
        worker.hold("prefill")
    calls = [fleet.call(bytes([65 + n]) * 9) for n in range(8)]
    for worker in prefill:
        await worker.got("prefill")
    prefill[0].die_at = "prefill"
    for worker in prefill:
        worker.release("prefill")
    routes = [(await call.done()).route for call in calls]
    assert {route.attempts for route in routes} == {1}
    assert all((route.recomputed_tokens > 0) == (route.prefill_worker == "p0") for route in routes)
    for n, call in enumerate(calls):
        assert call.token_ids == expected_output(bytes([65 + n]) * 9, 6)
