"""Blocks that are read in another process's pool, while that process is killed, or the reader is frozen."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from process_cluster import PROMPTS, check_idle, cluster, prefill_alone, serving
from worker_process import WorkerProcess, make_tiny_model

pytestmark = pytest.mark.processes

NUM_TOKENS = 250
ADOPT = ("--kv-transports", "adopt,shm,tcp")
FLAGS = {"prefill": (*ADOPT, "--num-blocks-override", "40", "--max-lent-share", "1"), "decode": ADOPT}
PATIENT_S = 60.0
"""The router does not take a frozen worker for a lost one, so the request stays there."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What one worker says, undisturbed."""

    async def single() -> list[int]:
        with WorkerProcess("decode", model) as worker:
            async with serving([worker], model) as clients:
                return await clients.generate(PROMPTS[0], NUM_TOKENS)

    return asyncio.run(single())


async def test_a_prefill_worker_that_is_killed_leaves_what_it_lent(model: Path, expected: list[int]) -> None:
    async with cluster(model, "prefill", "decode", flags=FLAGS) as ((prefill, decode), clients):
        generating = asyncio.create_task(clients.generate(PROMPTS[0], NUM_TOKENS))
        await clients.some_tokens(3)
        prefill.send(signal.SIGKILL)

        assert await generating == expected
        load = await check_idle(decode)
        assert "BorrowedBlocksLost" not in load.errors


async def test_a_decode_worker_that_sleeps_while_its_blocks_are_reused_says_what_one_worker_says(
    model: Path, expected: list[int]
) -> None:
    async with cluster(model, "prefill", "decode", flags=FLAGS, silence_s=PATIENT_S) as ((prefill, decode), clients):
        generating = asyncio.create_task(clients.generate(PROMPTS[0], NUM_TOKENS))
        await clients.some_tokens(3)
        decode.send(signal.SIGSTOP)
        await prefill_alone(prefill, PROMPTS[1:4])
        decode.send(signal.SIGCONT)

        assert await generating == expected
        load = await check_idle(decode)
        assert load.errors["BorrowedBlocksLost"] == len(PROMPTS[0]) // 8
        await check_idle(prefill)
