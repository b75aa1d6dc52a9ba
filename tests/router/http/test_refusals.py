"""What cannot be served: refused in OpenAI's error shape, with the field and the limit."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from http_front import HttpFront
from openai_schemas import check

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": "-1"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"hi": 5}}, "logit_bias"),
    ({"logit_bias": {"257": 5}}, "logit_bias"),
    ({"logit_bias": {str(i): 5 for i in range(1025)}}, "logit_bias"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params"),
    ({"cache_salt": "mine"}, "cache_salt"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 500}, "max_completion_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"model": 5}, "model"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": "x" * 200}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": 10**400}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
async def test_a_chat_that_can_never_be_served_is_refused_by_field(
    front: HttpFront, fields: dict[str, Any], param: str
) -> None:
    await front.start()
    status, error = await front.refused(CHAT, **{"messages": MESSAGES} | fields)
    check("ErrorResponse", {"error": error})
    assert (status, error["type"], error["param"]) == (400 if param != "model" else 404, "invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")
    assert front.decode.all("reserve") == []


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
async def test_a_completion_that_can_never_be_served_is_refused_by_field(
    front: HttpFront, fields: dict[str, Any], param: str
) -> None:
    await front.start()
    status, error = await front.refused(COMPLETIONS, **{"prompt": "Hi"} | fields)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert front.decode.all("reserve") == []


async def test_what_asks_for_nothing_is_no_reason_to_refuse(front: HttpFront) -> None:
    await front.start()
    neutral: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "stop": None,
        "seed": None,
        "metadata": {"any": "thing"},
        "an_unknown_field": [1, 2, 3],
    }
    await front.ok(CHAT, messages=MESSAGES, max_tokens=2, **neutral)
    assert (await front.ok(COMPLETIONS, prompt="Hi", n=2, best_of=2, echo=False, suffix=None))["choices"][1]["text"]


async def test_an_unknown_model_is_not_found(front: HttpFront) -> None:
    await front.start()
    status, error = await front.refused(CHAT, messages=MESSAGES, model="gpt-4")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    status, answer = await front.get("/v1/models/gpt-4")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b'"text"', "must be a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"temperature": NaN}', "NaN is not in JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "is no JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_body_that_is_no_json_object_is_refused(front: HttpFront, data: bytes, said: str) -> None:
    await front.start()
    async with front.http.post(CHAT, data=data) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "body")
        assert said in error["message"]


async def test_a_body_over_the_limit_is_refused_before_it_is_read(front: HttpFront) -> None:
    await front.start(max_request_bytes=1000)
    host, port = front.server.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n".encode())
    async with asyncio.timeout(5):  # not a byte of the body was sent
        status = await reader.readline()
    assert b" 413 " in status
    writer.close()
    await writer.wait_closed()


async def test_a_body_that_grows_over_the_limit_is_refused(front: HttpFront) -> None:
    await front.start(max_request_bytes=1000)

    async def body() -> Any:
        yield b'{"prompt": "'
        yield b"x" * 2000

    async with front.http.post(COMPLETIONS, data=body()) as response:
        assert response.status == 413
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_that_does_not_arrive_is_not_waited_for(front: HttpFront) -> None:
    await front.start(body_timeout_s=0.05)
    host, port = front.server.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    async with asyncio.timeout(5):
        assert b" 504 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("said", [b"", b"POST / HTTP/1.1\r\nHost: "])
async def test_a_connection_that_asks_nothing_is_closed(front: HttpFront, said: bytes) -> None:
    await front.start(body_timeout_s=0.05)
    host, port = front.server.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    async with asyncio.timeout(5):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_a_connection_that_has_asked_may_wait_for_its_answer(front: HttpFront) -> None:
    await front.start(body_timeout_s=0.05)
    front.prefill.hold("prefill")
    waiting = asyncio.create_task(front.ok(CHAT, messages=MESSAGES, max_tokens=2))
    await front.prefill.reached("prefill")
    loop, passed = asyncio.get_running_loop(), asyncio.Event()
    loop.call_later(0.1, passed.set)  # armed after the connection's own timer
    await passed.wait()
    front.prefill.release("prefill")
    assert (await waiting)["choices"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", CHAT, 405), ("POST", "/v2/chat", 404)])
async def test_an_unknown_path_or_method_is_refused_in_the_same_shape(
    front: HttpFront, method: str, path: str, status: int
) -> None:
    await front.start()
    async with front.http.request(method, path) as response:
        assert response.status == status
        check("ErrorResponse", json.loads(await response.text()))


async def test_a_long_value_is_not_repeated_to_the_client(front: HttpFront) -> None:
    await front.start()
    _, error = await front.refused(CHAT, messages=MESSAGES, temperature="x" * 100_000)
    assert len(error["message"]) <= 1024
