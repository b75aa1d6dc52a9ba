"""One router, prefill and decode workers, real links, a model that notices wrong KV: outputs equal the oracle's.

Leaving a cluster checks that no worker holds anything and that free plus cached blocks are all blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from fakes import expected_output
from one_process_cluster import BOUND_S, OneProcessCluster

from engine.cluster_key import ClusterKey
from kv_transfer import sender
from kv_transfer.digest import PythonBlockCopier
from kv_transfer.link import LinkSettings
from prefill_worker.worker import PrefillWorker
from router.server import RouterServer

PROMPT = [(7 * i + 3) % 500 for i in range(100)]
BLOCKS = 13
"""Of `PROMPT`, 8 tokens each; the last holds 4."""


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(500) for _ in range(length)]


@pytest.fixture(params=["adopt", "shm", "tcp", "gloo"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_one_request_is_prefilled_here_and_decoded_there(tmp_path: Path, transport: str) -> None:
    async with OneProcessCluster(tmp_path, kv_transports=(transport,)) as cluster:
        generation = await cluster.generate(PROMPT, 20)

    assert generation.token_ids == expected_output(PROMPT, 20)
    route = generation.route
    assert (route.prefill_worker, route.decode_worker, route.attempts) == ("prefill-0", "decode-0", 1)
    assert (route.blocks_computed, route.blocks_adopted, route.recomputed_tokens) == (BLOCKS, BLOCKS, 0)
    assert route.transport == transport
    assert cluster.errors == {}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 65])
async def test_a_prompt_of_any_length_survives_the_hand_over(tmp_path: Path, length: int) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        generation = await cluster.generate(PROMPT[:length], 10)

    assert generation.token_ids == expected_output(PROMPT[:length], 10)
    assert generation.route.recomputed_tokens == 0


async def test_a_first_token_that_is_the_last_leaves_nothing(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        generation = await cluster.generate(PROMPT, 1)

    assert generation.token_ids == expected_output(PROMPT, 1)


async def test_many_requests_at_once_each_get_their_own_tokens(tmp_path: Path, transport: str) -> None:
    rng = random.Random(1)
    prompts = [prompt_of(rng, rng.randint(1, 120)) for _ in range(24)]
    async with OneProcessCluster(tmp_path, num_prefill=2, num_decode=2, kv_transports=(transport,)) as cluster:
        generations = await asyncio.gather(*(cluster.generate(prompt, 12) for prompt in prompts))

    assert [g.token_ids for g in generations] == [expected_output(prompt, 12) for prompt in prompts]
    assert sum(g.route.recomputed_tokens for g in generations) == 0
    assert cluster.errors == {}


async def test_a_shared_prefix_is_neither_computed_nor_sent_again(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        await cluster.generate(PROMPT, 4)
        tail = [9, 9, 9, 9, 9]
        generation = await cluster.generate(PROMPT[:96] + tail, 12)

    assert generation.token_ids == expected_output(PROMPT[:96] + tail, 12)
    route = generation.route
    assert (route.blocks_cached, route.blocks_adopted, route.blocks_computed) == (12, 1, 1)
    assert generation.finished is not None
    assert generation.finished.usage.cached_tokens == 96


async def test_a_single_worker_says_the_same_and_counts_the_same(tmp_path: Path, transport: str) -> None:
    results = []
    for num_prefill in (0, 1):
        async with OneProcessCluster(tmp_path, num_prefill=num_prefill, kv_transports=(transport,)) as cluster:
            first = await cluster.generate(PROMPT, 12, temperature=1.0, seed=5, logprobs=2)
            again = await cluster.generate(PROMPT, 12, temperature=1.0, seed=5, logprobs=2)
        assert first.finished is not None
        assert again.finished is not None
        results.append((first.token_ids, first.finished.usage, again.token_ids, again.finished.usage))

    single, split = results
    assert single == split
    assert single[3].cached_tokens == 96


async def test_aborts_at_random_points_leave_nothing_and_disturb_nobody(tmp_path: Path, transport: str) -> None:
    rng = random.Random(2)

    async def abort_after(cluster: OneProcessCluster, prompt: list[int], num_events: int) -> None:
        call = cluster.call(prompt, 40)
        for _ in range(num_events):
            await call.read()
        call.cancel()

    async with OneProcessCluster(tmp_path, num_prefill=2, kv_transports=(transport,)) as cluster:
        for _ in range(4):
            prompts = [prompt_of(rng, rng.randint(1, 150)) for _ in range(4)]
            aborts = [
                abort_after(cluster, prompt_of(rng, rng.randint(1, 150)), rng.choice([0, 1, 1, 2, 3, 8]))
                for _ in range(8)
            ]
            aborting = asyncio.gather(*aborts)
            generations = await asyncio.gather(*(cluster.generate(prompt, 10) for prompt in prompts))
            await aborting
            assert [g.token_ids for g in generations] == [expected_output(prompt, 10) for prompt in prompts]
    assert cluster.errors == {}


async def test_a_prefill_worker_that_stops_in_the_middle_of_a_prompt_is_replaced_by_the_decode_worker(
    tmp_path: Path,
) -> None:
    async with OneProcessCluster(tmp_path, prefill={"max_num_batched_tokens": 16}) as cluster:
        worker = cluster.prefill[0]
        worker.model.pause_at(3)
        generating = asyncio.create_task(cluster.generate(PROMPT, 20))
        await worker.model.paused()
        await cluster.stop_paused(worker)
        generation = await generating

    assert generation.token_ids == expected_output(PROMPT, 20)
    assert generation.route.recomputed_tokens > 0


async def test_a_prefill_worker_that_is_stuck_is_replaced_by_the_decode_worker(tmp_path: Path) -> None:
    settings = {"prefill_share": 0.01}  # of the deadline
    async with OneProcessCluster(tmp_path, prefill={"max_num_batched_tokens": 16}, router=settings) as cluster:
        cluster.prefill[0].model.pause_at(3)
        generation = await cluster.generate(PROMPT, 20)
        cluster.prefill[0].model.go_on()

    assert generation.token_ids == expected_output(PROMPT, 20)


async def test_a_decode_worker_that_stops_is_replaced_by_another_and_no_token_is_lost(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path, num_decode=2) as cluster:
        for worker in cluster.decode:
            worker.model.pause_at(5)
        generating = asyncio.create_task(cluster.generate(PROMPT, 30))
        waits = {asyncio.create_task(worker.model.paused()): worker for worker in cluster.decode}
        done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        stopped = waits[done.pop()]
        await cluster.stop_paused(stopped)
        for worker in cluster.decode:
            worker.model.go_on()
        generation = await generating

    assert generation.token_ids == expected_output(PROMPT, 30)
    assert generation.route.attempts == 2


@pytest.mark.parametrize("corrupt_at", [0, 5, BLOCKS - 1])
@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])  # what is lent is not digested
async def test_a_corrupted_block_is_refused_and_computed_again(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch, corrupt_at: int
) -> None:
    number = itertools.count()

    class CorruptingCopier(PythonBlockCopier):
        def digests(self, blocks: Sequence[memoryview]) -> list[bytes]:
            return [bytes(16) if next(number) == corrupt_at else right for right in super().digests(blocks)]

    monkeypatch.setattr(sender, "PythonBlockCopier", CorruptingCopier)
    async with OneProcessCluster(tmp_path, kv_transports=(transport,)) as cluster:
        generation = await cluster.generate(PROMPT, 20)

    assert generation.token_ids == expected_output(PROMPT, 20)
    assert generation.route.recomputed_tokens >= len(PROMPT) - 8 * corrupt_at - 8
    assert generation.route.blocks_adopted < generation.route.blocks_sent  # one behind it may come too late
    assert cluster.errors["DigestMismatch"] >= 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_cluster_with_a_key_serves(tmp_path: Path, transport: str) -> None:
    key = ClusterKey.generate()
    settings = {"cluster_key": key}
    async with OneProcessCluster(tmp_path, router=settings, kv_transports=(transport,), cluster_key=key) as cluster:
        generation = await cluster.generate(PROMPT, 20)

        assert generation.token_ids == expected_output(PROMPT, 20)
        assert (generation.route.transport, generation.route.recomputed_tokens) == (transport, 0)
        stranger = RouterServer(cluster.router_config("stranger", cluster_key=ClusterKey.generate()))
        await stranger.start()
        async with asyncio.timeout(BOUND_S):
            while "has a cluster key" not in stranger.registry.why_not_ready():
                await stranger.registry.changed()
        assert stranger.registry.snapshots() == []
        await stranger.stop(0.0)


async def test_links_are_open_before_the_first_request(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path, num_decode=2) as cluster:
        role = cluster.prefill[0].role
        assert isinstance(role, PrefillWorker)
        sending = role._sender

        def wait_until_open() -> None:
            until = time.monotonic() + BOUND_S
            while sending.stats().links_connected != {"shm": 2}:
                assert time.monotonic() < until, sending.stats()

        await asyncio.to_thread(wait_until_open)
        generation = await cluster.generate(PROMPT, 20)

        assert generation.token_ids == expected_output(PROMPT, 20)
        assert sending.stats().links_connected == {"shm": 2}


async def test_a_transport_that_only_one_end_has_is_computed_again(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path, kv_transports=("shm",)) as cluster:
        sending = cluster.prefill[0].role
        assert isinstance(sending, PrefillWorker)
        sending._sender._settings = LinkSettings(transports=("tcp",))
        generation = await cluster.generate(PROMPT, 20)

    assert generation.token_ids == expected_output(PROMPT, 20)
    assert generation.route.recomputed_tokens == len(PROMPT)
    assert cluster.errors["HandshakeRefused"] >= 1


async def test_a_model_fault_on_the_prefill_worker_costs_time_only(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path, prefill={"max_num_batched_tokens": 16}) as cluster:
        model = cluster.prefill[0].model
        model.pause_at(3)
        generating = asyncio.create_task(cluster.generate(PROMPT, 20))
        await model.paused()
        model.fault = RuntimeError("the model broke")
        model.go_on()
        generation = await generating

    assert generation.token_ids == expected_output(PROMPT, 20)
    assert cluster.errors["InternalError"] == 1


async def test_tiny_pools_preempt_and_still_say_the_right_thing(tmp_path: Path) -> None:
    rng = random.Random(3)
    prompts = [prompt_of(rng, rng.randint(10, 40)) for _ in range(10)]
    pools = {"num_blocks_override": 18}
    async with OneProcessCluster(tmp_path, prefill=pools, decode=pools) as cluster:
        generations = await asyncio.gather(*(cluster.generate(prompt, 60) for prompt in prompts))

    assert [g.token_ids for g in generations] == [expected_output(prompt, 60) for prompt in prompts]


async def test_a_deadline_ends_a_request_everywhere(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        cluster.decode[0].model.pause_at(2)
        call = cluster.call(PROMPT, 50, timeout_s=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        cluster.decode[0].model.go_on()

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_router_that_goes_away_leaves_nothing_on_its_workers(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        calls = [cluster.call(PROMPT[i:], 500) for i in range(6)]
        for call in calls:
            assert await call.read() is not grpc.aio.EOF
        await cluster.router.stop(0.0)

        for worker in cluster.workers:
            load = await worker.check_idle()
            assert load.blocks_owned == 0
