"""What a router's HTTP answers mean to a batch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from cluster.jobs.http_sender import http_sender
from cluster.jobs.ledger import Answer, Ask
from cluster.jobs.runner import Away, Outcome, Refused
from engine.errors import ConfigError, PermissionDenied, Unauthenticated

ASK = Ask(1, "a", "/v1/completions", {"prompt": "hi", "seed": 3})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def outcome_of(status: int, body: object, headers: dict[str, str] | None = None) -> Outcome:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    async with serving(handle) as url, http_sender(url, api_key=None, ca_file=None, timeout_s=5.0) as send:
        return await send(ASK)


async def test_the_body_and_the_key_go_out_and_the_answer_comes_back() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer k"
        return web.json_response({"got": await request.json()}, headers={"X-Request-Id": "r1"})

    async with serving(handle) as url, http_sender(url, api_key="k", ca_file=None, timeout_s=5.0) as send:
        assert await send(ASK) == Answer(200, "r1", {"got": {"prompt": "hi", "seed": 3}})


async def test_no_room_brings_the_hint_along() -> None:
    assert await outcome_of(429, {}, {"Retry-After": "7"}) == Refused(7.0)
    assert await outcome_of(429, {}, {"Retry-After": "soon"}) == Refused(1.0)


@pytest.mark.parametrize("status", [400, 404, 500, 504])
async def test_a_refusal_or_fault_is_an_answer(status: int) -> None:
    assert await outcome_of(status, {"error": {"message": "m"}}) == Answer(status, "", {"error": {"message": "m"}})


async def test_a_stopping_router_is_away() -> None:
    assert isinstance(await outcome_of(503, {"error": {"message": "stopping"}}), Away)


@pytest.mark.parametrize(("status", "error"), [(401, Unauthenticated), (403, PermissionDenied)])
async def test_a_wrong_key_is_raised(status: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="no such key"):
        await outcome_of(status, {"error": {"message": "no such key"}})


async def test_a_router_that_breaks_off_or_is_not_there_is_away() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(handle) as url, http_sender(url, api_key=None, ca_file=None, timeout_s=5.0) as send:
        assert isinstance(await send(ASK), Away)
    async with http_sender(url, api_key=None, ca_file=None, timeout_s=5.0) as send:
        assert isinstance(await send(ASK), Away)


async def test_an_answer_that_is_no_json_is_kept_in_part() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>" + "x" * 1000, status=502)

    async with serving(handle) as url, http_sender(url, api_key=None, ca_file=None, timeout_s=5.0) as send:
        answer = await send(ASK)
    assert isinstance(answer, Answer)
    assert (answer.status, len(json.dumps(answer.body)) < 300) == (502, True)


async def test_authorities_that_cannot_be_read_are_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="tls-ca: cannot use"):
        async with http_sender("https://127.0.0.1:1", api_key=None, ca_file=f"{tmp_path}/none.pem", timeout_s=1.0):
            pass
