from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from bench.interference import Load, Measured, on_cores, summarize
from bench.report import Report
from engine.errors import InternalError


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A server that gives each prompt as many events as it asks for tokens, and refuses prompts of no tokens."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body["prompt"]:
            return web.Response(status=400, text="empty")
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(body["max_tokens"]):
            await answer.write(b'data: {"choices": []}\n\n')
            await asyncio.sleep(0)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][0] + f":{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_load_counts_gaps_and_first_tokens_until_it_is_given_up(address: str) -> None:
    measured = Measured()
    async with aiohttp.ClientSession() as session:
        load = Load(address, "any", session)
        await load.decode(0.3, measured.idle, 0.0, measured)
        assert (measured.sent, measured.ttft) == (0, [])
        await load.decode(0.3, measured.loaded, 0.05, measured)

    assert measured.idle
    assert measured.loaded
    assert 0 < len(measured.ttft) <= measured.sent


async def test_a_refusal_is_an_error_and_no_figure(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(InternalError, match="answers 400: empty"):
            await Load(address, "any", session).ttft_s(0, 1)


def test_figures_of_others_stand_beside_those_of_the_split_system() -> None:
    report = Report("interference")
    split = Measured(idle=[20.0] * 100, loaded=[25.0] * 100, ttft=[4000.0], sent=2)
    other = Measured(idle=[20.0] * 100, loaded=[500.0] * 100, ttft=[], sent=1)

    summarize(report, {"split": split, "colocated": other}, 9.0)

    assert report.figures["itl_p99_loaded_over_idle"] == 1.25
    assert report.figures["itl_p99_colocated_over_split"] == 20.0
    assert report.figures["ttft_p50_ms"] == 4000.0
    assert report.figures["ttft_p50_colocated_ms"] == float("inf")
    assert report.notes[1] == "colocated: 100 and 100 gaps; 0 of 1 long prompts answered"


def test_cores_are_taken_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    with on_cores({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
