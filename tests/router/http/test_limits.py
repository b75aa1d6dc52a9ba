"""What can never be served is refused before anything is made of it, and never as if it might pass."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from http_front import BOUND_S, HttpFront
from openai_schemas import check
from tenants_file import bearer, write_tenants

from engine.errors import RequestError
from router.http import bodies, routes
from router.http.bodies import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, Fields, check_counts
from router.http.generation import CallLimits, read_completions, read_messages

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


class Unlooked(list[Any]):
    """A list whose elements nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody looks at every element")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("somebody looks at an element")

    def __repr__(self) -> str:
        raise AssertionError("somebody writes every element out")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stop_token_ids": Unlooked([1] * 129)}, "stop_token_ids"),
        ({"stop": Unlooked(["a"] * 17)}, "stop"),
        ({"logit_bias": Unlooked([1])}, "logit_bias"),
        ({"prompt": [Unlooked([1] * 200)]}, "prompt[0]"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_the_length_of_a_list_is_checked_before_its_elements(body: dict[str, Any], field: str) -> None:
    limits = CallLimits(max_model_len=200, max_n=16, max_requests=64, max_outputs=None)
    with pytest.raises(RequestError) as caught:
        read_completions(Fields({"prompt": "a"} | body), "r", None, limits)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "messages",
    [
        Unlooked([{}] * 4097),
        [{"role": "user", "content": Unlooked([{}] * 4097)}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2049}] * 2,
    ],
    ids=["messages", "parts of one", "parts of all"],
)
def test_messages_and_text_parts_are_counted_before_they_are_read(messages: Any) -> None:
    with pytest.raises(RequestError, match="at most 4096"):
        read_messages(Fields({"messages": messages}))


async def test_detokenize_takes_no_body_that_is_longer_than_the_context_could_be(front: HttpFront) -> None:
    await front.start()
    async with front.http.post("/detokenize", json={"tokens": [1] * 10_000}) as response:
        assert response.status == 413
        error = (await response.json())["error"]
        assert error["param"] == "body"
        assert "max_request_bytes" in error["message"]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", "values"),
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", "lists and objects"),
        (b"[" + b'"",' * (MAX_STRINGS + 1) + b"1]", "strings"),
    ],
    ids=["values", "containers", "strings"],
)
def test_a_body_of_more_parts_than_any_request_needs_is_not_parsed(data: bytes, what: str) -> None:
    with pytest.raises(RequestError, match=f"body: at most .* {what}"):
        check_counts(data)


def test_what_stands_in_a_text_is_not_counted() -> None:
    check_counts(json.dumps({"prompt": '[{",\\' * 300_000}).encode())


async def test_a_large_body_is_parsed_away_from_the_event_loop(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.start()
    threads: list[threading.Thread] = []
    parse = bodies.parse_object

    def noted(data: bytes) -> Fields:
        threads.append(threading.current_thread())
        return parse(data)

    monkeypatch.setattr(bodies, "parse_object", noted)
    for padding in ("x", "x" * bodies.LARGE_BYTES):
        await front.ok(COMPLETIONS, prompt="a", max_tokens=2, user=padding)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_bodies_in_flight_are_limited_together_and_give_their_bytes_back(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 10_000)
    await front.start(max_request_bytes=8_000)
    begun, rest = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": "a", "max_tokens": 2, "user": "' + b"x" * 6_000
        begun.set()
        await rest.wait()
        yield b'"}'

    first = asyncio.create_task(front.http.post(COMPLETIONS, data=slow()).__aenter__())
    await begun.wait()
    async with asyncio.timeout(BOUND_S):
        while (answer := await front.post(COMPLETIONS, prompt="a", max_tokens=2, user="x" * 6_000))[0] == 200:
            pass  # the first body is on its way
    assert answer[0] == 429
    rest.set()
    assert (await first).status == 200
    await front.ok(COMPLETIONS, prompt="a", max_tokens=2, user="x" * 6_000)


async def test_one_tenants_bodies_leave_room_for_those_of_another(
    front: HttpFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 20_000)
    keys = str(write_tenants(tmp_path / "keys.yaml", acme={}, umbrella={}))
    await front.start(max_request_bytes=8_000, api_keys=keys)
    begun, rest = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": "a", "max_tokens": 2, "user": "' + b"x" * 6_000
        begun.set()
        await rest.wait()
        yield b'"}'

    body = {"prompt": "a", "max_tokens": 2, "user": "x" * 6_000}
    first = asyncio.create_task(front.http.post(COMPLETIONS, data=slow(), headers=bearer("acme")).__aenter__())
    await begun.wait()
    async with asyncio.timeout(BOUND_S):
        while (answer := await front.post(COMPLETIONS, bearer("acme"), **body))[0] == 200:
            pass  # the first body is on its way
    assert answer[0] == 429
    assert "of one tenant may be 10000 bytes" in answer[1]["error"]["message"]
    assert (await front.post(COMPLETIONS, bearer("umbrella"), **body))[0] == 200
    rest.set()
    assert (await first).status == 200
    assert (await front.post(COMPLETIONS, bearer("acme"), **body))[0] == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_tenants_calls_at_once_are_limited_for_tokens_too(front: HttpFront, tmp_path: Path, path: str) -> None:
    keys = write_tenants(tmp_path / "keys.yaml", acme={"max_concurrent_requests": 1})
    await front.start(api_keys=str(keys))
    front.prefill.hold("prefill")
    first = asyncio.create_task(front.post(COMPLETIONS, bearer("acme"), prompt="a", max_tokens=2))
    await front.prefill.reached("prefill")
    body: dict[str, Any] = {"prompt": "a", "tokens": [97]}
    assert (await front.post(path, bearer("acme"), **body))[0] == 429
    front.prefill.release("prefill")
    assert (await first)[0] == 200
    assert (await front.post(path, bearer("acme"), **body))[0] == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "nonsense"])
