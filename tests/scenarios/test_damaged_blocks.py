"""A bit of a prefill worker's pool flips: nobody is sent what is there now, and the block is computed again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes import expected_output
from one_process_cluster import ClusterWorker, OneProcessCluster

from engine.block_hash import block_chain, pack_tokens

PROMPT = [(7 * i + 3) % 500 for i in range(100)]
BLOCKS = 13
"""Of `PROMPT`, 8 tokens each; the last holds 4."""
DAMAGED = 3


async def flip(worker: ClusterWorker, ordinal: int) -> None:
    """A byte of a cached block of `PROMPT`."""
    identity = worker.parts.identity

    def flip(engine: object) -> None:
        hashes = block_chain(identity.root(b""), pack_tokens(PROMPT), 8)
        block = worker.parts.engine._blocks.lookup(hashes[: ordinal + 1])[ordinal]
        worker.parts.kv.block(block)[5] ^= 1

    await asyncio.wrap_future(worker.role._core._step_loop.call(flip))


async def forget(worker: ClusterWorker) -> None:
    await settled(worker)
    assert await asyncio.wrap_future(worker.role._core._step_loop.call(lambda engine: engine.reset_prefix_cache()))


async def settled(worker: ClusterWorker) -> None:
    """What was posted to its engine has run, and every request has ended."""
    await worker.role._core.live.wait_empty()
    await worker.block_stats()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_flipped_bit_costs_its_block_and_what_follows_it_and_is_never_sent(
    tmp_path: Path, transport: str
) -> None:
    async with OneProcessCluster(tmp_path, kv_transports=(transport,)) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        await cluster.generate(PROMPT, 4)
        await settled(prefill)
        await flip(prefill, DAMAGED)
        await forget(decode)

        refused = await cluster.generate(PROMPT, 4)
        await settled(prefill)
        await forget(decode)
        computed = prefill.model.num_tokens
        again = await cluster.generate(PROMPT, 4)

    assert again.token_ids == expected_output(PROMPT, 4)
    first, *others = refused.token_ids  # drawn from what was damaged, before anybody could see that
    assert others == expected_output([*PROMPT, first], 3)
    assert refused.route.recomputed_tokens == len(PROMPT) - DAMAGED * 8
    assert (again.route.blocks_adopted, again.route.recomputed_tokens) == (BLOCKS, 0)
    assert prefill.model.num_tokens - computed == len(PROMPT) - DAMAGED * 8
    assert cluster.errors["BlocksDamaged"] == 1


async def test_bytes_that_the_way_damaged_cost_the_prefix_cache_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OneProcessCluster(tmp_path, kv_transports=("tcp",)) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        copier = decode.role._receiver.copier  # type: ignore[union-attr]
        right = copier.digests
        with monkeypatch.context() as patch:
            patch.setattr(copier, "digests", lambda blocks: [bytes(16) for _ in right(blocks)])
            await cluster.generate(PROMPT, 4)
        await settled(prefill)
        await forget(decode)
        computed = prefill.model.num_tokens

        again = await cluster.generate(PROMPT, 4)

    assert again.token_ids == expected_output(PROMPT, 4)
    assert prefill.model.num_tokens - computed == len(PROMPT) - (BLOCKS - 1) * 8
    assert "BlocksDamaged" not in cluster.errors
