from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import load_family
from rank_threads import LockstepModel
from tiny_llama import TINY, PagedRunner, model_of, random_tensors, write_checkpoint

from engine.errors import ConfigError
from engine.model.decoder import DecoderWeights
from engine.tensor_parallel.shards import Shard, check_shards


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_parts_of_each_weight_are_the_whole_and_their_products_add_up_to_its(size: int) -> None:
    config = replace(TINY, num_heads=48, num_kv_heads=24, intermediate_size=96, qkv_bias=True, qk_norm=True)
    tensors = {name: torch.from_numpy(tensor) for name, tensor in random_tensors(config).items()}
    shards = [Shard(rank, size) for rank in range(size)]
    names = [DecoderWeights(shard.config(config), torch.float32, "meta").parts() for shard in shards]

    for name, whole in tensors.items():
        parts = [shard.cut(name, whole) for shard in shards]
        assert [part.shape for part in parts] == [expected[name].shape for expected in names]
        x = torch.randn(5, whole.shape[-1], generator=torch.Generator().manual_seed(0))
        if any(module in name for module in ("o_proj", "down_proj")):
            products = [a @ part.T for a, part in zip(x.chunk(size, -1), parts, strict=True)]
            torch.testing.assert_close(torch.stack(products).sum(0), x @ whole.T)
        elif whole.shape != parts[0].shape:
            assert torch.equal(torch.cat(parts), whole)
        else:
            assert all(torch.equal(part, whole) for part in parts)


def test_heads_that_cannot_be_shared_out_evenly_are_refused_with_field_and_limit() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide the model's num_kv_heads 2"):
        check_shards(TINY, 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not divide the model's intermediate_size 81"):
        Shard(0, 2).config(replace(TINY, intermediate_size=81))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8_e4m3", "int8"])
def test_ranks_write_the_kv_of_one_device_and_give_its_logits(tmp_path: Path, kv_dtype: str) -> None:
    tensors = random_tensors(TINY)
    write_checkpoint(tmp_path, TINY, tensors)
    token_ids = [random.Random(0).randrange(97) for _ in range(45)]
    alone = PagedRunner(model_of(TINY, tensors), block_size=8, dtype=kv_dtype)
    ranks = PagedRunner(LockstepModel(tmp_path, 2), block_size=8, dtype=kv_dtype)

    expected, got = (runner.run("a", token_ids, [20, 1, 3, 20, 1]) for runner in (alone, ranks))

    tolerance = 1e-4 if kv_dtype == "float32" else 0.2
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_two_ranks_with_norms_of_their_heads_draw_the_tokens_of_transformers(tmp_path: Path) -> None:
    family = load_family("qwen3")
    runner = PagedRunner(LockstepModel(family.write(tmp_path), 2), block_size=16)
    token_ids = family.token_ids[: family.num_prompt] + family.greedy

    logits = runner.run("a", token_ids, [len(token_ids)])

    assert logits[family.num_prompt - 1 : -1].argmax(-1).tolist() == family.greedy
