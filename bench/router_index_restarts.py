"""A router process that is killed at random under load and started again, until it knows what its workers hold.

The workers live in this process and keep changing what they hold. What the router says of each of them (`Status`: how
many keys it noted, and their sum) is compared with what is resident there. With `faults`, a share of the workers'
messages about blocks is lost, repeated and swapped with the next, each.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.router_warm import HoldingRole, config_of, names_of
from engine.block_events import Removed, Stored
from engine.block_hash import pack_tokens
from engine.model_config import model_fingerprint
from engine.routing_key import SHORT_BITS
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from worker.block_feed import BlockFeed, BlockOutbox
from worker.server import WorkerServer

BOUND_S = 60.0
CHANGE_EVERY_S = 0.01
CHANGED_BLOCKS = 32
NUM_CLIENTS = 4
NUM_TOKENS = 4
STATES = 4096
"""Of a worker, that are remembered: what a router notes may be a little old."""


class FaultyFeed(BlockFeed):
    """Tells routers less, more and in another order than happened."""

    def __init__(self, num_blocks: int, faults: float, rng: random.Random) -> None:
        super().__init__(num_blocks, lambda _: None)
        self.faults, self.num_faults = faults, 0
        self._rng = rng

    def open(self, changed: Callable[[], None]) -> BlockOutbox:
        outbox = _FaultyOutbox(self, changed)
        self._outboxes.add(outbox)
        return outbox

    def fault(self) -> str:
        """What befalls the next message; mostly nothing."""
        draw = self._rng.random()
        for number, kind in enumerate(("lost", "repeated", "swapped")):
            if draw < (number + 1) * self.faults:
                self.num_faults += 1
                return kind
        return ""


class _FaultyOutbox(BlockOutbox):
    def __init__(self, feed: FaultyFeed, changed: Callable[[], None]) -> None:
        super().__init__(feed, changed)
        self._faulty = feed
        self._later: deque[worker_pb2.BlockChanges] = deque()

    def next_message(self) -> worker_pb2.BlockChanges | None:
        if self._later:
            return self._later.popleft()
        message = super().next_message()
        kind = self._faulty.fault() if message is not None else ""
        if kind == "lost":
            return super().next_message()
        if message is not None and kind == "repeated":
            self._later.append(message)
        if message is not None and kind == "swapped" and (following := super().next_message()) is not None:
            self._later.append(message)
            return following
        return message


class Holder:
    """One worker, and the last states of what is resident there."""

    def __init__(self, number: int, num_blocks: int, fingerprint: bytes, faults: float, rng: random.Random) -> None:
        self.worker_id = f"w{number}"
        self.keys = [rng.getrandbits(SHORT_BITS) for _ in range(num_blocks)]
        self.feed = FaultyFeed(num_blocks, faults, rng)
        self.server = WorkerServer(
            HoldingRole(self.worker_id, self.keys, self.feed, fingerprint), config_of(self.worker_id)
        )
        self._states: deque[tuple[int, int]] = deque([self.state], STATES)

    @property
    def state(self) -> tuple[int, int]:
        """Sum and number of all resident keys, as `Status` tells them."""
        return self.feed.digest, len(self.keys)

    def change(self, rng: random.Random) -> None:
        """Some blocks make room for others."""
        at = rng.randrange(len(self.keys) - CHANGED_BLOCKS)
        gone, new = self.keys[at : at + CHANGED_BLOCKS], [rng.getrandbits(SHORT_BITS) for _ in range(CHANGED_BLOCKS)]
        self.keys[at : at + CHANGED_BLOCKS] = new
        self.feed.apply([Removed(0, 0, names_of(gone)), Stored(0, 0, None, names_of(new))])
        self._states.append(self.state)

    def agrees(self, status: router_pb2.WorkerStatus, *, exactly: bool) -> bool:
        said = (status.blocks_digest, status.blocks_noted)
        return status.blocks_state == "live" and (said == self.state if exactly else said in self._states)


@dataclass(slots=True)
class Restarts:
    warm_s: list[float] = field(default_factory=list)
    """From each start of the process until all workers agreed, for those that lived so long."""
    served: int = 0
    """Requests answered before that."""
    codes: Counter[str] = field(default_factory=Counter)
    """How all requests ended."""
    num_faults: int = 0


class _Router:
    def __init__(self, process: asyncio.subprocess.Process, channel: grpc.aio.Channel, began: float) -> None:
        self.process = process
        self.began = began
        self._stub, self._admin = router_pb2_grpc.RouterStub(channel), router_pb2_grpc.AdminStub(channel)

    async def generate(self, rng: random.Random) -> str:
        params = common_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        prompt = pack_tokens(rng.choices(range(500), k=rng.randrange(16, 512)))
        call: Any = self._stub.Generate(
            router_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=params), timeout=BOUND_S
        )
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def workers(self) -> dict[str, router_pb2.WorkerStatus]:
        status = await self._admin.Status(router_pb2.StatusRequest(), timeout=BOUND_S)
        return {worker.worker_id: worker for worker in status.workers}


async def restart_under_load(
    folder: Path, num_workers: int, num_blocks: int, *, kills: int, faults: float = 0.0, seed: int = 1
) -> Restarts:
    """Every second life is ended before it needs to know anything. Raises `TimeoutError` where router and workers do
    not come to agree within `BOUND_S`."""
    rng, found = random.Random(seed), Restarts()
    fingerprint = model_fingerprint(folder)
    holders = [Holder(n, num_blocks // num_workers, fingerprint, faults, rng) for n in range(num_workers)]
    addresses = [await holder.server.start() for holder in holders]
    changing = asyncio.create_task(_keep_changing(holders, rng))
    try:
        for life in range(kills + 1):
            answered = found.codes["OK"]
            async with _router(folder, addresses) as router, _clients(router, found, rng):
                if life == kills or life % 2 == 0:
                    await _until_agreed(router, holders, exactly=False)
                    found.warm_s.append(time.perf_counter() - router.began)
                    found.served += found.codes["OK"] - answered
                if life == kills:
                    changing.cancel()
                    await asyncio.wait({changing})
                    for holder in holders:
                        holder.feed.faults = 0.0
                    await _until_agreed(router, holders, exactly=True)
                else:
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
    finally:
        changing.cancel()
        await asyncio.gather(*(holder.server.stop(0.0) for holder in holders))
    found.num_faults = sum(holder.feed.num_faults for holder in holders)
    return found


async def _keep_changing(holders: Sequence[Holder], rng: random.Random) -> None:
    while True:
        await asyncio.sleep(CHANGE_EVERY_S)
        rng.choice(holders).change(rng)


async def _until_agreed(router: _Router, holders: Sequence[Holder], *, exactly: bool) -> None:
    """`exactly`: all of them at once, to what they hold now. Otherwise each at some time, to what it held lately."""
    left = list(holders)
    async with asyncio.timeout(BOUND_S):
        while True:
            told = await router.workers()
            agreed = [h for h in left if h.worker_id in told and h.agrees(told[h.worker_id], exactly=exactly)]
            if len(agreed) == len(left):
                return
            if not exactly:
                left = [holder for holder in left if holder not in agreed]
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _router(folder: Path, addresses: Sequence[str]) -> AsyncIterator[_Router]:
    """Killed when it is left."""
    flags = [flag for address in addresses for flag in ("--worker", address)]
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        *("--model", str(folder), "--model-name", "none", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            ready = json.loads(await process.stdout.readline())
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            yield _Router(process, channel, began)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def _clients(router: _Router, found: Restarts, rng: random.Random) -> AsyncIterator[None]:
    """Requests one after the other, until the router is gone, which it is once this is left."""

    async def client() -> None:
        while router.process.returncode is None:
            found.codes[await router.generate(rng)] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_CLIENTS):
            tasks.create_task(client())
        try:
            yield
        finally:
            router.process.kill()
            await router.process.wait()
