"""Headers that every answer has, whatever it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_front import HttpFront
from tenants_file import bearer, write_tenants

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", COMPLETIONS, bearer("acme"), {"prompt": "a", "max_tokens": 2}, 200),
        ("POST", COMPLETIONS, bearer("acme"), {"prompt": "a", "max_tokens": 2, "stream": True}, 200),
        ("POST", COMPLETIONS, bearer("acme"), {"prompt": "a", "n": 17}, 400),
        ("POST", COMPLETIONS, bearer("acme"), ["no object"], 400),
        ("POST", COMPLETIONS, {}, {"prompt": "a"}, 401),
        ("POST", COMPLETIONS, bearer("acme"), {"prompt": "a", "user": "x" * 5000}, 413),
        ("POST", COMPLETIONS, bearer("acme") | {"Expect": "wonders"}, {"prompt": "a"}, 417),
        ("POST", "/tokenize", bearer("acme"), {"prompt": "a"}, 200),
        ("POST", "/detokenize", bearer("acme"), {"tokens": ["a"]}, 400),
        ("GET", COMPLETIONS, bearer("acme"), None, 405),
        ("GET", "/v2", bearer("acme"), None, 404),
        ("GET", "/health", {}, None, 200),
        ("GET", "/metrics", {}, None, 200),
    ],
)
async def test_every_answer_has_the_requests_id_and_no_version_of_the_server(
    front: HttpFront, tmp_path: Path, method: str, path: str, headers: dict[str, str], body: Any, status: int
) -> None:
    await front.start(max_request_bytes=4000, api_keys=str(write_tenants(tmp_path / "keys.yaml", acme={})))
    async with front.http.request(method, path, json=body, headers=headers | {"X-Request-Id": "mine"}) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (status, "mine")
        assert response.headers["Server"] == "kvrelay"
        await response.read()


@pytest.mark.parametrize("given", ["x" * 129, "\u00e9", ""], ids=["long", "not ASCII", "empty"])
async def test_what_cannot_be_an_id_is_replaced_in_the_answer(front: HttpFront, given: str) -> None:
    await front.start()
    async with front.http.get("/v2", headers={"X-Request-Id": given}) as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_the_prompts_of_one_call_are_explained_by_their_numbers_and_cancelled_together(front: HttpFront) -> None:
    await front.start()
    front.prefill.hold("prefill")
    calling = asyncio.create_task(front.post(COMPLETIONS, {"X-Request-Id": "mine"}, prompt=["a", "b"]))
    await front.prefill.reached("prefill")
    assert not front.server.dispatcher.admission.cancel("mine")
    assert front.server.dispatcher.admission.cancel("mine-1")
    assert (await calling)[0] == 499
    for number in (0, 1):
        assert front.server.dispatcher.history.find(f"mine-{number}").outcome.startswith("CANCELLED")
    front.prefill.release("prefill")
