"""A router here, workers as processes of their own: what a killed or frozen one costs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from process_cluster import check_idle, cluster, serving
from worker_process import WorkerProcess, make_tiny_model

pytestmark = pytest.mark.processes


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
    async with cluster(model, "prefill", "decode") as (workers, clients):
        assert await clients.generate_all() == expected
        for worker in workers:
            await check_idle(worker)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("decode", "decode", "prefill")])
async def test_a_worker_that_is_killed_in_the_middle_costs_no_token(
    model: Path, expected: list[list[int]], roles: tuple[str, ...]
) -> None:
    async with cluster(model, *roles) as (workers, clients):
        generating = asyncio.create_task(clients.generate_all())
        await clients.some_tokens(2)
        workers[0].send(signal.SIGKILL)

        assert await generating == expected
        for worker in workers[1:]:
            await check_idle(worker)


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
