"""How soon a new router knows what its workers hold, over real sessions, and how long the event loop is busy in it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from engine.block_events import Stored
from engine.config import EngineConfig
from engine.plan import Pool
from engine.routing_key import SHORT_BITS, SHORT_BYTES
from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import worker_pb2
from router.block_follower import FollowerState
from router.config import RouterConfig
from router.registry import Registry
from worker.block_feed import BlockFeed
from worker.config import WorkerConfig
from worker.server import WorkerServer
from worker.session import Session

BOUND_S = 120.0
_FINGERPRINT = bytes(32)


class HoldingRole:
    """A worker that only holds blocks."""

    def __init__(self, worker_id: str, keys: list[int]) -> None:
        self._worker_id = worker_id
        self._feed = BlockFeed(len(keys), lambda seed: None)
        names = tuple(key.to_bytes(SHORT_BYTES, "little") for key in keys)
        self._feed.apply([Stored(1, 0, None, names)])

    @property
    def block_feed(self) -> BlockFeed:
        return self._feed

    def welcome(self) -> worker_pb2.Welcome:
        return worker_pb2.Welcome(
            protocol=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            incarnation="1",
            role="decode",
            fingerprint=_FINGERPRINT,
            block_size=16,
            num_blocks=1_000_000,
            max_model_len=8192,
            tells_blocks=True,
        )

    def pool(self) -> Pool:
        return Pool(block_bytes=1, block_size=16, num_blocks=1, dtype="float32")

    def timings(self) -> Mapping[str, float]:
        return {}

    async def load(self) -> worker_pb2.Load:
        return worker_pb2.Load()

    async def handle(self, session: Session, message: worker_pb2.SessionRequest) -> None:
        """Takes no request."""

    def session_ended(self, session: Session) -> None:
        """Had none."""

    async def start(self) -> None:
        """Nothing to start."""

    async def drain(self, timeout_s: float) -> None:
        """Nothing is live."""

    async def stop(self) -> None:
        """Nothing to stop."""


@dataclass(frozen=True, slots=True)
class Warm:
    seconds: float
    """From the router's first dial until it knows all that is resident."""
    longest_pause_ms: float
    """Of the event loop, workers and router together."""


async def warm_up(num_workers: int, num_blocks: int) -> Warm:
    """Workers and router share one process, so both sides' time counts. Checks that router and workers agree."""
    rng = random.Random(1)
    roles = [
        HoldingRole(f"w{n}", [rng.getrandbits(SHORT_BITS) for _ in range(num_blocks // num_workers)])
        for n in range(num_workers)
    ]
    servers = [WorkerServer(role, _config(f"w{n}")) for n, role in enumerate(roles)]
    addresses = [await server.start() for server in servers]
    registry = Registry(RouterConfig(model_path="unused", model_name="none"), _FINGERPRINT)
    try:
        began = time.perf_counter()
        registry.add_addresses(addresses)
        longest = 0.0
        async with asyncio.timeout(BOUND_S):
            while not _all_live(registry, num_workers):
                before = time.perf_counter()
                await asyncio.sleep(0)  # a turn of the loop, in which everybody else has theirs
                longest = max(longest, time.perf_counter() - before)
        seconds = time.perf_counter() - began
        for n, role in enumerate(roles):
            blocks = registry.session(f"w{n}").blocks
            assert blocks is not None
            assert set(registry.index.resident(blocks.slot)) == role.block_feed.resident(), "router and worker disagree"
    finally:
        await asyncio.gather(*(server.stop(0.0) for server in servers))
        await registry.close()
    return Warm(seconds, longest * 1000)


def _all_live(registry: Registry, num_workers: int) -> bool:
    sessions = [registry.session(snapshot.worker_id) for snapshot in registry.snapshots()]
    live = [s for s in sessions if s.blocks is not None and s.blocks.state is FollowerState.LIVE]
    return len(live) == num_workers


def _config(worker_id: str) -> WorkerConfig:
    return WorkerConfig(worker_id=worker_id, model_name="none", engine=EngineConfig(model_path="none"))
