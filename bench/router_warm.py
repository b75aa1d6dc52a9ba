"""How soon a new router knows what its workers hold, over real sessions, and how long the event loop is busy in it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.block_events import Stored
from engine.config import EngineConfig
from engine.plan import Pool
from engine.routing_key import SHORT_BITS, SHORT_BYTES
from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import common_pb2, worker_pb2
from router.block_follower import FollowerState
from router.config import RouterConfig
from router.native.index import make_index
from router.registry import Registry
from worker.block_feed import BlockFeed
from worker.config import WorkerConfig
from worker.server import WorkerServer
from worker.session import Session

BOUND_S = 120.0
TOKEN_ID = 504
"""A word of SmolLM2's vocabulary."""
_FINGERPRINT = bytes(32)


class HoldingRole:
    """A decode worker that holds blocks, and answers requests with tokens that nobody computed."""

    def __init__(self, worker_id: str, keys: list[int], feed: BlockFeed, fingerprint: bytes = _FINGERPRINT) -> None:
        """`keys` go to `feed`."""
        self._worker_id = worker_id
        self._fingerprint = fingerprint
        self._feed = feed
        self._feed.apply([Stored(1, 0, None, names_of(keys))])

    @property
    def block_feed(self) -> BlockFeed:
        return self._feed

    def welcome(self) -> worker_pb2.Welcome:
        return worker_pb2.Welcome(
            protocol=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            incarnation="1",
            role="decode",
            fingerprint=self._fingerprint,
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
        if not message.HasField("reserve"):
            return
        request_id, num_tokens = message.reserve.request_id, message.reserve.sampling.max_tokens
        ticket = worker_pb2.Ticket(ticket_id=request_id, lease_ms=5000)
        session.send(worker_pb2.SessionResponse(reserved=worker_pb2.Reserved(request_id=request_id, ticket=ticket)))
        step = worker_pb2.Step()
        for index in range(num_tokens):
            step.outputs.add(request_id=request_id, output=worker_pb2.Output(index=index, token_id=TOKEN_ID))
        step.outputs[-1].output.finish_reason = common_pb2.FINISH_REASON_LENGTH
        session.send(worker_pb2.SessionResponse(step=step))
        session.send_ended(request_id, None)

    def session_ended(self, session: Session) -> None:
        """Nothing of a request is left by then."""

    async def start(self) -> None:
        """Nothing to start."""

    async def drain(self, timeout_s: float) -> None:
        """Nothing is live."""

    async def stop(self) -> None:
        """Nothing to stop."""


def names_of(keys: Iterable[int]) -> tuple[bytes, ...]:
    """As events name blocks."""
    return tuple(key.to_bytes(SHORT_BYTES, "little") for key in keys)


@dataclass(frozen=True, slots=True)
class Warm:
    seconds: float
    """From the router's first dial until it knows all that is resident."""
    longest_pause_ms: float
    """Of the event loop, workers and router together."""


async def warm_up(num_workers: int, num_blocks: int, native_cache: str = "") -> Warm:
    """Workers and router share one process, so both sides' time counts. Checks that router and workers agree."""
    rng, held = random.Random(1), num_blocks // num_workers
    roles = [
        HoldingRole(f"w{n}", [rng.getrandbits(SHORT_BITS) for _ in range(held)], BlockFeed(held, lambda _: None))
        for n in range(num_workers)
    ]
    servers = [WorkerServer(role, config_of(f"w{n}")) for n, role in enumerate(roles)]
    addresses = [await server.start() for server in servers]
    config = RouterConfig(model_path="unused", model_name="none")
    registry = Registry(config, _FINGERPRINT, make_index(config.index_bytes, config.speculation_s, native_cache))
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
        await registry.close()
        await asyncio.gather(*(server.stop(0.0) for server in servers))
    return Warm(seconds, longest * 1000)


def _all_live(registry: Registry, num_workers: int) -> bool:
    sessions = [registry.session(snapshot.worker_id) for snapshot in registry.snapshots()]
    live = [s for s in sessions if s.blocks is not None and s.blocks.state is FollowerState.LIVE]
    return len(live) == num_workers


def config_of(worker_id: str) -> WorkerConfig:
    return WorkerConfig(worker_id=worker_id, model_name="none", engine=EngineConfig(model_path="none"))
