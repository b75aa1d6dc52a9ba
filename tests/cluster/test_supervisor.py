from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster import supervisor as supervisor_module
from cluster.events import ROUTER_ID, DesiredChanged, PoolWanted
from cluster.host import ActorLost, Handle, ReadyReport
from cluster.spec import SupervisionSpec
from cluster.supervisor import Snapshot, Supervisor
from engine.errors import EngineError, ModelError, UnavailableError

WORKERS = ("prefill-0", "decode-0")
POOLS = {"prefill": PoolWanted(1, "a"), "decode": PoolWanted(1, "a")}
LIMITS = SupervisionSpec(
    start_timeout_s=60.0, hung_after_s=0.003, drain_s=0.0, backoff_min_s=0.001, backoff_max_s=0.002
)


def desired(prefill: int = 1, decode: int = 1, limits: SupervisionSpec = LIMITS) -> DesiredChanged:
    return DesiredChanged({"prefill": PoolWanted(prefill, "a"), "decode": PoolWanted(decode, "a")}, limits)


class FakeActor:
    """An actor whose fate the test decides. A `Handle`."""

    def __init__(self, host: FakeHost, member_id: str, attempt: int, fails_with: EngineError | None) -> None:
        self.member_id = member_id
        self.address = f"{member_id}:{attempt}"
        self.workers: Mapping[str, str] | None = None
        self.stopped = False
        self.hangs = False
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

    def start(self, member_id: str, role: str) -> Handle:
        if self.refuses_once:
            reason, self.refuses_once = self.refuses_once, ""
            raise ActorLost(reason)
        lives = self.actors.setdefault(member_id, [])
        assert not any(actor.alive for actor in lives), f"two live actors of {member_id}"
        lives.append(FakeActor(self, member_id, len(lives) + 1, self.fails_with.get(member_id)))
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


async def test_a_cluster_is_ready_when_the_router_has_every_worker() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)

        assert host.last(ROUTER_ID).workers == {"prefill-0": "prefill-0:1", "decode-0": "decode-0:1"}
        assert watched.snapshots[-1].router_address == "router:1"


async def test_a_dead_worker_is_replaced_and_the_router_is_told() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.last("decode-0").die("killed by somebody")
        await watched.ready(decode_0=2)

        assert host.last(ROUTER_ID).workers == {"prefill-0": "prefill-0:1", "decode-0": "decode-0:2"}


async def test_a_dead_router_is_replaced_and_told_of_all_workers() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.last(ROUTER_ID).die("killed by somebody")
        await watched.ready(router=2, decode_0=1)

        assert host.last(ROUTER_ID).workers == {"prefill-0": "prefill-0:1", "decode-0": "decode-0:1"}


@pytest.mark.parametrize("member_id", [ROUTER_ID, *WORKERS])
async def test_a_member_that_hangs_is_killed_and_replaced(member_id: str) -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        hung = host.last(member_id)
        hung.hangs = True
        await watched.ready(**{member_id.replace("-", "_"): 2})

        assert not hung.alive
        assert host.last(ROUTER_ID).workers == {worker_id: host.last(worker_id).address for worker_id in WORKERS}
        reasons = {member.view.last_reason for snapshot in watched.snapshots for member in snapshot.members}
        assert reasons == {"", "no answer for 0.003 s"}


async def test_one_answer_that_is_late_is_forgiven() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        late = host.last("decode-0")
        late.misses = 1
        late.answered_again.clear()
        await late.answered_again.wait()
        watched.supervisor.request_stop()
        await watched.task

    assert len(host.actors["decode-0"]) == 1


async def test_an_actor_that_cannot_even_begin_is_tried_again() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.refuses_once = "its name is taken"
        host.last(ROUTER_ID).die("killed")
        await watched.ready(router=3)
        reasons = {member.view.last_reason for snapshot in watched.snapshots for member in snapshot.members}
        assert reasons == {"", "killed", "its name is taken"}


