from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from factories import fake_layout, make_request
from fakes import VOCAB_SIZE, FakeModel, expected_output

from engine.batch import ForwardBatch, ScheduledBatch, ScheduledSequence
from engine.config import CacheConfig
from engine.errors import InternalError
from engine.kv_cache import KvCache
from engine.model_runner import ModelRunner, check_model_fits_pool, to_forward_batch
from engine.request import Request


@pytest.fixture
def kv() -> Iterator[KvCache]:
    kv = KvCache(fake_layout(), 8)
    yield kv
    kv.close()


def placed(tokens: list[int], blocks: list[int], num_computed: int = 0) -> Request:
    request = make_request(tokens)
    request.block_table = blocks
    request.num_computed_tokens = num_computed
    return request


def test_tokens_of_all_sequences_follow_one_another() -> None:
    chunk = ScheduledSequence(placed([5, 6, 7, 8, 9], [2, 0], num_computed=1), num_tokens=3, samples=False)
    decode = ScheduledSequence(placed([1, 2, 3], [4], num_computed=2), num_tokens=1, samples=True)
    prompt = ScheduledSequence(placed([4, 4], [3]), num_tokens=2, samples=True)
    batch = to_forward_batch(ScheduledBatch((chunk, decode, prompt)))
    assert batch.token_ids.tolist() == [6, 7, 8, 3, 4, 4]
    assert batch.positions.tolist() == [1, 2, 3, 2, 0, 1]
    assert batch.query_starts == [0, 3, 4, 6]
    assert batch.context_lens == [4, 3, 2]
    assert batch.block_tables == [[2, 0], [4], [3]]
    assert batch.sample_rows == [3, 5]
    assert (batch.token_ids.dtype, batch.positions.dtype) == (torch.int64, torch.int64)


def test_logits_come_in_the_order_of_the_sampling_sequences(kv: KvCache) -> None:
    first = ScheduledSequence(placed([5, 6], [0]), num_tokens=2, samples=True)
    chunk = ScheduledSequence(placed([9, 8, 7], [1]), num_tokens=1, samples=False)
    second = ScheduledSequence(placed([7], [2]), num_tokens=1, samples=True)
    logits = ModelRunner(FakeModel(), kv).forward(ScheduledBatch((first, chunk, second)))
    assert logits.argmax(dim=-1).tolist() == expected_output([5, 6], 1) + expected_output([7], 1)


def test_logits_of_a_wrong_shape_are_a_fault(kv: KvCache) -> None:
    class ShortModel(FakeModel):
        def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
            return super().forward(batch, kv)[:-1]

    batch = ScheduledBatch((ScheduledSequence(placed([5], [0]), num_tokens=1, samples=True),))
    with pytest.raises(InternalError, match=rf"shape \(0, {VOCAB_SIZE}\), expected \(1, {VOCAB_SIZE}\)"):
        ModelRunner(ShortModel(), kv).forward(batch)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CacheConfig(num_blocks=9, block_size=4), "num_blocks 8, the engine needs 9"),
        (CacheConfig(num_blocks=8, block_size=8), "block_size 4, the engine needs 8"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(kv: KvCache, config: CacheConfig, name: str) -> None:
    with pytest.raises(InternalError, match=name):
        check_model_fits_pool(FakeModel(), kv, config)
