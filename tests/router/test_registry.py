"""Connections to workers, over real loopback streams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from fake_worker import FINGERPRINT, FakeWorker
from router_fleet import CONFIG

from engine.model_config import weights_fingerprint
from kvrelay.v1 import worker_pb2
from router.registry import MAX_DEPARTED, Registry
from router.worker_client import WorkerClient, WorkerState


class Workers:
    def __init__(self) -> None:
        self.registry: Registry
        self._started: list[FakeWorker] = []

    def start_registry(self, **settings: Any) -> Registry:
        self.registry = Registry(replace(CONFIG, **settings), FINGERPRINT)
        return self.registry

    async def start(self, worker: FakeWorker) -> str:
        self._started.append(worker)
        return await worker.start()

    async def until(self, state: WorkerState, detail: str = "", at: int = 0) -> WorkerClient:
        """Wait until the worker at position `at` is in `state` for a reason that contains `detail`."""
        async with asyncio.timeout(5):
            while True:
                client = self.registry.workers[at]
                if client.state is state and detail in client.detail:
                    return client
                await self.registry.changed()

    async def close(self) -> None:
        self.registry.check_idle()
        await self.registry.close()
        for worker in self._started:
            await worker.stop()


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    workers = Workers()
    yield workers
    await workers.close()


async def test_a_worker_becomes_ready_with_what_it_said_of_itself(workers: Workers) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker("decode", "d0"))])
    assert registry.workers[0].state is WorkerState.CONNECTING
    client = await workers.until(WorkerState.READY)
    assert client.peer is not None
    assert (client.peer.worker_id, client.peer.incarnation, client.peer.pid) == ("d0", "d0-1", 4711)
    assert registry.is_ready()
    assert registry.snapshots()[0].max_request_tokens == 200


async def test_prefill_workers_alone_make_no_router_ready(workers: Workers) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker("prefill", "p0"))])
    await workers.until(WorkerState.READY)
    assert not registry.is_ready()
    assert registry.roomiest() is None
    assert registry.why_not_ready() == "none of the ready workers is a decode worker"


@pytest.mark.parametrize(
    ("welcome", "reason"),
    [
        ({"protocol": 99}, "it speaks protocol 99"),
        ({"protocol": 0}, "it speaks protocol 0"),
        ({"role": "both"}, "its role is 'both'"),
        ({"fingerprint": b"other"}, "fingerprint 6f74686572"),
        ({"incarnation": ""}, "no incarnation"),
        ({"block_size": 0}, "no block_size"),
    ],
    ids=["newer-protocol", "no-protocol", "role", "fingerprint", "incarnation", "block-size"],
)
async def test_a_worker_that_does_not_match_is_refused_with_the_reason(
    workers: Workers, welcome: dict[str, Any], reason: str
) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker("decode", "d0", **welcome))])
    client = await workers.until(WorkerState.LOST, reason)
    assert client.detail.startswith("refused: ")
    assert registry.snapshots() == []
    assert reason in registry.why_not_ready()


async def test_a_worker_with_another_block_size_than_the_fleet_is_refused(workers: Workers) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker("decode", "d0"))])
    await workers.until(WorkerState.READY)
    registry.add_addresses([await workers.start(FakeWorker("prefill", "p0", block_size=8))])
    await workers.until(WorkerState.LOST, "its block_size is 8, that of 'd0' is 4", at=1)
    registry.check_integrity()


async def test_workers_with_weights_in_int8_serve_among_themselves_only(workers: Workers) -> None:
    registry = workers.start_registry()
    int8 = weights_fingerprint(FINGERPRINT, "int8")
    registry.add_addresses([await workers.start(FakeWorker("decode", "d0", fingerprint=int8))])
    await workers.until(WorkerState.READY)
    registry.add_addresses([await workers.start(FakeWorker("prefill", "p0"))])
    await workers.until(WorkerState.LOST, "its weights_dtype is not that of 'd0'", at=1)
    registry.check_integrity()


@pytest.mark.parametrize("roles", [("decode", "prefill"), ("prefill", "decode")])
async def test_a_worker_with_no_transport_in_common_is_refused_with_both_offers(
    workers: Workers, roles: tuple[str, str]
) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker(roles[0], "w0", kv_transports=["shm", "tcp"]))])
    await workers.until(WorkerState.READY)
    registry.add_addresses([await workers.start(FakeWorker(roles[1], "w1", kv_transports=["gloo"]))])
    await workers.until(WorkerState.LOST, "kv_transports have none in common", at=1)
    assert "gloo of w1" in registry.why_not_ready()


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_prefill_worker_hears_of_each_decode_worker_once_whoever_comes_first(
    workers: Workers, first: str
) -> None:
    decode = FakeWorker("decode", "d0", kv_transports=["tcp"], link_endpoint=b"there")
    prefill = FakeWorker("prefill", "p0", kv_transports=["tcp"])
    order = [prefill, decode] if first == "prefill" else [decode, prefill]
    registry = workers.start_registry()
    for number, worker in enumerate(order):
        registry.add_addresses([await workers.start(worker)])
        await workers.until(WorkerState.READY, at=number)

    heard = await prefill.got("prewarm")
    registry.add_addresses([await workers.start(FakeWorker("decode", "d1", kv_transports=["tcp"]))])
    await prefill.got("prewarm", 2)

    assert (heard.prewarm.worker_id, heard.prewarm.link_endpoint) == ("d0", b"there")
    assert [message.prewarm.worker_id for message in prefill.all("prewarm")] == ["d0", "d1"]
    assert decode.all("prewarm") == []


async def test_an_old_prefill_worker_hears_nothing_that_it_does_not_know(workers: Workers) -> None:
    old, new = FakeWorker("prefill", "p0"), FakeWorker("prefill", "p1", kv_transports=["tcp"])
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(worker) for worker in (old, new)])
    registry.add_addresses([await workers.start(FakeWorker("decode", "d0", kv_transports=["tcp"]))])

    await new.got("prewarm")

    assert old.all("prewarm") == []


LAYOUT: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "block_size": 4, "dtype": "float32"}


@pytest.mark.parametrize(
    ("roles", "change", "reason"),
    [
        (("decode", "prefill"), {"dtype": "int8"}, "no KV can pass between it and 'w0': dtype is 'int8' and 'float32'"),
        (("prefill", "decode"), {"num_layers": 3}, "no KV can pass between it and 'w0': num_layers is 2 and 3"),
        (("decode", "prefill"), {"num_kv_heads": 2, "heads_after": 2}, "a block with heads 0 to 3 cannot be made"),
        (("decode", "prefill"), {"head_dim": 0}, "its layout: head_dim must be at least 1, got 0"),
    ],
)
async def test_a_worker_whose_kv_fits_none_is_refused_with_the_field(
    workers: Workers, roles: tuple[str, str], change: dict[str, Any], reason: str
) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker(roles[0], "w0", layout=worker_pb2.KvLayout(**LAYOUT)))])
    await workers.until(WorkerState.READY)
    other = worker_pb2.KvLayout(**LAYOUT | change)
    registry.add_addresses([await workers.start(FakeWorker(roles[1], "w1", layout=other))])
    await workers.until(WorkerState.LOST, reason, at=1)
    assert [snapshot.worker_id for snapshot in registry.snapshots()] == ["w0"]


@pytest.mark.parametrize(
    ("role", "layout"),
    [
        ("prefill", LAYOUT),
        ("decode", LAYOUT | {"dtype": "int8"}),
        ("prefill", None),
    ],
    ids=["equal", "of the same role", "not told"],
)
async def test_a_worker_whose_kv_may_fit_serves(workers: Workers, role: str, layout: dict[str, Any] | None) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker("decode", "w0", layout=worker_pb2.KvLayout(**LAYOUT)))])
    await workers.until(WorkerState.READY)
    told = {} if layout is None else {"layout": worker_pb2.KvLayout(**layout)}
    registry.add_addresses([await workers.start(FakeWorker(role, "w1", **told))])
    await workers.until(WorkerState.READY, at=1)
    assert [snapshot.worker_id for snapshot in registry.snapshots()] == ["w0", "w1"]


async def test_one_worker_at_two_addresses_is_connected_once(workers: Workers) -> None:
    registry = workers.start_registry()
    registry.add_addresses([await workers.start(FakeWorker("decode", "d0"))])
    await workers.until(WorkerState.READY)
    registry.add_addresses([await workers.start(FakeWorker("decode", "d0"))])
    await workers.until(WorkerState.LOST, "connected already", at=1)
    registry.check_integrity()


async def test_a_silent_worker_is_lost_and_comes_back_when_it_speaks(workers: Workers) -> None:
    registry = workers.start_registry(silence_s=0.15)
    worker = FakeWorker("decode", "d0")
    registry.add_addresses([await workers.start(worker)])
    await workers.until(WorkerState.READY)
    worker.silent = True
    await workers.until(WorkerState.LOST, "silent for 0.15 s")
    worker.silent = False
    await workers.until(WorkerState.READY)
    assert worker.num_sessions >= 2


async def test_load_alone_keeps_a_worker_ready(workers: Workers) -> None:
    registry = workers.start_registry(silence_s=0.5)
    worker = FakeWorker("decode", "d0")
    worker.heartbeat_s = 0.02
    worker.load.running = 3
    registry.add_addresses([await workers.start(worker)])
    client = await workers.until(WorkerState.READY)
    session = client.session
    assert session is not None
    async with asyncio.timeout(5):
        await worker.heartbeats(30)
    assert client.session is session
    assert registry.snapshots()[0].running == 3


async def test_a_restarted_worker_is_a_new_peer(workers: Workers) -> None:
    registry = workers.start_registry()
    worker = FakeWorker("decode", "d0")
    registry.add_addresses([await workers.start(worker)])
    first = (await workers.until(WorkerState.READY)).session
    await worker.stop()
    await workers.until(WorkerState.LOST)
    worker.revive()
    await worker.start()
    second = (await workers.until(WorkerState.READY)).session
    assert first is not None
    assert second is not None
    assert first.over is not None
    assert (first.peer.incarnation, second.peer.incarnation) == ("d0-1", "d0-1'")


async def test_an_address_where_nobody_listens_stays_connecting_with_the_reason(workers: Workers) -> None:
    registry = workers.start_registry()
    worker = FakeWorker("decode", "d0")
    address = await worker.start()
    await worker.stop()
    registry.add_addresses([address])
    client = await workers.until(WorkerState.CONNECTING, "UNAVAILABLE")
    assert client.session is None


async def test_a_worker_that_does_not_greet_in_time_is_given_up(workers: Workers) -> None:
    registry = workers.start_registry(connect_timeout_s=0.1)
    worker = FakeWorker("decode", "d0")
    worker.greets = False
    registry.add_addresses([await workers.start(worker)])
    client = await workers.until(WorkerState.CONNECTING, "no welcome within 0.1 s")
    assert client.session is None


async def test_set_workers_gives_up_who_is_left_out_and_keeps_the_rest(workers: Workers) -> None:
    registry = workers.start_registry()
    kept, dropped = FakeWorker("decode", "d0"), FakeWorker("decode", "d1")
    addresses = {worker.worker_id: await workers.start(worker) for worker in (kept, dropped)}
    registry.set_workers(addresses)
    first = (await workers.until(WorkerState.READY, at=0)).session
    second = (await workers.until(WorkerState.READY, at=1)).session
    registry.set_workers({"d0": addresses["d0"]})
    assert [client.address for client in registry.workers] == [addresses["d0"]]
    assert registry.workers[0].session is first
    await dropped.no_sessions()
    assert second is not None
    assert second.over is not None


async def test_a_worker_that_was_taken_away_is_remembered_with_the_reason_until_it_comes_back(workers: Workers) -> None:
    registry = workers.start_registry(worker_memory_s=60.0)
    worker = FakeWorker("decode", "d0")
    addresses = {"d0": await workers.start(worker)}
    registry.set_workers(addresses)
    await workers.until(WorkerState.READY)
    await worker.stop()
    why = (await workers.until(WorkerState.LOST)).lost_because
    registry.set_workers({})
    (gone,) = registry.departed()
    assert (gone.peer.worker_id, gone.why) == ("d0", why)
    assert registry.workers == ()
    assert re.fullmatch(rf"d0 \({addresses['d0']}\): lost \d+ s ago: {re.escape(why)}", registry.why_no_decode_worker())
    assert registry.was_ready_lately()
    await worker.start()
    registry.set_workers(addresses)
    assert registry.departed() == []
    await workers.until(WorkerState.READY)


async def test_a_worker_that_was_taken_away_is_forgotten_after_a_while(workers: Workers) -> None:
    registry = workers.start_registry(worker_memory_s=1e-9)
    registry.set_workers({"d0": await workers.start(FakeWorker("decode", "d0"))})
    await workers.until(WorkerState.READY)
    assert registry.was_ready_lately()
    registry.set_workers({})
    assert registry.departed() == []
    assert not registry.was_ready_lately()
    assert registry.why_no_decode_worker() == "no worker is known"


async def test_only_so_many_workers_are_remembered(workers: Workers) -> None:
    registry = workers.start_registry()
    for number in range(MAX_DEPARTED + 1):
        worker = FakeWorker("decode", f"d{number}")
        registry.set_workers({worker.worker_id: await workers.start(worker)})
        await workers.until(WorkerState.READY)
    registry.set_workers({})
    names = [gone.peer.worker_id for gone in registry.departed()]
    assert names == [f"d{number}" for number in range(1, MAX_DEPARTED + 1)]


async def test_another_worker_at_the_expected_address_is_refused(workers: Workers) -> None:
    registry = workers.start_registry()
    registry.set_workers({"d0": await workers.start(FakeWorker("decode", "d7"))})
    client = await workers.until(WorkerState.LOST, "worker 'd7' answers where 'd0' was expected")
    assert client.session is None


async def test_close_ends_every_session_and_leaves_no_task(workers: Workers) -> None:
    registry = workers.start_registry()
    worker = FakeWorker("decode", "d0")
    registry.add_addresses([await workers.start(worker)])
    await workers.until(WorkerState.READY)
    await registry.close()
    await worker.no_sessions()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("worker ")]
