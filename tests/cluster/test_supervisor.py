from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_host import LIMITS, WORKERS, FakeHost, desired, running

from cluster import supervisor as supervisor_module
from cluster.events import ROUTER_ID
from engine.errors import ConfigError, ModelError, UnavailableError


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


async def test_a_death_during_a_health_check_is_noticed_without_its_end() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        dying = host.last("decode-0")
        dying.asked = asyncio.Event()
        async with asyncio.timeout(10):
            await dying.asked.wait()
        dying.die("its node is gone")
        await watched.ready(decode_0=2)
        assert {member.view.last_reason for member in watched.snapshots[-1].members} == {"", "its node is gone"}


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


async def test_another_router_serves_before_the_one_before_ends_which_finishes_what_it_has() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.nothing_runs.clear()
        watched.supervisor.change(desired(router="b"))
        await watched.ready(router=2)
        first, second = host.actors[ROUTER_ID]
        assert second.workers == {"prefill-0": "prefill-0:1", "decode-0": "decode-0:1"}
        async with asyncio.timeout(10):
            while not host.retired:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0)
        assert (host.retired, first.alive) == ([("router:1", LIMITS.worker_drain_s)], True)
        assert watched.snapshots[-1].router_address == "router:2"

        host.nothing_runs.set()
        await watched.settled()
        assert (first.alive, second.alive, host.stops) == (False, True, [])


async def test_a_router_that_cannot_take_over_leaves_the_one_that_serves_alone() -> None:
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        host.fails_with[ROUTER_ID] = ConfigError("API keys: no file")
        watched.supervisor.change(desired(router="b"))
        async with asyncio.timeout(10):
            while len(host.actors[ROUTER_ID]) < 3:
                await watched.told()
        assert watched.snapshots[-1].router_address == "router:1"
        assert {member.view.last_reason for member in watched.snapshots[-1].members} >= {"", "API keys: no file"}
        watched.supervisor.change(desired())
        await watched.settled()
        assert host.actors[ROUTER_ID][0].alive
        assert len(host.alive) == 3 - 1  # `alive` looks at the last of each


async def test_no_task_is_left_however_the_run_ends() -> None:
    before = asyncio.all_tasks()
    host = FakeHost()
    async with running(host) as watched:
        await watched.ready(router=1)
        watched.task.cancel()
        await asyncio.wait({watched.task})
    assert asyncio.all_tasks() == before