async def test_workers_of_a_node_that_goes_away_are_replaced_elsewhere_while_they_serve() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.node_id = "second"
        host.nodes_leaving.put_nowait(frozenset({"first"}))
        async with asyncio.timeout(10):
            while host.stops != ["prefill-0", "decode-0"] or not watched.snapshots[-1].settled:
                await watched.told()
        assert host.last(ROUTER_ID).workers == {"prefill-1": "prefill-1:1", "decode-1": "decode-1:1"}
        assert host.alive == [ROUTER_ID, "prefill-1", "decode-1"]


async def test_a_stop_drains_the_router_first_and_leaves_no_actor() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        watched.supervisor.request_stop()
        await watched.task

    assert host.stops[0] == ROUTER_ID
    assert sorted(host.stops) == sorted((ROUTER_ID, *WORKERS))
    assert host.alive == []


async def test_actors_that_do_not_end_when_asked_are_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "KILL_TIMEOUT_S", 0.01)
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.obeys = False
        watched.supervisor.request_stop()
        await watched.task

    assert host.alive == []


async def test_a_stop_during_the_start_ends_every_actor() -> None:
    host = FakeHost()
    host.holds = set(WORKERS)
    async with running(host) as watched:
        watched.supervisor.request_stop()
        await watched.task
    assert host.alive == []


async def test_a_worker_that_can_never_start_fails_the_run_with_its_reason() -> None:
    host = FakeHost()
    host.fails_with["decode-0"] = ModelError("no weights")
    async with running(host) as watched:
        with pytest.raises(UnavailableError, match="decode-0: no weights"):
            await watched.task
    assert host.alive == []
    assert len(host.actors["decode-0"]) == 1


async def test_workers_that_the_router_refuses_fail_the_start() -> None:
    host = FakeHost()
    host.not_connected = "decode-0 is refused: another model"
    async with running(host) as watched:
        with pytest.raises(UnavailableError, match="the router cannot use its workers: decode-0 is refused"):
            await watched.task
    assert host.alive == []


async def test_a_lost_host_ends_the_run_at_once() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.lose("a process of Ray ended")
        with pytest.raises(UnavailableError, match="a process of Ray ended"):
            await watched.task


async def test_a_worker_that_is_not_wanted_is_stopped_when_the_router_has_nothing_on_it() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.nothing_runs.clear()
        watched.supervisor.change(desired(prefill=0))
        router = host.last(ROUTER_ID)
        async with asyncio.timeout(10):
            while not host.asked_to_drain:
                await watched.told()
        assert (router.workers, host.asked_to_drain) == ({"decode-0": "decode-0:1"}, ["prefill-0"])
        assert host.last("prefill-0").alive

        host.nothing_runs.set()
        await watched.settled(prefill=0)
        assert host.stops == ["prefill-0"]
        assert not host.last("prefill-0").alive


async def test_a_worker_that_still_has_requests_when_its_time_is_up_is_stopped() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.nothing_runs.clear()
        watched.supervisor.change(desired(prefill=0, limits=replace(LIMITS, worker_drain_s=0.001)))
        await watched.settled(prefill=0)
        assert host.stops == ["prefill-0"]


async def test_the_router_is_told_of_a_new_worker_when_it_serves() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        watched.supervisor.change(desired(decode=2))
        await watched.settled(decode=2)
        workers = host.last(ROUTER_ID).workers
        assert workers == {"prefill-0": "prefill-0:1", "decode-0": "decode-0:1", "decode-1": "decode-1:1"}


async def test_a_new_worker_that_the_router_refuses_is_told_and_stops_nothing() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.not_connected = "decode-1 is refused: another block size"
        watched.supervisor.change(desired(decode=2))
        async with asyncio.timeout(10):
            while not watched.snapshots[-1].trouble:
                await watched.told()
        assert watched.snapshots[-1].trouble == host.not_connected
        assert not watched.snapshots[-1].settled
        assert len(host.alive) == 4


async def test_no_task_is_left_however_the_run_ends() -> None:
    before = asyncio.all_tasks()
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        watched.task.cancel()
        await asyncio.wait({watched.task})
    assert asyncio.all_tasks() == before
