"""A router process that is killed under load and started again; the workers live on, in this process."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import expected_output
from one_process_cluster import BOUND_S, OneProcessCluster

from engine.block_hash import pack_tokens, unpack_tokens
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc

pytestmark = pytest.mark.processes

NUM_TOKENS = 12
LIVES = 3
STREAMS = 8


class RouterProcess:
    def __init__(self, process: asyncio.subprocess.Process, channel: grpc.aio.Channel) -> None:
        self._process = process
        self._stub = router_pb2_grpc.RouterStub(channel)
        self._admin = router_pb2_grpc.AdminStub(channel)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def generate(self, prompt: Sequence[int], got: asyncio.Queue[int]) -> grpc.StatusCode:
        """How the stream ended. Each token goes to `got`; what came is checked, an answer with status OK as a whole."""
        params = common_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = router_pb2.GenerateRequest(prompt_token_ids=pack_tokens(prompt), sampling=params)
        call: Any = self._stub.Generate(request, timeout=BOUND_S)
        token_ids: list[int] = []
        code = grpc.StatusCode.OK
        try:
            async for event in call:
                for token_id in unpack_tokens(event.tokens.token_ids):
                    token_ids.append(token_id)
                    got.put_nowait(token_id)
        except grpc.aio.AioRpcError as error:
            code = error.code()
        expected = expected_output(prompt, NUM_TOKENS)
        assert token_ids == (expected if code is grpc.StatusCode.OK else expected[: len(token_ids)])
        return code

    async def status(self) -> router_pb2.StatusResponse:
        return await self._admin.Status(router_pb2.StatusRequest(), timeout=BOUND_S)


@asynccontextmanager
async def router_process(folder: Path, cluster: OneProcessCluster) -> AsyncIterator[RouterProcess]:
    workers = [flag for worker in cluster.workers for flag in ("--worker", worker.address)]
    flags = ["--model", str(folder), "--local-prefill-max-tokens", "32", *workers]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            ready = json.loads(await process.stdout.readline())
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            yield RouterProcess(process, channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def knows_what_is_resident(router: RouterProcess, cluster: OneProcessCluster) -> None:
    """What the router has noted of each worker has the number and the sum of what is resident there."""
    async with asyncio.timeout(BOUND_S):
        while True:
            status, resident = await router.status(), set[int]()
            said = {w.worker_id: (w.blocks_state, w.blocks_noted, w.blocks_digest) for w in status.workers}
            expected = {}
            for worker in cluster.workers:
                feed = worker.role.block_feed
                resident |= feed.resident()
                expected[worker.config.worker_id] = ("live", len(feed.resident()), feed.digest)
            if said == expected and status.prefix_index.keys == len(resident) > 0:
                assert status.prefix_index.implementation == "native"
                return


async def test_a_router_killed_at_random_under_load_costs_its_open_requests_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(7)
    codes: list[grpc.StatusCode] = []
    async with OneProcessCluster(tmp_path) as cluster:
        for _ in range(LIVES):
            async with router_process(tmp_path, cluster) as router, asyncio.TaskGroup() as tasks:
                got: asyncio.Queue[int] = asyncio.Queue()
                prompts = [rng.choices(range(500), k=rng.randrange(8, 200)) for _ in range(STREAMS)]
                answers = [tasks.create_task(router.generate(prompt, got)) for prompt in prompts]
                for _ in range(rng.randrange(1, STREAMS * NUM_TOKENS // 2)):
                    await asyncio.wait_for(got.get(), BOUND_S)
                await router.kill()
            codes += [answer.result() for answer in answers]

        async with router_process(tmp_path, cluster) as router:
            assert await router.generate(list(range(60)), asyncio.Queue()) is grpc.StatusCode.OK
            await knows_what_is_resident(router, cluster)
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert codes.count(grpc.StatusCode.UNAVAILABLE) >= LIVES
