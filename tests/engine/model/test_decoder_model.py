"""The decoder against an independent dense float64 one, and against itself under other batchings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_reference import dense_greedy, dense_logits
from tiny_llama import TINY, PagedRunner, Tensors, model_of, random_tensors, with_heads

from engine.batch import ForwardBatch
from engine.config import ModelConfig, RopeScaling

LLAMA3_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
CONFIGS = {
    "grouped queries": TINY,
    "one kv head": with_heads(3, 1),
    "as many kv heads as heads": with_heads(4, 4),
    "untied": replace(TINY, tie_word_embeddings=False),
    "llama 3 rope scaling": replace(TINY, rope_scaling=LLAMA3_SCALING, rope_theta=500000.0),
}


def random_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY.vocab_size) for _ in range(count)]


def assert_close(logits: torch.Tensor, config: ModelConfig, tensors: Tensors, token_ids: Sequence[int]) -> None:
    expected = dense_logits(config, tensors, token_ids)[-len(logits) :]
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_odd_chunks_gives_the_dense_logits(name: str) -> None:
    config = CONFIGS[name]
    tensors = random_tensors(config)
    token_ids = random_tokens(150)

    logits = PagedRunner(model_of(config, tensors), block_size=16).run("a", token_ids, [1, 30, 2, 77, 16, 24])

    assert_close(logits, config, tensors, token_ids)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_decode_across_block_borders_gives_the_dense_logits(block_size: int) -> None:
    tensors = random_tensors(TINY)
    token_ids = random_tokens(40)
    runner = PagedRunner(model_of(TINY, tensors), block_size=block_size)

    logits = runner.run("a", token_ids, [7] + [1] * 33)

    assert_close(logits, TINY, tensors, token_ids)


def test_sequences_of_one_batch_do_not_see_each_other() -> None:
    tensors = random_tensors(TINY)
    runner = PagedRunner(model_of(TINY, tensors), block_size=8)
    prompts = {"a": random_tokens(37, 1), "b": random_tokens(5, 2), "c": random_tokens(64, 3), "d": random_tokens(9, 4)}

    runner.forward({"a": prompts["a"][:20], "b": prompts["b"][:4], "c": prompts["c"][:1]})
    logits = runner.forward({"c": prompts["c"][1:], "b": prompts["b"][4:], "d": prompts["d"], "a": prompts["a"][20:]})

    for name, token_ids in prompts.items():
        assert_close(logits[name], TINY, tensors, token_ids)


def test_greedy_tokens_are_those_of_the_dense_decoder() -> None:
    tensors = random_tensors(TINY, seed=3)
    prompt = random_tokens(21, 5)
    runner = PagedRunner(model_of(TINY, tensors), block_size=4)

    output = [int(runner.run("a", prompt, [21])[-1].argmax())]
    while len(output) < 24:
        output.append(int(runner.run("a", output[-1:], [1])[-1].argmax()))

    assert output == dense_greedy(TINY, tensors, prompt, 24)


def test_only_the_wanted_rows_come_back_in_float32() -> None:
    tensors = random_tensors(TINY)
    model = model_of(TINY, tensors, "bfloat16")
    runner = PagedRunner(model, block_size=16, dtype="bfloat16")
    batch = ForwardBatch(
        token_ids=torch.tensor(random_tokens(10)),
        positions=torch.arange(10),
        query_starts=[0, 10],
        context_lens=[10],
        block_tables=[[5]],
        sample_rows=[3, 9],
    )

    logits = model.forward(batch, runner.kv)

    assert logits.dtype == torch.float32
    assert logits.shape == (2, TINY.vocab_size)
    assert torch.isfinite(logits).all()


def test_a_batch_that_samples_nothing_still_writes_its_kv() -> None:
    tensors = random_tensors(TINY)
    model = model_of(TINY, tensors)
    runner = PagedRunner(model, block_size=16)
    batch = ForwardBatch(
        token_ids=torch.tensor(random_tokens(10)),
        positions=torch.arange(10),
        query_starts=[0, 10],
        context_lens=[10],
        block_tables=[[5]],
        sample_rows=[],
    )

    logits = model.forward(batch, runner.kv)

    assert logits.shape == (0, TINY.vocab_size)
    assert torch.isfinite(runner.kv.pool[5, :, :, :, :10]).all()
    assert torch.isnan(runner.kv.pool[5, :, :, :, 10:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("chunk_sizes", [[60], [30, 30], [57, 1, 1, 1]])
def test_short_types_stay_near_the_dense_logits(dtype: str, chunk_sizes: list[int]) -> None:
    tensors = random_tensors(TINY)
    token_ids = random_tokens(60)
    runner = PagedRunner(model_of(TINY, tensors, dtype), block_size=16, dtype=dtype)

    logits = runner.run("a", token_ids, chunk_sizes)

    expected = dense_logits(TINY, tensors, token_ids)
    error = np.abs(logits.numpy() - expected).max() / np.abs(expected).max()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"),
    [("float32", 1e-5), ("bfloat16", 0.01), ("float16", 0.002), ("fp8_e4m3", 0.15), ("int8", 0.06)],
)
@pytest.mark.parametrize("chunk_sizes", [[60], [30, 30], [7] + [1] * 53], ids=str)
def test_each_type_of_kv_stays_near_the_dense_logits(kv_dtype: str, tolerance: float, chunk_sizes: list[int]) -> None:
    """The model is one that makes much of small errors; `bench.kv_quality` measures a real one."""
    tensors = random_tensors(TINY)
    token_ids = random_tokens(60)

    logits = PagedRunner(model_of(TINY, tensors), block_size=16, dtype=kv_dtype).run("a", token_ids, chunk_sizes)

    expected = dense_logits(TINY, tensors, token_ids)
    assert np.sqrt(((logits.numpy() - expected) ** 2).mean() / (expected**2).mean()) < tolerance


@pytest.mark.parametrize(
    "chunk_sizes", [[300], [7, 100, 150, 43], [128, 128, 44], [1] * 20 + [3] * 10 + [130, 120], [299, 1]], ids=str
)
def test_float32_logits_do_not_depend_on_the_chunks_to_the_last_bit(chunk_sizes: list[int]) -> None:
    model = model_of(TINY, random_tensors(TINY))
    token_ids = random_tokens(300)

    logits = PagedRunner(model, block_size=16).run("a", token_ids, chunk_sizes)

    assert torch.equal(logits, PagedRunner(model, block_size=16).run("a", token_ids, [200, 100]))


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("num_others", [1, 2, 7, 30])
def test_float32_logits_do_not_depend_on_the_batch_to_the_last_bit(num_others: int, kv_dtype: str) -> None:
    model = model_of(TINY, random_tensors(TINY))
    token_ids = random_tokens(20)
    alone = PagedRunner(model, block_size=16, dtype=kv_dtype).run("a", token_ids, [10] + [1] * 10)
    runner = PagedRunner(model, block_size=16, dtype=kv_dtype)

    together = [runner.forward({"a": token_ids[:10]})["a"]]
    for i in range(10, 20):
        others = {f"other {k}": [(i + k) % TINY.vocab_size] for k in range(num_others)}
        together.append(runner.forward({**others, "a": token_ids[i : i + 1]})["a"])

    assert torch.equal(torch.cat(together), alone)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8_e4m3", "int8"])
def test_an_earlier_pass_over_the_same_slots_leaves_no_trace(kv_dtype: str) -> None:
    model = model_of(TINY, random_tensors(TINY))
    token_ids = random_tokens(30)
    runner = PagedRunner(model, block_size=16, dtype=kv_dtype)
    expected = PagedRunner(model, block_size=16, dtype=kv_dtype).run("a", token_ids, [13, 17])

    for block in range(runner.kv.num_blocks):
        runner.kv.block(block)[:] = b"\x71" * runner.kv.layout.block_bytes  # as float32, and as a scale: 1e30

    assert torch.equal(runner.run("a", token_ids, [13, 17]), expected)
