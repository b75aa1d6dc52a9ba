"""Keys over both protocols: who gets in, what they may, what they see of each other, and what is written down."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from http_front import HttpFront
from openai_schemas import check
from tenants_file import bearer, write_tenants

from engine.errors import EngineError, PermissionDenied, RateLimited, RequestError, Unauthenticated
from kvrelay import AsyncClient
from kvrelay._status import from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router.served_model import ServedModel

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def front(model: ServedModel, tmp_path: Path) -> AsyncIterator[HttpFront]:
    """Tenants `acme` (two outputs at once, priority 2, or 1) and `other` (60 tokens a minute); the operator `ops`."""
    front = HttpFront(model)
    keys = write_tenants(
        tmp_path / "keys.yaml",
        acme={"max_concurrent_requests": 2, "priority": 2, "best_priority": 1},
        other={"tokens_per_minute": 60},
        ops={"admin": True},
    )
    await front.start(api_keys=str(keys), audit_log=str(tmp_path / "audit.jsonl"))
    yield front
    await front.close()


async def as_tenant(front: HttpFront, name: str, **body: Any) -> tuple[int, Any]:
    return await front.post(CHAT, bearer(name), **{"messages": MESSAGES, "max_tokens": 3} | body)


def client(front: HttpFront, name: str) -> AsyncClient:
    return AsyncClient(front.grpc_address, timeout_s=5.0, api_key=f"key-of-{name}")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nowhere")],
)
async def test_without_a_key_no_path_but_the_probes_answers(front: HttpFront, method: str, path: str) -> None:
    async with front.http.request(method, path, json={}, headers={"Authorization": "Bearer wrong"}) as response:
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        answer = await response.json()
    check("ErrorResponse", answer)
    assert answer["error"]["code"] == "invalid_api_key"
    for open_path in ("/health", "/ready", "/metrics"):
        async with front.http.get(open_path) as response:
            assert response.status == 200


async def test_without_a_key_no_method_of_the_two_services_answers(front: HttpFront) -> None:
    asked = []
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        for service in router_pb2.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                ask: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
                call = ask(path)(b"", timeout=5)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call.read() if method.server_streaming else call)
                assert isinstance(from_rpc_error(caught.value), Unauthenticated), path
                asked.append(method.name)
    assert {"Generate", "Cancel", "Tokenize", "Explain", "ListModels", "Status"} <= set(asked)


async def test_a_known_key_is_served_over_both_protocols(front: HttpFront) -> None:
    status, _ = await as_tenant(front, "acme")
    assert status == 200
    async with client(front, "acme") as grpc_client:
        assert len((await grpc_client.generate("Hi", max_tokens=3)).token_ids) == 3
        assert len(await grpc_client.models()) == 1


async def test_tenants_get_scopes_of_their_own_at_every_worker(front: HttpFront) -> None:
    for name in ("acme", "other", "acme"):
        assert (await as_tenant(front, name))[0] == 200
    reserves = [message.reserve for message in front.decode.all("reserve")]
    prefills = [message.prefill for message in front.prefill.all("prefill")]
    assert [reserve.scope for reserve in reserves] == [prefill.scope for prefill in prefills]
    assert reserves[0].scope == reserves[2].scope != reserves[1].scope
    assert all(len(reserve.scope) == 32 for reserve in reserves)


async def test_a_tenant_neither_meets_nor_sees_nor_cancels_anothers_request(front: HttpFront) -> None:
    front.decode.hold(("output", 2))
    async with client(front, "acme") as acme, client(front, "other") as other:
        running = asyncio.create_task(acme.generate("Hi", request_id="r1", max_tokens=3))
        await front.decode.reached(("output", 2))
        assert not await other.cancel("r1")
        with pytest.raises(RequestError, match="r1"):
            await other.explain("r1")
        same_id = asyncio.create_task(other.generate("Hi", request_id="r1", max_tokens=1))
        assert (await same_id).request_id == "r1"
        explained = await acme.explain("r1")
        assert (explained.request_id, explained.outcome) == ("r1", "running")
        assert await acme.cancel("r1")
        with pytest.raises(EngineError, match="was cancelled"):
            await running
    await front.idle()


async def test_outputs_at_once_are_limited_per_tenant(front: HttpFront) -> None:
    front.prefill.hold("prefill")
    first = asyncio.create_task(as_tenant(front, "acme", n=2))
    await front.prefill.reached("prefill")
    status, answer = await as_tenant(front, "acme")
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "2 outputs at once" in answer["error"]["message"]
    async with client(front, "acme") as acme:
        with pytest.raises(RateLimited, match="2 outputs at once"):
            await acme.tokenize("Hi")
    front.prefill.release("prefill")
    assert (await first)[0] == 200
    assert (await as_tenant(front, "acme"))[0] == 200


async def test_a_request_has_the_priority_that_it_asks_for_or_its_tenants_at_both_workers(front: HttpFront) -> None:
    assert (await as_tenant(front, "acme"))[0] == 200
    assert (await as_tenant(front, "acme", priority=1, n=2))[0] == 200
    async with client(front, "acme") as grpc_client:
        await grpc_client.generate("Hi", priority=5, max_tokens=3)
    expected = [2, 1, 1, 5]
    assert [message.reserve.priority for message in front.decode.all("reserve")] == expected
    assert [message.prefill.priority for message in front.prefill.all("prefill")] == expected


async def test_a_client_cannot_ask_for_better_than_its_tenant_may_have(front: HttpFront) -> None:
    status, answer = await as_tenant(front, "acme", priority=0)
    assert (status, answer["error"]["param"]) == (400, "priority")
    assert "at least 1 for tenant 'acme'" in answer["error"]["message"]
    async with client(front, "other") as grpc_client:
        with pytest.raises(RequestError, match="priority: must be at least 0 for tenant 'other', got -1"):
            await grpc_client.generate("Hi", priority=-1)
    assert front.decode.all("reserve") == []


async def test_tokens_per_minute_are_limited_and_both_protocols_say_when_to_come_back(front: HttpFront) -> None:
    status, answer = await as_tenant(front, "other", max_tokens=60)
    assert (status, answer["usage"]["total_tokens"]) == (200, 80)
    async with front.http.post(CHAT, json={"messages": MESSAGES}, headers=bearer("other")) as response:
        assert response.status == 429
        assert 15 <= int(response.headers["Retry-After"]) <= 20
    async with client(front, "other") as grpc_client:
        with pytest.raises(RateLimited) as caught:
            await grpc_client.generate("Hi")
        assert caught.value.retry_after_s is not None
        assert 15 <= caught.value.retry_after_s <= 20


async def test_only_an_admin_may_ask_admin_and_each_call_is_written_down(
    front: HttpFront, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvrelay.audit"):
        async with client(front, "ops") as ops, client(front, "acme") as acme, client(front, "nobody") as nobody:
            assert (await ops.status()).router_id == "router"
            with pytest.raises(PermissionDenied):
                await acme.status()
            with pytest.raises(Unauthenticated):
                await nobody.status()
    lines = [record.getMessage() for record in caplog.records if record.name == "kvrelay.audit"]
    told = [(line.split(" ")[0], line.rsplit(" ", 2)[-2:]) for line in lines]
    assert told == [
        ("ops", ["Admin.Status:", "OK"]),
        ("acme", ["Admin.Status:", "PERMISSION_DENIED"]),
        ("unknown", ["Admin.Status:", "UNAUTHENTICATED"]),
    ]


async def test_the_audit_file_names_each_admin_call_and_holds_no_key(front: HttpFront, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        status: router_pb2_grpc.AdminAsyncStub = router_pb2_grpc.AdminStub(channel)
        for name, request_id in (("ops", "r-1"), ("acme", "r-2")):
            metadata = (("authorization", f"Bearer key-of-{name}"), ("x-request-id", request_id))
            call = status.Status(router_pb2.StatusRequest(), metadata=metadata)
            assert ("x-request-id", request_id) in tuple(await call.initial_metadata())
            await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=5)
    file = tmp_path / "audit.jsonl"
    text = file.read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert [(entry["request_id"], entry["identity"], entry["call"], entry["result"]) for entry in entries] == [
        ("r-1", "ops", "Admin.Status", "OK"),
        ("r-2", "acme", "Admin.Status", "PERMISSION_DENIED"),
    ]
    assert "key-of-" not in text
    assert file.stat().st_mode & 0o777 == 0o600


async def test_no_key_is_ever_logged(front: HttpFront, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await as_tenant(front, "acme")
        await as_tenant(front, "nobody")
        await as_tenant(front, "acme", n=99)
        async with client(front, "nobody") as nobody:
            with pytest.raises(Unauthenticated):
                await nobody.generate("Hi")
    assert caplog.records
    assert "key-of-" not in caplog.text
