"""Several outputs of one prompt: one call, one status; each output a request of its own."""

from __future__ import annotations

import pytest
from fake_worker import FakeWorker, expected_output
from router_fleet import Fleet

from engine.errors import InternalError, RequestError
from engine.parallel_sampling import sample_seed

PROMPT = b"hello world"


def one_pair() -> list[FakeWorker]:
    return [FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")]


async def test_each_choice_brings_every_token_once_and_its_own_last_word(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    call = fleet.call(PROMPT, n=3)
    await call.done()
    assert [call.token_ids_of(choice) for choice in range(3)] == [expected_output(PROMPT, 6)] * 3
    usages = [event.finished.usage for event in call.events if event.HasField("finished")]
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [(11, 6)] * 3
    assert sum(event.HasField("accepted") for event in call.events) == 1


async def test_the_seeds_of_the_choices_are_those_of_the_engines_samples(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    await fleet.call(PROMPT, n=3).done()
    reserves = [message.reserve for message in fleet.workers["d0"].all("reserve")]
    assert {reserve.sampling.seed for reserve in reserves} == {7, sample_seed(7, 1), sample_seed(7, 2)}
    assert len({reserve.request_id for reserve in reserves}) == 3


async def test_the_other_choices_wait_for_the_prompt_to_be_at_the_decode_worker(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    decode = fleet.workers["d0"]
    decode.hold("handed_over")
    call = fleet.call(PROMPT, n=3)
    await call.tokens(1)
    assert len(decode.all("reserve")) == 1
    decode.release("handed_over")
    await decode.got("reserve", 3)
    await call.done()


async def test_the_other_choices_begin_too_where_the_first_one_is_a_single_token(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    call = fleet.call(PROMPT, n=2, sampling={"max_tokens": 1})
    await call.done()
    assert [call.token_ids_of(choice) for choice in range(2)] == [expected_output(PROMPT, 1)] * 2


async def test_the_parts_of_a_later_choices_first_token_add_up(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    call = fleet.call(PROMPT, n=2)
    await call.done()
    (finished,) = [event.finished for event in call.events if event.finished.choice == 1]
    assert [part.name for part in finished.waterfall.parts][:3] == ["admit", "first_choice", "place"]
    assert sum(part.duration_us for part in finished.waterfall.parts) == finished.waterfall.ttft_us > 0


async def test_every_choice_resumes_when_the_decode_worker_dies(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    decode = fleet.workers["d0"]
    decode.hold(("output", 3))
    call = fleet.call(PROMPT, n=3)
    await decode.got("start", 3)
    decode.die_at = ("output", 3)
    decode.release(("output", 3))
    await decode.no_sessions()
    decode.revive()
    await call.done()
    assert [call.token_ids_of(choice) for choice in range(3)] == [expected_output(PROMPT, 6)] * 3
    assert len(decode.all("reserve")) == 6


async def test_a_choice_that_fails_ends_the_call_with_its_error_and_the_others(fleet: Fleet) -> None:
    await fleet.start(one_pair(), max_attempts=1)
    decode = fleet.workers["d0"]
    decode.hold(("output", 3))
    call = fleet.call(PROMPT, n=3)
    await decode.got("start", 3)
    decode.fail_at[("output", 3)] = InternalError("broken")
    decode.release(("output", 3))
    error = await call.error()
    assert isinstance(error, InternalError)
    assert str(error) == "broken"
    assert fleet.dispatcher.history.requests_failed == 1


async def test_a_client_that_leaves_ends_every_choice(fleet: Fleet) -> None:
    await fleet.start(one_pair())
    decode = fleet.workers["d0"]
    decode.hold(("output", 3))
    call = fleet.call(PROMPT, n=3)
    await decode.got("start", 3)
    await call.leave()
    await decode.got("cancel", 3)
    await decode.idle()
    assert fleet.dispatcher.history.requests_cancelled == 1


async def test_too_many_choices_are_refused_by_name(fleet: Fleet) -> None:
    await fleet.start(one_pair(), max_n=4)
    error = await fleet.call(PROMPT, n=5).error()
    assert isinstance(error, RequestError)
    assert str(error) == "n: at most 4 choices, got 5"


@pytest.mark.parametrize(("worker_limit", "expected"), [(200, 189), (100, 89)])
async def test_max_tokens_is_lowered_to_what_fits_where_the_client_allows_it(
    fleet: Fleet, worker_limit: int, expected: int
) -> None:
    await fleet.start([FakeWorker("decode", "d0", max_model_len=worker_limit)])
    await fleet.call(PROMPT, sampling={"max_tokens": 1000}, clamp_max_tokens=True).done()
    reserve = fleet.workers["d0"].all("reserve")[0].reserve
    assert reserve.sampling.max_tokens == expected


async def test_a_prompt_that_leaves_no_room_is_refused_also_where_max_tokens_may_be_lowered(fleet: Fleet) -> None:
    await fleet.start([FakeWorker("decode", "d0")])
    error = await fleet.call(b"x" * 200, clamp_max_tokens=True).error()
    assert isinstance(error, RequestError)
    assert error.field == "prompt"
