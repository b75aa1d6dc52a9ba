"""Orders of operators to the cluster: from both clients through the Admin service to whoever supervises it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from http_front import HttpFront
from tenants_file import write_tenants

from engine.errors import ConfigError, DeadlineExceeded, EngineError, PermissionDenied, RequestError
from kvrelay import AsyncClient, Client, ClusterChange
from router.served_model import ServedModel

DONE = ClusterChange(True, ("decode: 1 -> 2 workers: 1 worker is started",))


class Supervisor:
    """Takes orders, and refuses with `error`."""

    def __init__(self) -> None:
        self.orders: list[Mapping[str, Any]] = []
        self.error: EngineError | None = None

    async def __call__(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self.orders.append(order)
        if self.error is not None:
            raise self.error
        return {"changed": DONE.changed, "lines": list(DONE.lines), "pools": []}


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor()


@pytest.fixture
async def front(model: ServedModel, tmp_path: Path, supervisor: Supervisor) -> AsyncIterator[HttpFront]:
    """The operator `ops`, and `acme`."""
    front = HttpFront(model)
    front.give_order = supervisor
    await front.start(api_keys=str(write_tenants(tmp_path / "keys.yaml", ops={"admin": True}, acme={})))
    yield front
    await front.close()


def client(front: HttpFront, name: str = "ops") -> AsyncClient:
    return AsyncClient(front.grpc_address, timeout_s=5.0, api_key=f"key-of-{name}")


async def test_each_order_arrives_with_its_time_and_what_it_takes_comes_back(
    front: HttpFront, supervisor: Supervisor
) -> None:
    async with client(front) as ops:
        done = [
            await ops.scale(prefill=0, decode=2, wait_s=2.5),
            await ops.drain("decode-1", wait_s=0),
            await ops.flip("prefill-0"),
        ]

    def synchronous() -> list[ClusterChange]:
        with Client(front.grpc_address, timeout_s=5.0, api_key="key-of-ops") as ops:
            return [ops.scale(decode=2, wait_s=2.5), ops.drain("decode-1", wait_s=0), ops.flip("prefill-0")]

    done += await asyncio.to_thread(synchronous)
    assert done == [DONE] * 6
    drain, flip = {"order": "drain", "worker": "decode-1", "wait_s": 0.0}, {"order": "flip", "worker": "prefill-0"}
    assert supervisor.orders == [
        {"order": "scale", "replicas": {"prefill": 0, "decode": 2}, "wait_s": 2.5},
        drain,
        {**flip, "wait_s": 300.0},
        {"order": "scale", "replicas": {"decode": 2}, "wait_s": 2.5},
        drain,
        {**flip, "wait_s": 300.0},
    ]


async def test_only_an_admin_may_order_and_each_order_is_written_down_on_one_line(
    front: HttpFront, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvrelay.audit"):
        async with client(front) as ops, client(front, "acme") as acme:
            await ops.scale(decode=2)
            for order in (acme.scale(decode=9), acme.drain("decode-0"), acme.flip("decode-0")):
                with pytest.raises(PermissionDenied):
                    await order
            await ops.drain("x\n" + "y" * 500)
    lines = [record.getMessage().split(" ", 5) for record in caplog.records if record.name == "kvrelay.audit"]
    assert [(line[0], line[5]) for line in lines][:4] == [
        ("ops", "Admin.Scale({'decode': 2}): OK"),
        ("acme", "Admin.Scale({'decode': 9}): PERMISSION_DENIED"),
        ("acme", "Admin.Drain(decode-0): PERMISSION_DENIED"),
        ("acme", "Admin.Flip(decode-0): PERMISSION_DENIED"),
    ]
    assert "\n" not in lines[4][5]
    assert len(lines[4][5]) < 200
    assert [order["order"] for order in supervisor.orders] == ["scale", "drain"]


@pytest.mark.parametrize("error", [ConfigError("decode: replicas must be in [1, 2]"), DeadlineExceeded("it goes on")])
async def test_a_refusal_comes_back_as_the_error_that_it_was(
    front: HttpFront, supervisor: Supervisor, error: EngineError
) -> None:
    supervisor.error = error
    async with client(front) as ops:
        with pytest.raises(type(error), match=str(error).replace("[", r"\[")):
            await ops.scale(decode=3)
    assert len(supervisor.orders) == 1


async def test_what_is_no_order_is_refused_by_its_field(front: HttpFront) -> None:
    async with client(front) as ops:
        for wrong in (ops.scale(), ops.scale(decode=-1), ops.scale(decode=1, wait_s=-1.0), ops.drain(7)):  # type: ignore[arg-type]
            with pytest.raises(RequestError, match=r"^(replicas|decode|wait_s|worker):"):
                await wrong


async def test_a_router_without_a_cluster_says_so(model: ServedModel) -> None:
    front = HttpFront(model)
    await front.start()
    async with AsyncClient(front.grpc_address, timeout_s=5.0) as anybody:
        with pytest.raises(ConfigError, match="this router belongs to no cluster"):
            await anybody.scale(decode=2)
    await front.close()
