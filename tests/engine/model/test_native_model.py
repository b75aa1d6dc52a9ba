"""The native forward pass against the dense float64 decoder, and against itself under every other batching."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_reference import dense_logits
from families import FAMILIES, load_family
from tiny_llama import TINY, PagedRunner, Tensors, fill_with_nan, model_of, random_tensors, weights_of, with_heads

from engine.batch import ForwardBatch
from engine.config import LocalLayers, ModelConfig, RopeScaling
from engine.errors import InternalError
from engine.interruption import PassControl, PassStopped
from engine.model.decoder import DecoderModel
from engine.model.native_decoder import NativeModel, obstacle
from engine.model.packed_weights import pack
from engine.model.registry import load_model
from engine.native.decoder import NativeDecoder, load_decoder

LLAMA3_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
CONFIGS = {
    "grouped queries": TINY,
    "one kv head": with_heads(3, 1),
    "as many kv heads as heads": with_heads(4, 4),
    "untied": replace(TINY, tie_word_embeddings=False),
    "llama 3 rope scaling": replace(TINY, rope_scaling=LLAMA3_SCALING, rope_theta=500000.0),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> NativeDecoder:
    return load_decoder(tmp_path_factory.getbasetemp() / "native")


def rounded(tensors: Tensors) -> Tensors:
    return {name: torch.from_numpy(tensor).bfloat16().float().numpy() for name, tensor in tensors.items()}


def runner(config: ModelConfig, decoder: NativeDecoder, *, num_threads: int = 1, block_size: int = 16) -> PagedRunner:
    weights = pack(config, weights_of(config, random_tensors(config), "bfloat16"), decoder)
    model = NativeModel(config, weights, decoder, num_threads)
    return PagedRunner(model, block_size=block_size, num_blocks=400, dtype="bfloat16")


def int8_runner(decoder: NativeDecoder, config: ModelConfig = TINY, num_threads: int = 1) -> PagedRunner:
    weights = pack(config, weights_of(config, random_tensors(config), "bfloat16"), decoder, int8=True)
    model = NativeModel(config, weights, decoder, num_threads)
    return PagedRunner(model, block_size=16, num_blocks=400, dtype="bfloat16")


def random_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY.vocab_size) for _ in range(count)]


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_as_near_to_float64_as_the_reference_in_bfloat16(name: str, decoder: NativeDecoder) -> None:
    config, chunks = CONFIGS[name], [1, 30, 2, 77, 16, 24]
    tensors, token_ids = rounded(random_tensors(config)), random_tokens(150)
    expected = dense_logits(config, tensors, token_ids)

    def error(logits: torch.Tensor) -> float:
        return float(np.abs(logits.numpy() - expected).mean())

    reference = PagedRunner(model_of(config, tensors, "bfloat16"), block_size=16, dtype="bfloat16")
    native = runner(config, decoder)

    assert error(native.run("a", token_ids, chunks)) <= 1.2 * error(reference.run("a", token_ids, chunks))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_as_near_to_transformers_as_the_reference_in_bfloat16(
    name: str, decoder: NativeDecoder, tmp_path: Path
) -> None:
    family = load_family(name)
    folder = family.write(tmp_path)

    def error(native: NativeDecoder | None) -> float:
        run = PagedRunner(load_model(folder, "bfloat16", native), block_size=16, dtype="bfloat16")
        return float((run.run("a", family.token_ids, [1, 30, 2, 37, 30]) - family.logits).abs().mean())

    assert error(decoder) <= 1.2 * error(None)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma3"])
def test_of_each_family_chunks_neighbours_and_threads_change_no_bit(
    name: str, decoder: NativeDecoder, tmp_path: Path
) -> None:
    family = load_family(name)
    folder = family.write(tmp_path)

    def run(num_threads: int, chunks: list[int], neighbours: bool) -> torch.Tensor:
        runner = PagedRunner(load_model(folder, "bfloat16", decoder, num_threads), block_size=8, dtype="bfloat16")
        parts, start = [], 0
        for number, size in enumerate(chunks):
            others = {f"n{number}": family.token_ids[: number % 5 + 1]} if neighbours else {}
            parts.append(runner.forward({**others, "a": family.token_ids[start : start + size]})["a"])
            start += size
        return torch.cat(parts)

    whole = run(1, [100], False)
    assert torch.equal(run(3, [1] * 20 + [7, 13, 60], True), whole)
    assert torch.equal(run(1, [23] + [1] * 17 + [60], True), whole)


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_of_random_families_are_as_near_as_the_reference(seed: int, decoder: NativeDecoder) -> None:
    config, block_size, chunks = random_config(seed)
    tensors, token_ids = rounded(random_tensors(config, seed)), random_tokens(sum(chunks), seed)
    expected = PagedRunner(model_of(config, tensors), block_size=block_size, num_blocks=400)
    in_bfloat16 = PagedRunner(
        model_of(config, tensors, "bfloat16"), block_size=block_size, num_blocks=400, dtype="bfloat16"
    )
    native = PagedRunner(
        NativeModel(config, pack(config, weights_of(config, tensors, "bfloat16"), decoder), decoder, seed % 3 + 1),
        block_size=block_size,
        num_blocks=400,
        dtype="bfloat16",
    )
    logits = expected.run("a", token_ids, chunks)

    def error(runner: PagedRunner) -> float:
        return float((runner.run("a", token_ids, chunks) - logits).abs().mean())

    assert error(native) <= 1.3 * error(in_bfloat16)


def random_config(seed: int) -> tuple[ModelConfig, int, list[int]]:
    """A model of any combination of what families have, a block size, and chunks."""
    rng = random.Random(seed)
    num_kv_heads, num_layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    local = tuple(i for i in range(num_layers) if rng.random() < 0.6)
    config = replace(
        TINY,
        hidden_size=rng.choice([32, 48, 112]),
        intermediate_size=rng.choice([16, 80, 144]),
        num_layers=num_layers,
        num_heads=num_kv_heads * rng.choice([1, 2, 5]),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice([16, 32, 80]),
        tie_word_embeddings=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        qk_norm=rng.random() < 0.5,
        post_norms=rng.random() < 0.5,
        norm_offset=rng.choice([0.0, 1.0]),
        activation=rng.choice(["silu", "gelu_tanh"]),
        attention_scale=rng.choice([None, 0.3]),
        scale_embedding=rng.random() < 0.5,
        final_soft_cap=rng.choice([None, 5.0]),
        local=LocalLayers(window=rng.choice([1, 9, 64, 70]), layers=local, rope_theta=rng.choice([None, 500.0])),
    )
    chunks = [rng.randint(1, 60) for _ in range(3)] + [1] * 10
    return config, rng.choice([1, 8, 16, 32]), chunks


@pytest.mark.parametrize("name", ["grouped queries", "untied"])
def test_with_int8_weights_it_is_as_near_to_float64_as_the_reference(name: str, decoder: NativeDecoder) -> None:
    config, token_ids = CONFIGS[name], random_tokens(150)
    tensors = rounded(random_tensors(config))
    expected = dense_logits(config, tensors, token_ids)
    model = DecoderModel(config, weights_of(config, tensors, "bfloat16"), int8=True)

    def error(run: PagedRunner) -> float:
        return float(np.abs(run.run("a", token_ids, [1, 30, 2, 77, 40]).numpy() - expected).mean())

    reference = error(PagedRunner(model, block_size=16, dtype="bfloat16"))
    in_bfloat16 = error(runner(config, decoder))
    assert in_bfloat16 < error(int8_runner(decoder, config)) <= 1.2 * reference


def test_with_int8_weights_chunks_neighbours_and_threads_change_no_bit(decoder: NativeDecoder) -> None:
    token_ids = random_tokens(90)
    whole = int8_runner(decoder).run("a", token_ids, [90])

    other = int8_runner(decoder, num_threads=3)
    parts = [other.forward({"n": random_tokens(5, seed=1), "a": token_ids[:13]})["a"]]
    parts += [other.forward({"a": [token_id]})["a"] for token_id in token_ids[13:30]]
    parts += [other.forward({"a": token_ids[30:]})["a"]]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_chunks_and_neighbours_change_no_bit(block_size: int, decoder: NativeDecoder) -> None:
    token_ids = random_tokens(90)
    whole = runner(TINY, decoder, block_size=block_size).run("a", token_ids, [90])

    for chunks in ([1] * 90, [64, 1, 25], [7, 13, 40, 30]):
        other = runner(TINY, decoder, block_size=block_size)
        parts, start = [], 0
        for number, size in enumerate(chunks):
            step = {"a": token_ids[start : start + size]}
            if number % 2:
                step = {f"n{number}": random_tokens(number % 5 + 1, seed=number), **step}
            parts.append(other.forward(step)["a"])
            start += size
        assert torch.equal(torch.cat(parts), whole)


def test_a_block_size_that_is_no_power_of_two_is_refused(decoder: NativeDecoder) -> None:
    with pytest.raises(InternalError, match="block_size 6 is no power of two"):
        runner(TINY, decoder, block_size=6).forward({"a": [1, 2]})


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_pass_that_is_told_to_stop_writes_no_layer(num_threads: int, decoder: NativeDecoder) -> None:
    run = runner(TINY, decoder, num_threads=num_threads)
    control = PassControl()
    batch = ForwardBatch(
        token_ids=torch.tensor([1, 2]),
        positions=torch.tensor([0, 1]),
        query_starts=[0, 2],
        context_lens=[2],
        block_tables=[[3]],
        sample_rows=[1],
        control=control,
    )
    run.model.forward(batch, run.kv)
    assert control.layers_done == TINY.num_layers - 1

    fill_with_nan(run.kv)
    control.stop = 1
    with pytest.raises(PassStopped):
        run.model.forward(batch, run.kv)
    assert control.layers_done == 0
    assert run.kv.pool.isnan().all()


def test_threads_change_no_bit(decoder: NativeDecoder) -> None:
    prompts = {"a": random_tokens(70, 1), "b": random_tokens(3, 2), "c": random_tokens(33, 3)}
    one = runner(with_heads(6, 3), decoder).forward(prompts)
    three = runner(with_heads(6, 3), decoder, num_threads=3).forward(prompts)

    assert all(torch.equal(one[name], three[name]) for name in prompts)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_tables", [[400]], "blocks 400 to 400 are not all in a pool of 400"),
        ("block_tables", [[-1]], "blocks -1 to -1 are not all"),
        ("token_ids", torch.tensor([5, 97]), "tokens 5 to 97 are not all in 97"),
        ("token_ids", torch.tensor([-5, 3]), "tokens -5 to 3 are not all in 97"),
        ("positions", torch.tensor([0, 99]), "sequence 0: its tokens are not the last of a context of 2"),
    ],
)
def test_what_leads_outside_is_refused_before_anything_is_written(
    field: str, value: object, message: str, decoder: NativeDecoder
) -> None:
    run = runner(TINY, decoder)
    fields: dict[str, Any] = {
        "token_ids": torch.tensor([1, 2]),
        "positions": torch.tensor([0, 1]),
        "query_starts": [0, 2],
        "context_lens": [2],
        "block_tables": [[3]],
        "sample_rows": [1],
    }

    with pytest.raises(InternalError, match=message):
        run.model.forward(ForwardBatch(**fields | {field: value}), run.kv)
    assert run.kv.pool.isnan().all()


@pytest.mark.parametrize(
    ("config", "dtype", "kv_dtype", "why"),
    [
        (TINY, "float32", "float32", "dtype is float32, not bfloat16"),
        (TINY, "bfloat16", "int8", "kv_cache_dtype is int8, not bfloat16"),
        (replace(TINY, head_dim=24), "bfloat16", "bfloat16", "head_dim 24 is no multiple of 16"),
        (replace(TINY, head_dim=512), "bfloat16", "bfloat16", "head_dim 512 is more than 256"),
        (TINY, "bfloat16", "bfloat16", None),
    ],
)
def test_what_it_cannot_run_it_says(config: ModelConfig, dtype: str, kv_dtype: str, why: str | None) -> None:
    assert obstacle(config, dtype, kv_dtype) == why


def test_it_has_no_room_for_int8_sums_of_very_many_products() -> None:
    assert obstacle(replace(TINY, intermediate_size=1 << 16), "bfloat16", "bfloat16", "int8") is None
    why = obstacle(replace(TINY, intermediate_size=1 << 17), "bfloat16", "bfloat16", "int8")
    assert why is not None
    assert "131072 products" in why


@pytest.mark.model
def test_the_real_model_draws_what_the_reference_draws(smollm2_folder: Path, decoder: NativeDecoder) -> None:
    token_ids = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 6388, 314]
    native, reference = load_model(smollm2_folder, "bfloat16", decoder), load_model(smollm2_folder, "bfloat16")
    logits = [
        PagedRunner(model, block_size=16, num_blocks=8, dtype="bfloat16").run("a", token_ids, [12])
        for model in (native, reference)
    ]

    assert logits[0].argmax(-1).tolist() == logits[1].argmax(-1).tolist()
