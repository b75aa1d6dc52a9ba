"""Requests that run from another one's KV: samples of one prompt, and branches of one text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from factories import GREEDY, EngineHarness, HarnessFactory, make_request
from fakes import FakeModel, expected_output

from engine.batch import ForwardBatch
from engine.errors import InternalError, QueueFull, RequestError
from engine.kv_cache import KvCache
from engine.parallel_sampling import further_samples
from engine.request import FinishReason, Request, RequestKind, RequestStatus
from engine.sampling_params import SamplingParams

RANDOM = SamplingParams(temperature=1.0, seed=7, max_tokens=6)


class UndecidedModel(FakeModel):
    """Likes many tokens nearly as well as the best, so that a draw depends on its seed."""

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        return super().forward(batch, kv) / 50


def prompt_of(length: int) -> list[int]:
    return [(3 * i + 1) % 500 for i in range(length)]


def submit_samples(harness: EngineHarness, request: Request, n: int) -> list[Request]:
    samples = [request, *further_samples(request, n)]
    harness.submit(request)
    harness.fork(request, samples[1:])
    return samples


@pytest.mark.parametrize("length", [7, 8, 9])
def test_each_sample_is_what_its_seed_gives_alone(make_engine: HarnessFactory, length: int) -> None:
    harness = make_engine(model=UndecidedModel())
    samples = submit_samples(harness, make_request(prompt_of(length), params=RANDOM), 4)
    harness.run()

    outputs = [harness.outputs[sample.request_id] for sample in samples]
    for sample, output in zip(samples, outputs, strict=True):
        alone = make_engine(model=UndecidedModel())
        same = alone.submit(make_request(prompt_of(length), params=sample.params))
        alone.run()
        assert output == alone.outputs[same.request_id]
    assert len({tuple(output) for output in outputs}) == 4


@pytest.mark.parametrize("caching", [True, False])
def test_samples_cost_one_prefill(make_engine: HarnessFactory, caching: bool) -> None:
    harness = make_engine(enable_prefix_caching=caching)
    submit_samples(harness, make_request(prompt_of(30), max_tokens=5), 4)
    harness.run()
    assert harness.model.num_tokens == 30 + 4 * 4  # the last token drawn needs no KV


@pytest.mark.parametrize(("length", "copies"), [(512, 0), (520, 7)])
def test_eight_samples_hold_one_copy_of_the_prompt_and_a_block_each(
    make_engine: HarnessFactory, length: int, copies: int
) -> None:
    harness = make_engine(num_blocks=64, block_size=16, max_num_batched_tokens=1024, model=UndecidedModel())
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8)
    samples = submit_samples(harness, make_request(prompt_of(length), params=params), 8)
    for _ in range(6):
        harness.step()

    prompt_blocks = length // 16
    assert len({tuple(sample.block_table[:prompt_blocks]) for sample in samples}) == 1
    stats = harness.engine.stats().blocks
    assert stats.owned == prompt_blocks + 8
    assert stats.copies_avoided == 7 * prompt_blocks
    assert stats.copies == copies


def test_fifty_requests_hold_one_copy_of_their_system_prompt(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=300, block_size=16, max_num_batched_tokens=2048, max_num_seqs=50)
    system = prompt_of(1000)
    requests = [harness.submit(make_request([*system, 7, i], max_tokens=10)) for i in range(50)]
    for _ in range(4):
        harness.step()

    assert all(request.status is RequestStatus.RUNNING for request in requests)
    assert len({tuple(request.block_table[:62]) for request in requests}) == 1
    assert harness.engine.stats().blocks.owned == 62 + sum(len(request.block_table) - 62 for request in requests)
    assert harness.engine.stats().blocks.copies_avoided == 49 * 62


def test_the_last_of_the_writers_writes_in_place(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    samples = submit_samples(harness, make_request(prompt_of(6)), 2)
    harness.step()
    shared = samples[0].block_table[1]
    assert samples[1].block_table[1] == shared
    harness.step()
    assert samples[0].block_table[1] != shared
    assert samples[1].block_table[1] == shared
    assert harness.engine.stats().blocks.copies == 1


def test_a_sharer_that_leaves_before_it_writes_costs_no_copy(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    samples = submit_samples(harness, make_request(prompt_of(6)), 2)
    harness.step()
    harness.engine.cancel(samples[0].request_id)
    harness.run()
    assert harness.engine.stats().blocks.copies == 0
    assert harness.outputs[samples[1].request_id] == expected_output(prompt_of(6), 8)


def test_samples_follow_a_parent_that_ends_with_its_first_token(make_engine: HarnessFactory) -> None:
    prompt = prompt_of(6)
    first = expected_output(prompt, 1)[0]
    harness = make_engine()
    parent = harness.submit(make_request(prompt, params=replace(GREEDY, stop_token_ids=(first,))))
    child = make_request(prompt)
    harness.fork(parent, [child])
    harness.run()
    assert harness.ends[parent.request_id].finish_reason is FinishReason.STOP
    assert harness.outputs[child.request_id] == expected_output(prompt, 8)
    assert harness.model.num_tokens == 6 + 7


def test_a_child_without_a_seat_waits_and_goes_on(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_num_seqs=2, model=UndecidedModel())
    samples = submit_samples(harness, make_request(prompt_of(9), params=RANDOM), 4)
    harness.step()
    assert [sample.status for sample in samples[2:]] == [RequestStatus.WAITING] * 2
    assert [len(harness.outputs[sample.request_id]) for sample in samples] == [1] * 4
    harness.run()
    assert [len(harness.outputs[sample.request_id]) for sample in samples] == [6] * 4


@pytest.mark.parametrize("caching", [True, False])
def test_samples_finish_in_a_pool_that_holds_one_of_them(make_engine: HarnessFactory, caching: bool) -> None:
    harness = make_engine(num_blocks=6, enable_prefix_caching=caching)
    samples = submit_samples(harness, make_request(prompt_of(10), max_tokens=14), 3)
    harness.run()
    for sample in samples:
        assert harness.outputs[sample.request_id] == expected_output(prompt_of(10), 14)
    assert harness.engine.stats().preemptions > 0


def test_samples_of_a_cancelled_request_compute_the_prompt_themselves(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    samples = submit_samples(harness, make_request(prompt_of(30)), 3)
    harness.step()
    harness.engine.cancel(samples[0].request_id)
    harness.run()
    for sample in samples[1:]:
        assert harness.outputs[sample.request_id] == expected_output(prompt_of(30), 8)


def test_samples_survive_a_fault_in_the_step_of_their_parent(make_engine: HarnessFactory) -> None:
    model = FakeModel()
    harness = make_engine(model=model)
    samples = submit_samples(harness, make_request(prompt_of(10)), 2)
    model.fault = RuntimeError("out of memory")
    harness.run()
    assert isinstance(harness.ends[samples[0].request_id].error, InternalError)
    assert harness.outputs[samples[1].request_id] == expected_output(prompt_of(10), 8)


def test_a_sample_that_cannot_draw_fails_alone(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    parent, child = (
        make_request(prompt_of(10)),
        make_request(prompt_of(10), params=SamplingParams(temperature=1.0, max_tokens=8)),
    )
    harness.submit(parent)
    harness.fork(parent, [child])  # has no seed
    harness.run()
    assert "without a seed" in str(harness.ends[child.request_id].error)
    assert harness.outputs[parent.request_id] == expected_output(prompt_of(10), 8)


def test_a_cancelled_sample_draws_nothing(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    samples = submit_samples(harness, make_request(prompt_of(10)), 2)
    harness.engine.cancel(samples[1].request_id)
    harness.run()
    assert harness.outputs[samples[1].request_id] == []
    assert len(harness.outputs[samples[0].request_id]) == 8


def test_a_waiting_sample_lets_others_pass(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_num_batched_tokens=8)
    samples = submit_samples(harness, make_request(prompt_of(14)), 2)
    other = harness.submit(make_request([9, 9, 9]))
    harness.step()
    harness.step()
    assert other.status is RequestStatus.RUNNING
    assert samples[1].status is RequestStatus.RUNNING
    harness.run()
    assert harness.outputs[other.request_id] == expected_output([9, 9, 9], 8)


def test_a_branch_shares_what_was_computed_and_goes_its_own_way(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    parent = harness.submit(make_request(prompt_of(9), max_tokens=12))
    for _ in range(5):
        harness.step()
    tokens = [*parent.token_ids[:-1], 77]  # another last token: a beam
    branch = make_request(tokens[:9], output=tokens[9:], max_tokens=12)
    harness.fork(parent, [branch])
    assert branch.status is RequestStatus.RUNNING
    assert branch.num_computed_tokens == parent.num_computed_tokens
    assert branch.block_table == parent.block_table[: len(branch.block_table)]
    before = harness.model.num_tokens
    harness.run()
    assert harness.outputs[parent.request_id] == expected_output(prompt_of(9), 12)
    assert harness.outputs[branch.request_id][len(tokens) - 9 :] == expected_output(tokens, 12 - (len(tokens) - 9))
    assert harness.model.num_tokens == before + 7 + 7


def test_a_branch_within_a_published_block_copies_it(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    parent = harness.submit(make_request(prompt_of(12), max_tokens=4))
    harness.step()
    branch = make_request([*prompt_of(6), 77], max_tokens=4)
    harness.fork(parent, [branch])
    assert (branch.num_computed_tokens, branch.num_published_blocks) == (6, 1)
    harness.run()
    assert harness.engine.stats().blocks.copies == 1
    assert harness.outputs[branch.request_id] == expected_output([*prompt_of(6), 77], 4)
    assert harness.outputs[parent.request_id] == expected_output(prompt_of(12), 4)


def test_a_child_of_a_request_that_is_gone_runs_by_itself(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    child = make_request(prompt_of(5))
    harness.fork(make_request(prompt_of(5)), [child])
    harness.run()
    assert harness.outputs[child.request_id] == expected_output(prompt_of(5), 8)
    assert harness.engine.stats().unknown_ids == 1


def test_all_children_are_accepted_or_none(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_waiting=3)
    parent = harness.submit(make_request(prompt_of(5)))
    with pytest.raises(QueueFull):
        harness.engine.fork(parent.request_id, further_samples(parent, 4))
    assert harness.engine.stats().waiting == 1
    with pytest.raises(RequestError, match="is live already"):
        harness.engine.fork(parent.request_id, [make_request([1], request_id="x"), make_request([1], request_id="x")])
    assert harness.engine.stats().waiting == 1
    harness.run()
    assert list(harness.ends) == [parent.request_id]


@pytest.mark.parametrize("of", [{"scope": b"another tenant"}, {"num_public_tokens": 4}])
@pytest.mark.parametrize("tail", [[], [1]])
def test_no_kv_is_shared_with_another_scope(make_engine: HarnessFactory, tail: list[int], of: dict[str, Any]) -> None:
    harness = make_engine()
    parent = harness.submit(make_request(prompt_of(5)))
    harness.step()
    own, foreign = make_request(prompt_of(5)), make_request([*prompt_of(5), *tail], **of)
    with pytest.raises(InternalError, match=f"scope of request {foreign.request_id}"):
        harness.engine.fork(parent.request_id, [own, foreign])
    harness.run()
    assert list(harness.ends) == [parent.request_id]


def test_a_prefill_request_draws_the_first_token_of_each_sample(make_engine: HarnessFactory) -> None:
    harness = make_engine(model=UndecidedModel())
    parent = make_request(prompt_of(9), params=RANDOM, kind=RequestKind.PREFILL)
    samples = submit_samples(harness, parent, 3)
    harness.run()
    assert [len(harness.outputs[sample.request_id]) for sample in samples] == [1, 1, 1]
    assert [sample.status for sample in samples] == [RequestStatus.HELD, *[RequestStatus.FINISHED] * 2]
    harness.engine.release_held(parent.request_id)


def test_samples_of_a_request_whose_kv_arrives_run_from_that_kv(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    prompt = prompt_of(9)
    parent = harness.reserve(make_request(prompt, kind=RequestKind.DECODE))
    same = make_request(prompt)
    harness.fork(parent, [same])
    harness.step()
    harness.bring(parent)
    harness.start(parent, expected_output(prompt, 1))
    harness.run()
    assert harness.outputs[parent.request_id] == harness.outputs[same.request_id] == expected_output(prompt, 8)
    assert harness.model.num_tokens == 7 + 8  # the child had the last token of the prompt to compute


def test_a_child_cannot_wait_for_kv_of_its_own(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    parent = harness.submit(make_request(prompt_of(5)))
    with pytest.raises(InternalError, match="reserve"):
        harness.engine.fork(parent.request_id, [make_request(prompt_of(5), kind=RequestKind.DECODE)])
    harness.run()
    assert list(harness.ends) == [parent.request_id]
