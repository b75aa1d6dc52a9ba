"""The router's prefix index against what is resident at real workers, over real sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from one_process_cluster import BOUND_S, ClusterWorker, OneProcessCluster

from engine.block_hash import pack_tokens
from engine.routing_key import RoutingKeys
from kvrelay.v1 import worker_pb2
from router.block_follower import BlockFollower, FollowerState
from router.server import RouterServer

PROMPT = list(range(1, 90))
SCOPE = b""


class Noted:
    """Wakes whoever waits when a router has noted something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = asyncio.Condition()
        self._wakers: set[asyncio.Task[None]] = set()
        original = BlockFollower.apply

        def apply(follower: BlockFollower, message: worker_pb2.BlockChanges, now: float) -> None:
            original(follower, message, now)
            waker = asyncio.ensure_future(self._wake())
            self._wakers.add(waker)
            waker.add_done_callback(self._wakers.discard)

        monkeypatch.setattr(BlockFollower, "apply", apply)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def equal(self, router: RouterServer, worker: ClusterWorker, at_least: int) -> None:
        """Wait until the router knows exactly what is resident at the worker: `at_least` so many blocks."""

        def settled() -> bool:
            blocks = router.registry.session(worker.config.worker_id).blocks
            assert blocks is not None
            known = set(router.registry.index.resident(blocks.slot))
            return blocks.state is FollowerState.LIVE and len(known) >= at_least and known == resident(worker)

        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(settled)


def resident(worker: ClusterWorker) -> set[int]:
    worker.role.block_feed.check_integrity()
    return worker.role.block_feed.resident()


def depths(router: RouterServer, prompt: list[int]) -> dict[str, int]:
    """Worker -> blocks of the prompt, as the index has it."""
    registry = router.registry
    keys = RoutingKeys(0, SCOPE, pack_tokens(prompt), 8)
    found = {match.slots: match.num_blocks for match in registry.index.lookup(keys, asyncio.get_running_loop().time())}
    told: dict[str, int] = {}
    for snapshot in registry.snapshots():
        blocks = registry.session(snapshot.worker_id).blocks
        assert blocks is not None
        told[snapshot.worker_id] = max((n for slots, n in found.items() if slots >> blocks.slot & 1), default=0)
    return told


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


async def test_the_index_learns_what_both_workers_of_a_request_hold(tmp_path: Path, noted: Noted) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        answer = await cluster.generate(PROMPT)
        await noted.equal(cluster.router, cluster.prefill[0], at_least=11)
        await noted.equal(cluster.router, cluster.decode[0], at_least=12)
        told = depths(cluster.router, PROMPT + answer.token_ids[:7])
    assert told == {"prefill-0": 11, "decode-0": 12}


async def test_evicted_blocks_leave_the_index(tmp_path: Path, noted: Noted) -> None:
    async with OneProcessCluster(tmp_path, prefill={"num_blocks_override": 16}) as cluster:
        await cluster.generate(PROMPT)
        await noted.equal(cluster.router, cluster.prefill[0], at_least=11)
        await cluster.generate([100 + token for token in PROMPT])
        await cluster.generate([token + 50 for token in PROMPT])
        await noted.equal(cluster.router, cluster.prefill[0], at_least=11)
        await noted.equal(cluster.router, cluster.decode[0], at_least=33)
        blocks = cluster.router.registry.session("prefill-0").blocks
        assert blocks is not None
        keys = RoutingKeys(0, SCOPE, pack_tokens(PROMPT), 8).all_short()
        assert not set(keys) <= set(cluster.router.registry.index.resident(blocks.slot))


async def test_a_short_tail_is_computed_by_the_decode_worker_that_holds_the_rest(tmp_path: Path, noted: Noted) -> None:
    async with OneProcessCluster(tmp_path, router={"local_prefill_max_tokens": 128}) as cluster:
        first = await cluster.generate(PROMPT)
        await noted.equal(cluster.router, cluster.decode[0], at_least=12)
        second = await cluster.generate(PROMPT + first.token_ids)
        assert first.route.prefill_worker == "prefill-0"
        assert second.route.prefill_worker == ""
        assert second.finished is not None
        assert second.finished.usage.cached_tokens == 96
        (record,) = cluster.router.dispatcher.history.recent(1)
        (chosen, *_) = record.to_proto().considered
        assert (chosen.cached_tokens, chosen.found_cached_tokens) == (96, 96)


async def test_a_new_router_is_warm_from_what_the_workers_list(tmp_path: Path, noted: Noted) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        await cluster.generate(PROMPT)
        for worker in cluster.workers:
            await noted.equal(cluster.router, worker, at_least=11)
        second = RouterServer(cluster.router_config("second"))
        await second.start()
        try:
            async with asyncio.timeout(BOUND_S):
                while len(second.registry.snapshots()) < len(cluster.workers):
                    await second.registry.changed()
            for worker in cluster.workers:
                await noted.equal(second, worker, at_least=11)
            assert depths(second, PROMPT) == depths(cluster.router, PROMPT)
        finally:
            await second.stop(0.0)


async def test_a_router_with_another_seed_is_refused(tmp_path: Path) -> None:
    async with OneProcessCluster(tmp_path) as cluster:
        second = RouterServer(cluster.router_config("second", routing_seed=8))
        await second.start()
        try:
            async with asyncio.timeout(BOUND_S):
                while "routing seed" not in second.registry.why_not_ready():
                    await second.registry.changed()
            assert second.registry.snapshots() == []
        finally:
            await second.stop(0.0)
