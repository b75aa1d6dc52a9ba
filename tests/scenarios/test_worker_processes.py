"""A router here, workers as processes of their own: what a killed or frozen one costs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
from process_cluster import check_idle, cluster, serving
from worker_process import WorkerProcess, make_tiny_model

pytestmark = pytest.mark.processes
TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What one worker says, undisturbed."""

    async def single() -> list[list[int]]:
        with WorkerProcess("decode", model) as worker:
            async with serving([worker], model) as clients:
                return await clients.generate_all()

    return asyncio.run(single())


async def test_the_split_system_says_what_one_worker_says(model: Path, expected: list[list[int]]) -> None:
    """Here of two ranks that prefill, and one that decodes."""
    async with cluster(model, "prefill", "decode", flags={"prefill": TWO_RANKS}) as (workers, clients):
        assert await clients.generate_all() == expected
        for worker in workers:
            await check_idle(worker)
        prefill, decode = (worker.ready for worker in workers)
        assert (prefill["tensor_parallel_size"], decode["tensor_parallel_size"]) == (2, 1)
        assert clients.blocks_adopted > 0


async def test_a_prefill_worker_that_is_killed_in_the_middle_costs_no_token(
    model: Path, expected: list[list[int]]
) -> None:
    async with cluster(model, "prefill", "decode") as (workers, clients):
        generating = asyncio.create_task(clients.generate_all())
        await clients.some_tokens(2)
        workers[0].send(signal.SIGKILL)

        assert await generating == expected
        await check_idle(workers[1])


async def test_a_rank_of_a_decode_worker_that_is_killed_in_the_middle_takes_the_worker_with_it_and_costs_no_token(
    model: Path, expected: list[list[int]]
) -> None:
    async with cluster(model, "decode", "decode", "prefill", flags={"decode-0": TWO_RANKS}) as (workers, clients):
        (rank,) = psutil.Process(workers[0].process.pid).children()
        generating = asyncio.create_task(clients.generate_all())
        await clients.some_tokens(2)
        rank.kill()

        assert await generating == expected
        for worker in workers[1:]:
            await check_idle(worker)
        status, errors = workers[0].wait()
        assert status == 1
        assert "WorkerLost: " in errors  # of the rank, or of the step that it was missed in first


async def test_a_prefill_worker_that_is_frozen_costs_no_token_and_nothing_is_left_when_it_wakes_up(
    model: Path, expected: list[list[int]]
) -> None:
    async with cluster(model, "prefill", "decode") as (workers, clients):
        generating = asyncio.create_task(clients.generate_all())
        await clients.some_tokens(2)
        workers[0].send(signal.SIGSTOP)
        outputs = await generating
        workers[0].send(signal.SIGCONT)

        assert outputs == expected
        for worker in workers:
            await check_idle(worker)
