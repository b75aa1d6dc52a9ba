"""A router here, workers as processes of their own: what a killed or frozen one costs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from worker_process import WorkerProcess, make_tiny_model

from engine.block_hash import pack_tokens, unpack_tokens
from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.server import RouterServer

pytestmark = pytest.mark.processes

BOUND_S = 60.0
PROMPTS = [[(17 * i + 5 * j) % 500 for i in range(250)] for j in range(8)]
NUM_TOKENS = 24
FLAGS = ("--max-num-batched-tokens", "64")


class Clients:
    """Of one router over worker processes."""

    def __init__(self, server: RouterServer, stub: router_pb2_grpc.RouterAsyncStub) -> None:
        self.server = server
        self._stub = stub
        self.num_tokens = 0
        """That all clients together have got."""
        self._more = asyncio.Condition()

    async def generate(self, prompt: Sequence[int]) -> list[int]:
        params = common_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = router_pb2.GenerateRequest(prompt_token_ids=pack_tokens(prompt), sampling=params)
        token_ids: list[int] = []
        async for event in self._stub.Generate(request, timeout=BOUND_S):
            if event.HasField("tokens"):
                assert event.tokens.index == len(token_ids)
                token_ids += unpack_tokens(event.tokens.token_ids)
                async with self._more:
                    self.num_tokens += 1
                    self._more.notify_all()
        return token_ids

    async def generate_all(self) -> list[list[int]]:
        return await asyncio.gather(*map(self.generate, PROMPTS))

    async def some_tokens(self, count: int) -> None:
        async with self._more, asyncio.timeout(BOUND_S):
            await self._more.wait_for(lambda: self.num_tokens >= count)


async def check_idle(worker: WorkerProcess) -> None:
    """The worker says, on a session of our own, that every block is free or cached."""
    hello = worker_pb2.SessionRequest(hello=worker_pb2.Hello(protocol=PROTOCOL_VERSION, router_id="observer"))
    num_blocks = 0
    async with grpc.aio.insecure_channel(worker.ready["address"]) as channel, asyncio.timeout(BOUND_S):
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(hello)
        async for message in call:
            num_blocks = message.welcome.num_blocks or num_blocks
            load = message.load
            if not (load.running or load.waiting) and load.blocks_free + load.blocks_cached == num_blocks:
                return


@asynccontextmanager
async def serving(workers: Sequence[WorkerProcess], model: Path) -> AsyncIterator[Clients]:
    addresses = tuple(worker.ready["address"] for worker in workers)
    config = RouterConfig(
        model_path=str(model), model_name="tiny", workers=addresses, silence_s=1.5, local_prefill_max_tokens=0
    )
    server = RouterServer(config)
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        try:
            async with asyncio.timeout(BOUND_S):
                while len(server.registry.snapshots()) < len(workers):
                    await server.registry.changed()
            yield Clients(server, router_pb2_grpc.RouterStub(channel))
        finally:
            await server.stop(0.0)


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


@asynccontextmanager
async def cluster(model: Path, *roles: str) -> AsyncIterator[tuple[list[WorkerProcess], Clients]]:
    async with AsyncExitStack() as stack:
        workers = [
            stack.enter_context(
                WorkerProcess(role, model, "--max-num-batched-tokens", "64", "--worker-id", f"{role}-{i}")
            )
            for i, role in enumerate(roles)
        ]
        yield workers, await stack.enter_async_context(serving(workers, model))


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
