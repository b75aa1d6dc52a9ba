"""A real model with a sliding window on a prefill and a decode worker: what they give together is what one gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from families import load_family
from one_process_cluster import OneProcessCluster

from engine.model.registry import load_model

FAMILY = load_family("mistral")
WINDOW, BLOCK_SIZE = 24, 8
ALONE = {"local_prefill_max_tokens": 1000}
SAMPLED = {
    "temperature": 1.3,
    "seed": 7,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {5: 2.0},
    "logprobs": 3,
}


@pytest.fixture(autouse=True)
def real_model(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = FAMILY.write(tmp_path_factory.mktemp("mistral"))
    monkeypatch.setattr("one_process_cluster.PausingModel", lambda: load_model(folder, "float32"))


async def test_split_gives_the_tokens_of_transformers_and_sends_only_the_window(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        generation = await cluster.generate(FAMILY.token_ids[: FAMILY.num_prompt], len(FAMILY.greedy))

    assert generation.token_ids == FAMILY.greedy
    needed = -(-FAMILY.num_prompt // BLOCK_SIZE) - (FAMILY.num_prompt - WINDOW) // BLOCK_SIZE
    route = generation.route
    assert (route.blocks_sent, route.blocks_adopted, route.recomputed_tokens) == (needed, needed, 0)
    assert cluster.errors == {}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_split_gives_what_one_worker_gives(
    tmp_path_factory: pytest.TempPathFactory, sampling: dict[str, Any]
) -> None:
    prompts = [FAMILY.token_ids[start : start + length] for start, length in enumerate([1, 7, 23, 24, 25, 40, 63, 90])]

    async def outputs(**settings: Any) -> list[list[int]]:
        async with OneProcessCluster(tmp_path_factory.mktemp("cluster"), router=settings) as cluster:
            generations = await asyncio.gather(*(cluster.generate(prompt, 20, **sampling) for prompt in prompts))
            again = await asyncio.gather(*(cluster.generate(prompt, 20, **sampling) for prompt in prompts))
        assert cluster.errors == {}
        assert [g.token_ids for g in again] == [g.token_ids for g in generations], "a prefix hit changed tokens"
        return [generation.token_ids for generation in generations]

    assert await outputs() == await outputs(**ALONE)
