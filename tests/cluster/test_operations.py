from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from cluster.events import ROUTER_ID, DesiredChanged, MemberView, Phase
from cluster.host import ReadyReport
from cluster.operations import Operations
from cluster.spec import ClusterSpec, PoolSpec, PoolsSpec
from cluster.supervisor import Member, Snapshot
from engine.errors import ConfigError, DeadlineExceeded, UnavailableError

SPEC = ClusterSpec(pools=PoolsSpec(prefill=PoolSpec(replicas=1), decode=PoolSpec(replicas=2)))
WORKERS = ("prefill-0", "decode-0", "decode-1")


class FakeCluster:
    """Notes what was asked for; `becomes` says that it is so."""

    def __init__(self) -> None:
        self.asked: list[DesiredChanged] = []
        self.used: list[ClusterSpec] = []
        self.too_big = False
        self.progress: list[Mapping[str, Any]] = []
        self.told = asyncio.Event()
        self.operations = Operations(SPEC, self, self._check, self.used.append)
        self.is_as_wanted = True
        self.lags = False
        self.phases = dict.fromkeys((ROUTER_ID, *WORKERS), Phase.READY)
        self._becomes(None)

    def change(self, desired: DesiredChanged) -> None:
        self.asked.append(desired)
        if not self.lags:
            self._becomes(desired)

    def catch_up(self) -> None:
        self._becomes(self.asked[-1])

    def _becomes(self, desired: DesiredChanged | None) -> None:
        report = ReadyReport("a", "i", None)
        views = [MemberView(n, p, 1, "a", "no memory", role=n.partition("-")[0]) for n, p in self.phases.items()]
        members = tuple(Member(view, report if view.phase is Phase.READY else None) for view in views)
        self.operations.changed(Snapshot(True, members, self.is_as_wanted, "", desired))

    def _check(self, spec: ClusterSpec) -> None:
        if self.too_big:
            raise ConfigError("pools: too big")

    async def order(self, name: str, wait_s: float = 5.0, **fields: Any) -> dict[str, Any]:
        return await self.operations.carry_out({"order": name, "wait_s": wait_s, **fields}, self._tell)

    async def apply(self, spec: ClusterSpec, **fields: Any) -> dict[str, Any]:
        return await self.order("apply", spec=json.dumps(asdict(spec)), **fields)

    async def _tell(self, progress: Mapping[str, Any]) -> None:
        self.progress.append(progress)
        self.told.set()


@pytest.fixture
async def cluster() -> FakeCluster:
    return FakeCluster()


def resized(**replicas: int) -> ClusterSpec:
    pools = {role: replace(SPEC.pool(role), replicas=count) for role, count in replicas.items()}
    return replace(SPEC, pools=replace(SPEC.pools, **pools))


async def test_applying_a_spec_makes_it_the_one_that_runs_and_again_changes_nothing(cluster: FakeCluster) -> None:
    wanted = resized(prefill=3)
    assert (await cluster.apply(wanted))["lines"] == ["prefill: 1 -> 3 workers: 2 workers are started"]
    assert (cluster.operations.spec, cluster.used[-1]) == (wanted, wanted)
    assert cluster.asked[-1].pools["prefill"].replicas == 3

    again = await cluster.apply(wanted)

    assert (again["changed"], again["lines"]) == (False, [])
    assert cluster.asked[-1] == cluster.asked[0]


async def test_a_dry_run_changes_nothing(cluster: FakeCluster) -> None:
    told = await cluster.apply(replace(resized(decode=1), dtype="float32"), dry_run=True)
    assert told["lines"][0] == "decode: 2 -> 1 workers: 1 worker is drained and stopped"
    assert told["lines"][1].startswith("refused: dtype bfloat16 -> float32")
    assert (cluster.asked, cluster.operations.spec) == ([], SPEC)


async def test_what_is_refused_or_does_not_fit_changes_nothing_at_all(cluster: FakeCluster) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        await cluster.apply(replace(resized(decode=3), dtype="float32"))
    cluster.too_big = True
    with pytest.raises(ConfigError, match="too big"):
        await cluster.apply(resized(decode=3))
    assert (cluster.asked, cluster.used, cluster.operations.spec) == ([], [], SPEC)


async def test_scale_changes_the_number_of_workers_alone(cluster: FakeCluster) -> None:
    await cluster.order("scale", replicas={"prefill": 2, "decode": 1})
    assert cluster.operations.spec == resized(prefill=2, decode=1)
    with pytest.raises(ConfigError, match="'cache' is no pool; pools are prefill and decode"):
        await cluster.order("scale", replicas={"cache": 2})
    with pytest.raises(ConfigError, match="'decode': replicas must be an integer, got 'True'"):
        await cluster.order("scale", replicas={"decode": True})
    with pytest.raises(ConfigError, match="replicas must be in"):
        await cluster.order("scale", replicas={"prefill": 1000})


async def test_a_pool_with_a_range_is_scaled_within_it_by_every_order(cluster: FakeCluster) -> None:
    pools = {"prefill": SPEC.pools.prefill, "decode": PoolSpec(replicas=2, min_replicas=2, max_replicas=4)}
    ranged = replace(SPEC, pools=PoolsSpec(**pools))
    told = await cluster.apply(ranged)
    assert told["lines"] == [
        "pools.decode.min_replicas none -> 2: at once",
        "pools.decode.max_replicas none -> 4: at once",
    ]
    await cluster.order("scale", replicas={"decode": 4})
    for count in (1, 5):
        with pytest.raises(
            ConfigError, match=r"decode: replicas must be in \[2, 4\], min_replicas to max_replicas, got"
        ):
            await cluster.order("scale", replicas={"decode": count})
    await cluster.order("scale", replicas={"decode": 2})
    for name in ("drain", "flip"):
        with pytest.raises(ConfigError, match=r"decode: replicas must be in \[2, 4\].*got 1"):
            await cluster.order(name, worker="decode-1")
    assert cluster.operations.spec == ranged


