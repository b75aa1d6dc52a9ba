from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from factories import HarnessFactory, make_request
from fakes import FakeModel, FewWords, expected_output

from engine.batch import ForwardBatch
from engine.errors import InternalError, QueueFull, RequestError
from engine.kv_cache import KvCache
from engine.request import FinishReason, Request, RequestKind, RequestStatus
from engine.sampling_params import SamplingParams

PROMPT = list(range(30, 40))  # 2 full blocks and a half


class SickModel(FakeModel):
    """Gives NaN for a sequence that begins with `sick`, if all of it is computed at once."""

    sick = 7

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        logits = super().forward(batch, kv)
        for row, token in enumerate(batch.sample_rows):
            start = max(start for start in batch.query_starts if start <= token)
            if batch.token_ids[start] == self.sick:
                logits[row] = torch.nan
        return logits


def test_a_request_ends_with_the_models_tokens(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(make_request(PROMPT, max_tokens=12))
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 12)
    assert harness.ends[request.request_id].finish_reason is FinishReason.LENGTH
    assert harness.engine.stats().blocks.owned == 0


def test_a_prompt_in_chunks_gives_the_same_tokens(make_engine: HarnessFactory) -> None:
    prompt = list(range(100, 150))
    harness = make_engine(max_num_batched_tokens=8)
    request = harness.submit(make_request(prompt))
    first = harness.step().updates[0]
    assert (first.token, first.num_computed_tokens, first.index) == (None, 8, 0)
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(prompt, 8)


