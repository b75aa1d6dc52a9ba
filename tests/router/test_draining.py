"""A worker that drains: nothing new, and what it has goes on."""

from __future__ import annotations

import asyncio

from fake_worker import FakeWorker, expected_output
from router_fleet import Call, Fleet

PROMPT = b"hello world"
EXPECTED = expected_output(PROMPT, 6)


def addresses(fleet: Fleet) -> dict[str, str]:
    return {worker_id: worker.address for worker_id, worker in fleet.workers.items()}


async def start(fleet: Fleet) -> tuple[FakeWorker, FakeWorker]:
    """Two decode workers, known by name as the cluster knows them."""
    await fleet.start([FakeWorker("decode", "d0"), FakeWorker("decode", "d1")])
    fleet.registry.set_workers(addresses(fleet))
    await fleet.ready(2)
    return fleet.workers["d0"], fleet.workers["d1"]


async def call_on_draining(fleet: Fleet) -> tuple[Call, FakeWorker, FakeWorker]:
    """A call that is held in the middle of its output, its decode worker, which drains now, and the other one."""
    workers = await start(fleet)
    for worker in workers:
        worker.hold(("output", 2))
    call = fleet.call()
    busy = await fleet.first_to_reach(("output", 2), list(workers))
    fleet.registry.set_workers(addresses(fleet), {busy.worker_id})
    return call, busy, next(worker for worker in workers if worker is not busy)


async def test_a_draining_worker_gets_no_new_request_and_finishes_those_that_it_has(fleet: Fleet) -> None:
    call, busy, other = await call_on_draining(fleet)
    other.release(("output", 2))

    later = [await fleet.call().done() for _ in range(3)]
    busy.release(("output", 2))
    finished = await call.done()

    assert {each.route.decode_worker for each in later} == {other.worker_id}
    assert (finished.route.decode_worker, finished.route.attempts) == (busy.worker_id, 1)
    assert call.token_ids == EXPECTED


async def test_a_worker_is_idle_when_its_last_request_is_over(fleet: Fleet) -> None:
    call, busy, other = await call_on_draining(fleet)

    idle = asyncio.create_task(fleet.registry.wait_idle(busy.worker_id))
    done, _ = await asyncio.wait({idle}, timeout=0)
    assert not done
    for worker in (busy, other):
        worker.release(("output", 2))
    await call.done()
    async with asyncio.timeout(5):
        await idle


async def test_what_a_draining_worker_still_has_when_it_is_taken_away_goes_on_elsewhere(fleet: Fleet) -> None:
    call, busy, other = await call_on_draining(fleet)
    other.release(("output", 2))
    await call.tokens(2)
    fleet.registry.set_workers({other.worker_id: other.address})

    finished = await call.done()

    assert (finished.route.decode_worker, finished.route.attempts) == (other.worker_id, 2)
    assert call.token_ids == EXPECTED
    assert fleet.registry.departed() == []  # nobody lost it
    busy.release(("output", 2))


async def test_without_another_decode_worker_new_requests_wait_for_one(fleet: Fleet) -> None:
    await start(fleet)
    fleet.registry.set_workers(addresses(fleet), {"d0", "d1"})
    assert not fleet.registry.is_ready()
    call = fleet.call()
    fleet.registry.set_workers(addresses(fleet), {"d0"})
    assert (await call.done()).route.decode_worker == "d1"
