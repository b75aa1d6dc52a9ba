"""What can never be served is refused before anything is made of it, and never as if it might pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_front import HttpFront
from tenants_file import bearer, write_tenants

from router.http import routes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_more_choices_than_the_router_serves_are_refused_before_a_place_is_made_for_them(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    await front.start()
    made: list[object] = []
    for name in ("GenerationAssembly", "Usage", "Answer", "EventStream"):
        monkeypatch.setattr(routes, name, lambda *arguments: made.append(arguments))
    given = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    status, error = await front.refused(path, n=10_000_000, stream=stream, **given)
    assert (status, error["param"]) == (400, "n")
    assert "16" in error["message"]
    assert made == []


@pytest.mark.parametrize(
    "body", [{"prompt": ["a"] * 5}, {"prompt": ["a", "b"], "n": 4}, {"prompt": "a", "n": 5}], ids=str
)
async def test_more_outputs_than_the_tenant_may_ever_have_are_400_and_name_the_limit(
    front: HttpFront, tmp_path: Path, body: dict[str, Any]
) -> None:
    keys = write_tenants(tmp_path / "keys.yaml", acme={"max_concurrent_requests": 4})
    await front.start(api_keys=str(keys))
    for stream in (False, True):
        status, answer = await front.post(COMPLETIONS, bearer("acme"), **body, stream=stream)
        assert status == 400
        assert "at most 4 (the tenant's max_concurrent_requests)" in answer["error"]["message"]
    status, _ = await front.post(COMPLETIONS, bearer("acme"), prompt=["a", "b"], n=2, max_tokens=2)
    assert status == 200


async def test_more_prompts_than_the_router_has_places_are_400(front: HttpFront) -> None:
    await front.start(max_live_requests=2)
    status, error = await front.refused(COMPLETIONS, prompt=["a"] * 4)
    assert (status, error["param"]) == (400, "prompt")
    assert "max_live_requests" in error["message"]
