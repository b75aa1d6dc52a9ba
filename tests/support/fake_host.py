"""A `Host` whose actors a test plays, and a supervisor that it watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cluster.events import DesiredChanged, PoolWanted, PublishWorkers
from cluster.host import ActorLost, Handle, ReadyReport
from cluster.spec import SupervisionSpec
from cluster.supervisor import Snapshot, Supervisor
from engine.errors import EngineError

WORKERS = ("prefill-0", "decode-0")
POOLS = {"prefill": PoolWanted(1, "a"), "decode": PoolWanted(1, "a")}
LIMITS = SupervisionSpec(
    start_timeout_s=60.0, hung_after_s=0.003, drain_s=0.0, backoff_min_s=0.001, backoff_max_s=0.002
)


def desired(
    prefill: int = 1, decode: int = 1, limits: SupervisionSpec = LIMITS, router: str | None = None
) -> DesiredChanged:
    pools = {"prefill": PoolWanted(prefill, "a"), "decode": PoolWanted(decode, "a")}
    return DesiredChanged(pools, limits, router=router)


class FakeActor:
    """An actor whose fate the test decides. A `Handle`."""

    def __init__(self, host: FakeHost, member_id: str, attempt: int, fails_with: EngineError | None) -> None:
        self.member_id = member_id
        self.address = f"{member_id}:{attempt}"
        self.workers: Mapping[str, str] | None = None
        self.stopped = False
        self.hangs = False
        self.asked: asyncio.Event | None = None
        self.misses = 0
        self.answered_again = asyncio.Event()
        self.serves = asyncio.Event()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._host = host
        self._fails_with = fails_with

    @property
    def alive(self) -> bool:
        return not self._dead.done()

    def die(self, reason: str) -> None:
        if self.alive:
            self._dead.set_result(reason)

    async def ready(self) -> ReadyReport:
        if self._fails_with is not None:
            raise self._fails_with
        serving = asyncio.ensure_future(self.serves.wait())
        dying: asyncio.Future[Any] = self._dead
        await asyncio.wait([serving, dying], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if self._dead.done():
            raise ActorLost(self._dead.result())
        return ReadyReport(self.address, "incarnation", None, node_id=self._host.node_id)

    async def gone(self) -> str:
        return await asyncio.shield(self._dead)

    async def answers(self, timeout_s: float) -> bool:
        if self.asked is not None:
            self.asked.set()
            await asyncio.Event().wait()  # as long as a dead address is tried
        if self.hangs:
            return False
        if self.misses:
            self.misses -= 1
            return False
        self.answered_again.set()
        return True

    async def stop(self) -> None:
        self._host.stops.append(self.member_id)
        self.stopped = True

    async def retire(self, drain_s: float) -> None:
        self._host.retired.append((self.address, drain_s))
        await self._host.nothing_runs.wait()
        self.stopped = True

    async def set_workers(self, addresses: Mapping[str, str], draining: frozenset[str], timeout_s: float) -> str:
        self.workers = {worker_id: address for worker_id, address in addresses.items() if worker_id not in draining}
        return self._host.not_connected

    async def drained(self, worker_id: str, timeout_s: float) -> bool:
        self._host.asked_to_drain.append(worker_id)
        await self._host.nothing_runs.wait()
        return True

    def kill(self, *, force: bool) -> None:
        if self._host.obeys or force:
            self.die("killed")


class FakeHost:
    """Remembers every actor; they serve at once unless `holds` says otherwise."""

    def __init__(self) -> None:
        self.actors: dict[str, list[FakeActor]] = {}
        self.stops: list[str] = []
        self.retired: list[tuple[str, float]] = []
        self.fails_with: dict[str, EngineError] = {}
        self.holds: set[str] = set()
        self.not_connected = ""
        self.obeys = True
        self.asked_to_drain: list[str] = []
        self.refuses_once = ""
        self.node_id = "first"
        self.nodes_leaving: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.nothing_runs = asyncio.Event()
        self.nothing_runs.set()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, member_id: str, role: str, takes_over: PublishWorkers | None = None) -> Handle:
        if self.refuses_once:
            reason, self.refuses_once = self.refuses_once, ""
            raise ActorLost(reason)
        lives = self.actors.setdefault(member_id, [])
        alive = [actor for actor in lives if actor.alive]
        assert len(alive) == (takes_over is not None), f"{len(alive)} live actors of {member_id} already"
        lives.append(FakeActor(self, member_id, len(lives) + 1, self.fails_with.get(member_id)))
        if takes_over is not None:
            lives[-1].workers = takes_over.addresses
        if member_id not in self.holds:
            lives[-1].serves.set()
        return lives[-1]

    async def leaving(self, known: frozenset[str]) -> frozenset[str]:
        return await self.nodes_leaving.get()

    async def lost(self) -> str:
        return await asyncio.shield(self._lost)

    def lose(self, reason: str) -> None:
        self._lost.set_result(reason)

    def last(self, member_id: str) -> FakeActor:
        return self.actors[member_id][-1]

    @property
    def alive(self) -> list[str]:
        return [member_id for member_id, lives in self.actors.items() if lives[-1].alive]


class Watched:
    """A running supervisor and what it told."""

    def __init__(self, host: FakeHost) -> None:
        self.snapshots: list[Snapshot] = []
        self._told = asyncio.Event()
        self.supervisor = Supervisor(host, POOLS, LIMITS, self._tell)
        self.task = asyncio.ensure_future(self.supervisor.run())

    def _tell(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self._told.set()

    async def told(self) -> None:
        await self._told.wait()
        self._told.clear()

    async def settled(self, **replicas: int) -> None:
        """Wait until the cluster is as `desired(**replicas)` says."""
        async with asyncio.timeout(10):
            while True:
                last = self.snapshots[-1]
                roles = [member.view.role for member in last.members]
                if last.settled and all(roles.count(role) == count for role, count in replicas.items()):
                    return
                await self.told()

    async def ready(self, **attempts: int) -> None:
        """Wait until every member serves and these (with _ for -) have been started so many times."""
        wanted = {member_id.replace("_", "-"): count for member_id, count in attempts.items()}
        async with asyncio.timeout(10):
            while True:
                await self._told.wait()
                self._told.clear()
                started = {member.view.member_id: member.view.attempt for member in self.snapshots[-1].members}
                if self.snapshots[-1].ready and started | wanted == started:
                    return


@asynccontextmanager
async def running(host: FakeHost) -> AsyncIterator[Watched]:
    watched = Watched(host)
    try:
        yield watched
    finally:
        watched.supervisor.give_up("the test is over")
        await asyncio.gather(watched.task, return_exceptions=True)