async def test_a_body_that_is_not_encoded_as_it_says_is_400(
    front: HttpFront, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    await front.start()
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with front.http.post(COMPLETIONS, data=b'{"prompt": "a"}', headers=headers) as response:
        assert response.status == 400
        check("ErrorResponse", await response.json())
    await front.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 9000 + b"\r\n\r\n"]
)
async def test_what_is_no_http_is_refused_in_the_same_shape_and_not_logged(
    front: HttpFront, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await front.start()
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection(*front.server.http_address.split(":"))
        writer.write(said)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.0 400") or head.startswith(b"HTTP/1.1 400")
    assert b"aiohttp" not in head
    check("ErrorResponse", json.loads(body))
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_compressed_body_may_be_no_longer_than_another(front: HttpFront) -> None:
    await front.start(max_request_bytes=100_000)
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    async with front.http.post(COMPLETIONS, data=bomb, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 413


async def test_of_connections_beyond_the_limit_few_wait_for_their_answer(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.server.MAX_REFUSED", 2)
    monkeypatch.setattr("router.http.server.CLOSE_S", BOUND_S)
    await front.start(max_http_connections=1)
    address = front.server.http_address.split(":")
    async with asyncio.timeout(BOUND_S):
        assert (await front.get("/health"))[0] == 200  # on the connection that is open
        first, second, third = [await asyncio.open_connection(*address) for _ in range(3)]
        with suppress(ConnectionResetError):
            assert await first[0].read() == b""
        for reader, writer in (second, third):
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            assert b" 503 " in await reader.read()
        for _, writer in (first, second, third):
            writer.close()


async def test_one_connection_too_many_is_told_503_and_the_others_go_on(front: HttpFront) -> None:
    await front.start(max_http_connections=1)
    async with front.open_stream(COMPLETIONS, prompt="a", max_tokens=2) as first:
        async with front.http.get("/health") as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            check("ErrorResponse", error := await refused.json())
        assert (await first.text()).endswith("data: [DONE]\n\n")
    assert error["error"]["message"] == "1 HTTP connections are open, the limit; try again later"


async def test_a_connection_that_is_closed_makes_room_for_another(front: HttpFront) -> None:
    await front.start(max_http_connections=1)
    for _ in range(3):
        status, _ = await front.get("/health")  # on the connection that is open
        assert status == 200
    await front.http.close()
    async with asyncio.timeout(BOUND_S), aiohttp.ClientSession(front.url) as other:
        while (await other.get("/health")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_body_that_is_encoded_as_it_says_is_read(front: HttpFront) -> None:
    await front.start()
    data = gzip.compress(b'{"prompt": "a", "max_tokens": 2}')
    async with front.http.post(COMPLETIONS, data=data, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 200
