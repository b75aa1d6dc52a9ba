"""Tenants with a declared system prompt hold its full blocks once, and share nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import expected_output
from one_process_cluster import Generation, OneProcessCluster
from tenants_file import write_tenants

BLOCK = 8
PUBLIC = [(5 * i + 1) % 500 for i in range(5 * BLOCK + 3)]
"""The last three tokens fill no block."""
TAIL = [7, 11, 13, *range(40)]
PROMPT = [*PUBLIC, *TAIL]


def settings(folder: Path, *declared: list[int]) -> dict[str, Any]:
    """Of a router with tenants `a` and `b`."""
    router = {"api_keys": str(write_tenants(folder / "keys.yaml", a={}, b={}))}
    if declared:
        path = folder / "prefixes.yaml"
        path.write_text(yaml.safe_dump([{"token_ids": token_ids} for token_ids in declared]))
        router["public_prefixes"] = str(path)
    return router


async def ask(cluster: OneProcessCluster, tenant: str, prompt: list[int]) -> Generation:
    """Two tokens, so that the decode worker has a part and an output fills no block."""
    generation = await cluster.generate(prompt, 2, api_key=f"key-of-{tenant}")
    assert generation.token_ids == expected_output(prompt, 2)
    return generation


def cached_tokens(generation: Generation) -> int:
    assert generation.finished is not None
    return generation.finished.usage.cached_tokens


async def blocks_cached(cluster: OneProcessCluster) -> list[int]:
    return [(await worker.check_idle()).blocks_cached for worker in cluster.workers]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_two_tenants_hold_one_copy_of_a_declared_prefix_and_share_nothing_behind_it(
    tmp_path: Path, num_prefill: int
) -> None:
    router = settings(tmp_path, PUBLIC)
    async with OneProcessCluster(tmp_path, num_prefill=num_prefill, router=router) as cluster:
        first, second = await ask(cluster, "a", PROMPT), await ask(cluster, "b", PROMPT)
        again = await ask(cluster, "b", PROMPT)
        held = await blocks_cached(cluster)

    num_full = len(PROMPT) // BLOCK
    assert [cached_tokens(first), cached_tokens(second)] == [0, 5 * BLOCK]
    assert cached_tokens(again) >= (num_full - 1) * BLOCK
    assert held == [5 + 2 * (num_full - 5)] * len(held)


@pytest.mark.parametrize("declared", [(), (PUBLIC[: BLOCK - 1],), ([499, *PUBLIC],)])
async def test_equal_prompts_of_two_tenants_share_nothing_that_is_not_declared(
    tmp_path: Path, declared: tuple[list[int], ...]
) -> None:
    router = settings(tmp_path, *declared)
    async with OneProcessCluster(tmp_path, router=router) as cluster:
        answers = [await ask(cluster, tenant, PROMPT) for tenant in ("a", "b")]
        held = await blocks_cached(cluster)

    assert [cached_tokens(answer) for answer in answers] == [0, 0]
    assert held == [2 * (len(PROMPT) // BLOCK)] * 2


async def test_a_router_expects_a_declared_prefix_where_another_tenant_left_it(tmp_path: Path) -> None:
    router = settings(tmp_path, PUBLIC)
    async with OneProcessCluster(tmp_path, router=router) as cluster:
        for tenant in ("a", "b"):
            await ask(cluster, tenant, PROMPT)
        history = cluster.router.dispatcher.history
        (first,), (second,) = (history.recent(1, f"{tenant}/") for tenant in ("a", "b"))

    assert [record.to_proto().considered[0].cached_tokens for record in (first, second)] == [0, 5 * BLOCK]


@pytest.mark.parametrize(("prefill", "decode"), [(8, 16), (16, 8), (32, 8)])
async def test_converted_blocks_are_public_by_the_decode_workers_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int
) -> None:
    monkeypatch.setattr("router.registry.check_peer", lambda *arguments: None)  # it takes one block size only so far
    router = settings(tmp_path, PUBLIC)
    sizes = {"prefill": {"block_size": prefill}, "decode": {"block_size": decode}}
    async with OneProcessCluster(tmp_path, router=router, **sizes) as cluster:  # type: ignore[arg-type]
        await ask(cluster, "a", PROMPT)
        second = await ask(cluster, "b", PROMPT)

    num_public = len(PUBLIC) // decode
    assert second.route.recomputed_tokens == 0
    assert second.route.blocks_cached == num_public
    assert second.route.blocks_adopted == -(-len(PROMPT) // decode) - num_public
    assert cluster.errors == {}
