"""Prefill and decode workers with blocks of different sizes: outputs equal the oracle's, nothing is computed twice.

A router takes workers of one block size only, so far, because its keys and its affinity count in blocks. These tests
let it take any: what they show is that the workers and their links do the rest.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from fakes import expected_output
from one_process_cluster import OneProcessCluster

PROMPT = [(7 * i + 3) % 500 for i in range(100)]


@pytest.fixture(autouse=True)
def any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.registry.check_peer", lambda *arguments: None)


def unequal(folder: Path, prefill: int, decode: int) -> OneProcessCluster:
    return OneProcessCluster(folder, prefill={"block_size": prefill}, decode={"block_size": decode})


@pytest.mark.parametrize(("prefill", "decode"), [(16, 8), (16, 32), (8, 16), (32, 8)])
@pytest.mark.parametrize("length", [1, 7, 8, 33, 64, 100])
async def test_a_prompt_of_any_length_survives_the_hand_over(
    tmp_path: Path, prefill: int, decode: int, length: int
) -> None:
    async with unequal(tmp_path, prefill, decode) as cluster:
        generation = await cluster.generate(PROMPT[:length], 10)

    assert generation.token_ids == expected_output(PROMPT[:length], 10)
    route = generation.route
    assert (route.blocks_adopted, route.recomputed_tokens) == (-(-length // decode), 0)
    assert route.transport == "tcp"
    assert cluster.errors == {}


@pytest.mark.parametrize(("prefill", "decode"), [(16, 8), (8, 32)])
async def test_many_requests_at_once_each_get_their_own_tokens(tmp_path: Path, prefill: int, decode: int) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(500) for _ in range(rng.randint(1, 120))] for _ in range(24)]
    async with unequal(tmp_path, prefill, decode) as cluster:
        generations = await asyncio.gather(*(cluster.generate(prompt, 12) for prompt in prompts))

    assert [g.token_ids for g in generations] == [expected_output(prompt, 12) for prompt in prompts]
    assert sum(g.route.recomputed_tokens for g in generations) == 0
    assert cluster.errors == {}


@pytest.mark.parametrize(("prefill", "decode"), [(16, 8), (8, 32)])
async def test_a_shared_prefix_is_neither_computed_nor_sent_again(tmp_path: Path, prefill: int, decode: int) -> None:
    async with unequal(tmp_path, prefill, decode) as cluster:
        await cluster.generate(PROMPT, 4)
        tail = [9, 9, 9, 9, 9]
        generation = await cluster.generate(PROMPT[:96] + tail, 12)

    assert generation.token_ids == expected_output(PROMPT[:96] + tail, 12)
    assert generation.route.blocks_adopted == 1
    assert generation.finished is not None
    assert generation.finished.usage.cached_tokens == 96


async def test_a_cancelled_request_leaves_nothing(tmp_path: Path) -> None:
    async with unequal(tmp_path, 16, 8) as cluster:
        calls = [cluster.call(PROMPT, 200) for _ in range(4)]
        for call in calls:
            await call.read()
            call.cancel()
        generation = await cluster.generate(PROMPT, 10)

    assert generation.token_ids == expected_output(PROMPT, 10)


async def test_a_block_size_that_cannot_be_converted_costs_the_hand_over_and_no_more(tmp_path: Path) -> None:
    async with unequal(tmp_path, 64, 8) as cluster:
        generation = await cluster.generate(PROMPT, 10)

    assert generation.token_ids == expected_output(PROMPT, 10)
    assert generation.route.recomputed_tokens == len(PROMPT)
