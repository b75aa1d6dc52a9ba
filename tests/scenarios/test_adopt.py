"""A decode worker reads a prompt's blocks in the prefill worker's pool: tokens equal the oracle's, whatever becomes of
that pool meanwhile.

Leaving a cluster checks that no worker holds, lends or borrows anything.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from fakes import expected_output
from one_process_cluster import ClusterWorker, OneProcessCluster

from engine.block_stats import BlockStats
from engine.engine import Engine

PROMPT = [(7 * i + 3) % 500 for i in range(100)]
BLOCKS = 13
"""Of `PROMPT`, 8 tokens each; the last holds 4."""
TRANSPORTS = ("adopt", "shm", "tcp")


def cluster_of(folder: Path, **settings: Any) -> OneProcessCluster:
    return OneProcessCluster(folder, kv_transports=TRANSPORTS, **settings)


async def test_all_blocks_but_the_last_take_no_memory_at_the_decode_worker(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        (decode,), (prefill,) = cluster.decode, cluster.prefill
        decode.model.pause_at(1)
        generating = asyncio.create_task(cluster.generate(PROMPT, 20))
        await decode.model.paused()

        blocks = decode.parts.engine.stats().blocks  # its thread waits in the model
        assert (blocks.borrowed, blocks.owned) == (BLOCKS - 1, 2)  # the last one, and one to grow into
        assert (await prefill.block_stats()).lent == BLOCKS - 1

        decode.model.go_on()
        generation = await generating

    assert generation.token_ids == expected_output(PROMPT, 20)
    assert generation.route.transport == "adopt"
    assert (generation.route.blocks_adopted, generation.route.recomputed_tokens) == (BLOCKS, 0)


async def test_blocks_that_are_reused_during_a_step_spoil_no_token(tmp_path: Path) -> None:
    """The decode worker has looked at the generations and computes; then its prefill worker, which has given it up,
    gives the slots to other prompts."""
    token_ids, stats, num_tokens = await generate_while_reused(tmp_path)

    assert token_ids == expected_output(PROMPT, 20)
    assert stats.borrowed_lost == BLOCKS - 1
    assert num_tokens > 100, "the request was not computed again"


async def test_without_a_look_at_the_generations_after_the_step_its_token_would_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_without_lost", lambda self, batch: batch)

    token_ids, _, _ = await generate_while_reused(tmp_path)

    assert token_ids[:4] == expected_output(PROMPT, 4)
    assert token_ids != expected_output(PROMPT, 20)


async def generate_while_reused(folder: Path) -> tuple[list[int], BlockStats, int]:
    """The tokens, and of the decode worker what became of its blocks and how many tokens it has computed."""
    async with cluster_of(folder, max_lent_share=1.0, prefill={"num_blocks_override": 16}) as cluster:
        (decode,), (prefill,) = cluster.decode, cluster.prefill
        decode.model.pause_at(4)
        generating = asyncio.create_task(cluster.generate(PROMPT, 20))
        await decode.model.paused()
        await end_loans(prefill)
        await turn_over(prefill)
        decode.model.go_on()
        generation = await generating
        return generation.token_ids, await decode.block_stats(), decode.model.num_tokens


async def end_loans(prefill: ClusterWorker) -> None:
    """As when the decode worker has not answered for too long: the links end, and with them what was lent."""
    sender = prefill.role._sender  # type: ignore[union-attr]
    await asyncio.to_thread(sender.close, 5.0)
    assert not (await prefill.block_stats()).lent


async def turn_over(prefill: ClusterWorker) -> None:
    """Every block of its pool gets other contents, each under a new generation."""

    def fill(engine: Any) -> None:
        blocks = engine._blocks.allocate(engine._blocks.num_allocatable)
        for block in blocks:
            prefill.parts.kv.block(block)[:] = bytes([171]) * prefill.parts.kv.layout.block_bytes
        engine._blocks.release(blocks)

    await asyncio.wrap_future(prefill.role._core._step_loop.call(fill))


async def test_blocks_that_are_reused_between_two_steps_spoil_no_token(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, prefill={"num_blocks_override": 16}, decode={"max_num_seqs": 2}) as cluster:
        (decode,), (prefill,) = cluster.decode, cluster.prefill
        decode.model.pause_at(4)
        generating = [asyncio.create_task(cluster.generate(PROMPT, 20)) for _ in range(2)]
        await decode.model.paused()
        await end_loans(prefill)
        await turn_over(prefill)
        decode.model.go_on()
        generations = await asyncio.gather(*generating)

    assert [g.token_ids for g in generations] == [expected_output(PROMPT, 20)] * 2


async def test_a_link_that_is_cut_does_not_end_what_was_lent(tmp_path: Path) -> None:
    """Its blocks are as they were until the slots are given to others: the request goes on with them."""
    async with cluster_of(tmp_path) as cluster:
        (decode,), (prefill,) = cluster.decode, cluster.prefill
        decode.model.pause_at(4)
        generating = asyncio.create_task(cluster.generate(PROMPT, 20))
        await decode.model.paused()
        await end_loans(prefill)
        decode.model.go_on()
        generation = await generating
        stats = await decode.block_stats()

    assert generation.token_ids == expected_output(PROMPT, 20)
    assert stats.borrowed_lost == 0
    assert decode.model.num_tokens == 19


async def test_a_second_request_shares_what_the_first_borrowed(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        (decode,), (prefill,) = cluster.decode, cluster.prefill
        decode.model.pause_at(2)
        first = asyncio.create_task(cluster.generate(PROMPT, 20))
        await decode.model.paused()
        second = asyncio.create_task(cluster.generate([*PROMPT[:64], 1, 2, 3], 20))
        decode.model.go_on()
        generations = await asyncio.gather(first, second)

    assert generations[0].token_ids == expected_output(PROMPT, 20)
    assert generations[1].token_ids == expected_output([*PROMPT[:64], 1, 2, 3], 20)
    assert prefill.parts.engine.lender is not None


@pytest.mark.parametrize("share", [0.05, 0.5])
async def test_beyond_its_share_the_prefill_worker_lends_no_more_and_blocks_are_copied(
    tmp_path: Path, share: float
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(500) for _ in range(rng.randint(1, 120))] for _ in range(24)]
    async with cluster_of(tmp_path, max_lent_share=share, prefill={"num_blocks_override": 64}) as cluster:
        generations = await asyncio.gather(*(cluster.generate(prompt, 12) for prompt in prompts))

    assert [g.token_ids for g in generations] == [expected_output(prompt, 12) for prompt in prompts]
    assert sum(g.route.recomputed_tokens for g in generations) == 0
    assert cluster.errors.keys() <= {"BorrowedBlocksLost"}  # the pool is small: a late prompt may take blocks back
