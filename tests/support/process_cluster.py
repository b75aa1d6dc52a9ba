"""A router here over workers as processes of their own, of a tiny model, and what clients of it get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import grpc
from worker_process import WorkerProcess

from engine.block_hash import pack_tokens, unpack_tokens
from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.server import RouterServer

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
        self.blocks_adopted = 0
        """From prefill workers, of the requests that have ended."""
        self._more = asyncio.Condition()

    async def generate(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        params = common_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = router_pb2.GenerateRequest(prompt_token_ids=pack_tokens(prompt), sampling=params)
        token_ids: list[int] = []
        async for event in self._stub.Generate(request, timeout=BOUND_S):
            if event.HasField("tokens"):
                assert event.tokens.index == len(token_ids)
                token_ids += unpack_tokens(event.tokens.token_ids)
                async with self._more:
                    self.num_tokens += 1
                    self._more.notify_all()
            self.blocks_adopted += event.finished.route.blocks_adopted
        return token_ids

    async def generate_all(self) -> list[list[int]]:
        return await asyncio.gather(*map(self.generate, PROMPTS))

    async def some_tokens(self, count: int) -> None:
        async with self._more, asyncio.timeout(BOUND_S):
            await self._more.wait_for(lambda: self.num_tokens >= count)


async def check_idle(worker: WorkerProcess) -> worker_pb2.Load:
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
                return load
    raise AssertionError("the session ended")


async def prefill_alone(worker: WorkerProcess, prompts: Sequence[Sequence[int]]) -> None:
    """Let a prefill worker compute `prompts`, one after the other, for nobody."""
    hello = worker_pb2.SessionRequest(hello=worker_pb2.Hello(protocol=PROTOCOL_VERSION, router_id="other"))
    sampling = common_pb2.SamplingParams(max_tokens=2, temperature=0.0)
    async with grpc.aio.insecure_channel(worker.ready["address"]) as channel, asyncio.timeout(BOUND_S):
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(hello)
        waiting = [
            worker_pb2.Prefill(
                request_id=f"alone-{n}",
                token_ids=pack_tokens(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                timeout_ms=60_000,
            )
            for n, prompt in enumerate(prompts)
        ]
        async for message in call:
            if message.HasField("welcome") or message.HasField("ended"):
                assert not message.ended.error, message.ended
                if not waiting:
                    return
                await call.write(worker_pb2.SessionRequest(prefill=waiting.pop(0)))


@asynccontextmanager
async def serving(workers: Sequence[WorkerProcess], model: Path, silence_s: float = 1.5) -> AsyncIterator[Clients]:
    addresses = tuple(worker.ready["address"] for worker in workers)
    config = RouterConfig(
        model_path=str(model), model_name="tiny", workers=addresses, silence_s=silence_s, local_prefill_max_tokens=0
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


@asynccontextmanager
async def cluster(
    model: Path, *roles: str, flags: Mapping[str, Sequence[str]] = MappingProxyType({}), silence_s: float = 1.5
) -> AsyncIterator[tuple[list[WorkerProcess], Clients]]:
    """Workers named ROLE-NUMBER, with the `flags` of that name, or of their role."""
    async with AsyncExitStack() as stack:
        workers = [
            stack.enter_context(
                WorkerProcess(role, model, *FLAGS, "--worker-id", name, *flags.get(name, flags.get(role, ())))
            )
            for role, name in ((role, f"{role}-{i}") for i, role in enumerate(roles))
        ]
        yield workers, await stack.enter_async_context(serving(workers, model, silence_s))