def test_requests_of_one_batch_do_not_mix(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    requests = [harness.submit(make_request(PROMPT[: 3 + i], max_tokens=10)) for i in range(5)]
    harness.run()
    assert all(harness.outputs[r.request_id] == harness.expected(r) for r in requests)
    assert harness.engine.stats().blocks.owned == 0


def test_a_cached_prefix_is_not_computed_again_and_gives_the_same_tokens(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    harness.submit(make_request(PROMPT, max_tokens=1))
    harness.run()
    before = harness.model.num_tokens
    request = harness.submit(make_request([*PROMPT, 7, 8]))
    harness.run()
    assert request.num_cached_tokens == 8
    assert harness.model.num_tokens - before == 4 + 7  # the rest of the prompt, then all but the last output token
    assert harness.outputs[request.request_id] == expected_output([*PROMPT, 7, 8], 8)


def test_the_output_of_a_request_is_cached_for_the_next_turn(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    first = harness.submit(make_request(PROMPT, max_tokens=7))
    harness.run()
    request = harness.submit(make_request([*first.token_ids, 5]))
    harness.run()
    assert request.num_cached_tokens == 16
    assert harness.outputs[request.request_id] == harness.expected(request)


def test_a_resumed_request_goes_on_at_the_next_index(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(make_request(PROMPT, output=expected_output(PROMPT, 3), max_tokens=8))
    first = harness.step().updates[0]
    assert first.index == 3
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)


def test_the_end_of_sequence_token_stops(make_engine: HarnessFactory) -> None:
    output = expected_output(PROMPT, 8)
    harness = make_engine(model=FakeModel(eos_token_ids=(output[4],)))
    request = harness.submit(make_request(PROMPT))
    ignoring = harness.submit(
        make_request(PROMPT, params=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    )
    harness.run()
    assert harness.outputs[request.request_id] == output[:5]
    assert harness.ends[request.request_id].finish_reason is FinishReason.STOP
    assert harness.outputs[ignoring.request_id] == output


def test_a_stop_token_is_not_drawn_before_min_tokens(make_engine: HarnessFactory) -> None:
    stop = expected_output(PROMPT, 1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=1, stop_token_ids=(stop,))
    harness = make_engine()
    request = harness.submit(make_request(PROMPT, params=params))
    harness.run()
    first = expected_output(PROMPT, 1, banned=(stop,))
    assert harness.outputs[request.request_id] == first + expected_output([*PROMPT, *first], 3)


def test_a_draw_depends_on_seed_and_position_alone(make_engine: HarnessFactory) -> None:
    params = SamplingParams(temperature=5000.0, max_tokens=6, seed=11)
    harness = make_engine()
    whole = harness.submit(make_request(PROMPT, params=params))
    harness.run()
    output = harness.outputs[whole.request_id]
    resumed = harness.submit(make_request(PROMPT, output=output[:2], params=params))
    longer = harness.submit(make_request([*PROMPT, *output[:2]], params=params, max_tokens=4))
    other = harness.submit(make_request(PROMPT, params=SamplingParams(temperature=5000.0, max_tokens=6, seed=12)))
    harness.run()
    assert harness.outputs[resumed.request_id] == output
    assert harness.outputs[longer.request_id] == output[2:]
    assert harness.outputs[other.request_id] != output


def test_penalized_tokens_depend_on_the_requests_own_tokens_alone(make_engine: HarnessFactory) -> None:
    params = SamplingParams(
        temperature=1.5, seed=5, max_tokens=12, repetition_penalty=2.0, frequency_penalty=1.5, presence_penalty=-0.5
    )
    alone = make_engine(model=FewWords())
    whole = alone.submit(make_request([7, 8, 9], params=params))
    alone.run()
    tokens = alone.outputs[whole.request_id]

    together = make_engine(max_num_batched_tokens=8, max_num_seqs=8, model=FewWords())
    resumed = together.submit(make_request([7, 8, 9], params=params, output=tokens[:5]))
    again = together.submit(make_request([7, 8, 9], params=params))
    for seed in range(4):
        together.submit(make_request([1, 2, seed], params=replace(params, seed=seed)))
    together.run()

    assert together.outputs[resumed.request_id] == together.outputs[again.request_id] == tokens
    unpenalized = make_engine(model=FewWords())
    other = unpenalized.submit(make_request([7, 8, 9], params=SamplingParams(temperature=1.5, seed=5, max_tokens=12)))
    unpenalized.run()
    assert unpenalized.outputs[other.request_id] != tokens


def test_prompt_logprobs_are_refused_where_the_prompt_is_not_computed() -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs: must be in \[0, 20\], got 21"):
        request_of(prompt_logprobs=21)
    with pytest.raises(RequestError, match="prompt_logprobs: are the prefill worker's"):
        request_of(prompt_logprobs=1, kind=RequestKind.DECODE)


def request_of(**fields: Any) -> Request:
    parts: dict[str, Any] = {
        "request_id": "r",
        "token_ids": [1, 2],
        "num_prompt_tokens": 2,
        "params": SamplingParams(),
        "scope": b"",
        "arrival": 0.0,
    }
    return Request(**parts | fields)


def test_a_prefill_request_draws_one_token_and_keeps_its_blocks(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(make_request(PROMPT, kind=RequestKind.PREFILL))
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 1)
    assert harness.engine.stats().held == 1
    assert harness.engine.stats().blocks.owned == len(request.block_table) == 3
    harness.engine.release_held(request.request_id)
    assert request.status is RequestStatus.FINISHED
    assert harness.engine.stats().blocks.cached == 2


def test_a_prefill_request_whose_first_token_is_the_last_is_held_too(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(make_request(PROMPT, kind=RequestKind.PREFILL, max_tokens=1))
    harness.run()
    assert harness.ends[request.request_id].finish_reason is FinishReason.LENGTH
    assert request.status is RequestStatus.HELD
    harness.engine.cancel(request.request_id)


def test_a_transfer_that_ends_before_the_prompt_leaves_nothing_held(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_num_batched_tokens=8)
    request = harness.submit(make_request(PROMPT, kind=RequestKind.PREFILL))
    harness.step()
    harness.engine.release_held(request.request_id)
    assert harness.engine.stats().running == 1
    harness.run()
    assert request.status is RequestStatus.FINISHED
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 1)


def test_completed_blocks_are_reported_chunk_by_chunk(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_num_batched_tokens=8)
    harness.submit(make_request(list(range(20)), kind=RequestKind.PREFILL, request_id="p"))
    assert [harness.step().updates[0].num_computed_tokens for _ in range(3)] == [8, 16, 20]
    harness.engine.cancel("p")


@pytest.mark.parametrize("token_id", [-1, 512])
def test_a_token_outside_the_vocabulary_is_refused(make_engine: HarnessFactory, token_id: int) -> None:
    harness = make_engine()
    with pytest.raises(RequestError, match=r"each must be in \[0, 512\)") as caught:
        harness.submit(make_request([1, token_id]))
    assert caught.value.field == "prompt_token_ids"
    assert not harness.engine.has_work()


def test_a_refused_reservation_is_never_granted(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_waiting=1)
    harness.reserve(make_request(PROMPT, kind=RequestKind.DECODE, request_id="first"))
    with pytest.raises(QueueFull):
        harness.reserve(make_request(PROMPT, kind=RequestKind.DECODE))
    harness.run()
    assert list(harness.grants) == ["first"]
    harness.engine.cancel("first")


def test_each_kind_has_its_own_door(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    with pytest.raises(InternalError, match="call reserve"):
        harness.submit(make_request(PROMPT, kind=RequestKind.DECODE))
    with pytest.raises(InternalError, match="call submit"):
        harness.reserve(make_request(PROMPT))
    assert not harness.engine.has_work()


@pytest.mark.parametrize("steps", range(6))
def test_cancel_leaves_nothing_behind(make_engine: HarnessFactory, steps: int) -> None:
    harness = make_engine(max_num_batched_tokens=8)
    request = harness.submit(make_request(list(range(20))))
    for _ in range(steps):
        harness.step()
    harness.engine.cancel(request.request_id)
    harness.engine.cancel(request.request_id)
    stats = harness.engine.stats()
    assert stats.blocks.free + stats.blocks.cached == stats.blocks.total
    assert (stats.running, stats.waiting) == (0, 0)
    assert not harness.engine.has_work()


def test_a_fault_of_the_model_fails_its_batch_and_no_other_request(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_num_seqs=2)
    failing = [harness.submit(make_request([i, *PROMPT])) for i in range(2)]
    waiting = harness.submit(make_request(PROMPT))
    harness.step()
    harness.model.fault = RuntimeError("out of something")
    harness.step()
    for request in failing:
        error = harness.ends[request.request_id].error
        assert isinstance(error, InternalError)
        assert "out of something" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    assert harness.engine.stats().blocks.owned == 0
    harness.run()
    assert harness.outputs[waiting.request_id] == expected_output(PROMPT, 8)


def test_logits_without_a_token_fail_their_own_request_and_no_other(make_engine: HarnessFactory) -> None:
    harness = make_engine(model=SickModel(), max_num_batched_tokens=64)
    before, sick, behind = (harness.submit(make_request([first, *PROMPT])) for first in (1, SickModel.sick, 2))
    harness.run()
    error = harness.ends[sick.request_id].error
    assert isinstance(error, InternalError)
    assert str(error) == f"request {sick.request_id}: NotFinite: position 11: the largest logit is nan"
    assert harness.outputs[sick.request_id] == []
    assert harness.outputs[before.request_id] == expected_output([1, *PROMPT], 8)
    assert harness.outputs[behind.request_id] == expected_output([2, *PROMPT], 8)


def test_kv_of_logits_without_a_token_is_never_found_in_the_cache(make_engine: HarnessFactory) -> None:
    harness = make_engine(model=SickModel(), max_num_batched_tokens=64)
    harness.submit(make_request([SickModel.sick, *PROMPT]))
    harness.run()
    stats = harness.engine.stats().blocks
    assert (stats.free, stats.cached) == (stats.total, 0)


def test_garbage_of_a_faulty_step_is_never_found_in_the_cache(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_num_batched_tokens=8)
    harness.submit(make_request(list(range(20))))
    harness.step()
    harness.model.fault = RuntimeError("boom")
    harness.step()
    again = harness.submit(make_request(list(range(20))))
    harness.run()
    assert again.num_cached_tokens == 8
    assert harness.outputs[again.request_id] == expected_output(list(range(20)), 8)


def test_a_failed_prefill_keeps_its_blocks_while_a_link_may_read_them(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_num_batched_tokens=8)
    request = harness.submit(make_request(list(range(20)), kind=RequestKind.PREFILL))
    harness.step()
    harness.model.fault = RuntimeError("boom")
    harness.step()
    assert harness.ends[request.request_id].error is not None
    assert request.status is RequestStatus.HELD
    assert harness.engine.stats().blocks.owned == 5
    harness.engine.release_held(request.request_id)
    assert harness.engine.stats().blocks.owned == 0


def test_calls_for_ids_that_are_not_live_are_counted(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    engine = harness.engine
    engine.adopted("x", 0)
    engine.start("x", [1])
    engine.give_up_transfer("x")
    engine.release_held("x")
    engine.cancel("x", busy_slots=[1])
    engine.quiet([1])
    assert engine.stats().unknown_ids == 5
    assert engine.stats().blocks.free == 64


def test_rates_are_measured_by_the_engines_clock(make_engine: HarnessFactory) -> None:
    ticks = iter(range(1000))
    harness = make_engine(clock=lambda: next(ticks) / 100)  # every reading is 10 ms later
    request = harness.submit(make_request(PROMPT))
    assert harness.engine.stats().prefill_tokens_per_s == 0.0
    harness.run()
    stats = harness.engine.stats()
    assert stats.prefill_tokens_per_s == pytest.approx(len(PROMPT) / 0.01)
    assert stats.decode_step_ms == pytest.approx(10.0)
    assert request.first_scheduled == 0.0
