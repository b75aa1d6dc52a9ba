from __future__ import annotations

import pytest
import torch
from factories import HarnessFactory, fake_layout, make_request
from fakes import FewWords, expected_output

from engine.batch import ForwardBatch
from engine.kv_cache import KvCache
from engine.request import RequestKind
from engine.sampler import TokenLogprobs

PROMPT = list(range(30, 40))  # 2 full blocks and a half


@pytest.mark.parametrize("kind", [RequestKind.LOCAL, RequestKind.PREFILL])
@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_are_told_once_each_however_much_is_cached(
    make_engine: HarnessFactory, num_top: int, kind: RequestKind
) -> None:
    harness = make_engine(max_num_batched_tokens=8, model=FewWords())
    harness.submit(make_request(PROMPT, max_tokens=2))  # leaves the prompt in the cache
    harness.run()
    request = make_request(PROMPT, max_tokens=2, kind=kind)
    request.prompt_logprobs = num_top
    harness.submit(request)
    neighbour = harness.submit(make_request([*PROMPT, 5], max_tokens=2))

    told: list[TokenLogprobs] = []
    while harness.engine.has_work():
        for update in harness.step().updates:
            assert update.request_id == request.request_id or not update.prompt_logprobs
            told += update.prompt_logprobs

    assert (request.num_cached_tokens, neighbour.num_cached_tokens > 0) == (0, True)
    kv = KvCache(fake_layout(), 8)
    logits = FewWords().forward(
        ForwardBatch(
            token_ids=torch.tensor(PROMPT),
            positions=torch.arange(len(PROMPT)),
            query_starts=[0, len(PROMPT)],
            context_lens=[len(PROMPT)],
            block_tables=[list(range(8))],
            sample_rows=list(range(len(PROMPT))),
        ),
        kv,
    )
    kv.close()
    expected = logits.log_softmax(dim=-1)
    assert [each.logprob for each in told] == pytest.approx(
        [float(expected[i, token_id]) for i, token_id in enumerate(PROMPT[1:])], abs=1e-4
    )
    assert all(len(each.top) == num_top for each in told)
    assert harness.outputs[request.request_id][0] == int(logits[-1].argmax())
    harness.engine.cancel(request.request_id)


def test_prompt_logprobs_survive_a_preemption_without_being_told_again(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8, max_num_batched_tokens=8, max_num_seqs=2)
    harness.submit(make_request(list(range(6)), max_tokens=20))
    request = make_request(list(range(40, 46)), max_tokens=20)
    request.prompt_logprobs = 0
    harness.submit(request)

    told = 0
    while harness.engine.has_work():
        told += sum(len(update.prompt_logprobs) for update in harness.step().updates)

    assert request.num_preemptions > 0
    assert told == 5
    assert harness.outputs[request.request_id] == expected_output(list(range(40, 46)), 20)