async def test_an_order_is_judged_by_what_the_one_before_it_made_of_the_cluster(cluster: FakeCluster) -> None:
    await cluster.order("scale", replicas={"decode": 3})
    cluster.lags = True
    first = asyncio.create_task(cluster.order("drain", 0.0, worker="decode-1"))
    second = asyncio.create_task(cluster.order("drain", 0.0, worker="decode-1"))
    await first
    assert not second.done()
    cluster.phases["decode-1"] = Phase.DRAINING
    cluster.catch_up()
    with pytest.raises(ConfigError, match="decode-1 is draining already"):
        await second
    assert cluster.operations.spec.pools.decode.replicas == 2


async def test_the_same_spec_applied_twice_at_once_is_done_for_both(cluster: FakeCluster) -> None:
    cluster.is_as_wanted = False
    both = [asyncio.create_task(cluster.apply(resized(decode=3))) for _ in range(2)]
    async with asyncio.timeout(5):
        await cluster.told.wait()
    cluster.is_as_wanted = True
    cluster.catch_up()
    assert [told["changed"] for told in await asyncio.gather(*both)] == [True, False]


async def test_a_restart_of_the_router_changes_its_revision_and_nothing_else(cluster: FakeCluster) -> None:
    told = [await cluster.order("restart") for _ in range(2)]
    assert [each["lines"] for each in told] == [["router: another one takes over"]] * 2
    first, second = cluster.asked
    assert first.router != second.router
    assert first.pools == second.pools
    assert cluster.operations.spec == SPEC


async def test_a_flip_goes_on_when_its_time_is_up_and_scaling_meanwhile_ends_it_with_the_reason(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.is_as_wanted = False
    with pytest.raises(DeadlineExceeded, match="it goes on"):
        await cluster.order("flip", wait_s=0.01, worker="decode-1")
    assert len(cluster.asked) == 1
    cluster.is_as_wanted = True
    cluster.catch_up()
    while len(cluster.asked) < 2:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0)
    assert cluster.operations.spec == resized(prefill=2, decode=1)

    cluster.is_as_wanted = False
    flip = asyncio.create_task(cluster.order("flip", worker="prefill-0"))
    while len(cluster.asked) < 3:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0)
    await cluster.order("scale", wait_s=0.0, replicas={"decode": 2})
    with pytest.raises(UnavailableError, match="prefill-0 is taken away, and no decode worker was started: another"):
        await flip
    assert cluster.operations.spec == resized(prefill=1, decode=2)
    await cluster.operations.close()


async def test_drain_names_the_worker_and_makes_its_pool_smaller(cluster: FakeCluster) -> None:
    await cluster.order("drain", worker="decode-0")
    assert cluster.asked[-1].take_away == "decode-0"
    assert cluster.operations.spec == resized(decode=1)


@pytest.mark.parametrize("order", ["drain", "flip"])
async def test_the_only_decode_worker_cannot_be_spared(cluster: FakeCluster, order: str) -> None:
    await cluster.order("scale", replicas={"decode": 1})
    with pytest.raises(ConfigError, match=r"decode-0 is the only decode worker.*`kvrelay scale decode=2` first"):
        await cluster.order(order, worker="decode-0")


@pytest.mark.parametrize("worker", ["decode-7", "router"])
async def test_a_worker_that_is_not_there_is_refused_with_those_that_are(cluster: FakeCluster, worker: str) -> None:
    with pytest.raises(ConfigError, match="there are prefill-0, decode-0, decode-1"):
        await cluster.order("drain", worker=worker)


async def test_a_worker_that_drains_already_is_not_drained_twice(cluster: FakeCluster) -> None:
    cluster.phases["decode-1"] = Phase.DRAINING
    await cluster.order("scale", replicas={"decode": 2})
    with pytest.raises(ConfigError, match="decode-1 is draining already"):
        await cluster.order("drain", worker="decode-1")


async def test_flip_takes_one_away_before_it_starts_the_other(cluster: FakeCluster) -> None:
    told = await cluster.order("flip", worker="decode-1")
    assert [pool["role"] for pool in told["pools"]] == ["prefill", "decode"]
    first, second = cluster.asked
    assert (first.take_away, first.pools["decode"].replicas, first.pools["prefill"].replicas) == ("decode-1", 1, 1)
    assert (second.pools["decode"].replicas, second.pools["prefill"].replicas) == (1, 2)


async def test_an_order_that_is_not_done_in_time_says_what_is_missing(cluster: FakeCluster) -> None:
    cluster.is_as_wanted = False
    cluster.phases["decode-2"] = Phase.STARTING
    with pytest.raises(DeadlineExceeded, match=r"not done after 0\.01 s, and it goes on: decode-2 is starting"):
        await cluster.order("scale", wait_s=0.01, replicas={"decode": 3})
    assert cluster.progress[-1]["members"]["decode-2"] == "starting"


async def test_an_order_that_is_overtaken_says_so(cluster: FakeCluster) -> None:
    cluster.is_as_wanted = False
    waiting = asyncio.create_task(cluster.order("scale", replicas={"decode": 3}))
    async with asyncio.timeout(5):
        await cluster.told.wait()
    cluster.is_as_wanted = True
    await cluster.order("scale", replicas={"decode": 1})
    with pytest.raises(UnavailableError, match="another order came"):
        await waiting


async def test_show_tells_the_spec_that_runs(cluster: FakeCluster) -> None:
    shown = await cluster.order("show")
    assert shown["spec"] == asdict(SPEC)
    assert shown["members"]["decode-0"] == "ready"
