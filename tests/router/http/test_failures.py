"""What a client sees when a request ends otherwise, and what is left of it: nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import pytest
from aiohttp import web
from fake_worker import FakeWorker, expected_output
from http_front import HttpFront, read_events
from openai_schemas import check

from engine.errors import InternalError

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
RENDERED = b"user: Hi\nassistant: "


async def test_a_full_router_is_429_and_says_when_to_come_back(front: HttpFront) -> None:
    await front.start(max_live_requests=1, retry_after_s=2.5)
    front.prefill.hold("prefill")
    first = asyncio.create_task(front.ok(CHAT, messages=MESSAGES, max_tokens=3))
    await front.prefill.reached("prefill")
    async with front.http.post(CHAT, json={"messages": MESSAGES}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
        error = (await response.json())["error"]
    check("ErrorResponse", {"error": error})
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    front.prefill.release("prefill")
    await first


@pytest.mark.parametrize("stream", [False, True])
async def test_no_worker_is_503_with_the_reason_also_for_a_stream(front: HttpFront, stream: bool) -> None:
    front.workers = ()
    await front.start(no_worker_wait_s=0.05, cold_wait_s=0.05)
    status, error = await front.refused(CHAT, messages=MESSAGES, stream=stream)
    assert (status, error["code"]) == (503, "service_unavailable")
    assert "no decode worker" in error["message"]


@pytest.mark.parametrize("place", ["query", "header"])
async def test_a_deadline_from_the_client_is_504_and_cancels_everywhere(front: HttpFront, place: str) -> None:
    await front.start()
    front.decode.hold("handed_over")
    path, headers = (f"{CHAT}?timeout=0.1", {}) if place == "query" else (CHAT, {"X-Request-Timeout": "0.1"})
    status, answer = await front.post(path, headers, messages=MESSAGES)
    assert (status, answer["error"]["code"]) == (504, "timeout")
    await front.decode.got("cancel")
    await front.idle()


@pytest.mark.parametrize("seconds", ["-1", "soon", "nan", "1e9"])
async def test_a_deadline_that_is_none_is_refused_by_name(front: HttpFront, seconds: str) -> None:
    await front.start()
    status, error = await front.refused(f"{CHAT}?timeout={seconds}", messages=MESSAGES)
    assert (status, error["param"]) == (400, "timeout")


async def test_a_stream_that_fails_ends_with_an_error_event_and_without_done(front: HttpFront) -> None:
    await front.start(max_attempts=1)
    front.decode.fail_at[("output", 3)] = InternalError("broken")
    events = await front.stream(CHAT, messages=MESSAGES, max_tokens=6)
    assert events.text() == bytes(expected_output(RENDERED, 3)).decode()
    (error,) = events.errors
    check("ErrorResponse", {"error": error})
    assert (error["type"], error["message"]) == ("server_error", "broken")
    assert not events.done
    assert events.reasons() == []


async def test_a_stream_goes_on_when_its_decode_worker_dies(front: HttpFront) -> None:
    front.workers = [*front.workers, FakeWorker("decode", "d1")]
    await front.start()
    decoders = [worker for worker in front.workers if worker.role == "decode"]
    for worker in decoders:
        worker.die_at = ("output", 3)
    body = asyncio.create_task(front.stream(CHAT, messages=MESSAGES, max_tokens=6))
    waits = {asyncio.create_task(worker.reached(("output", 3))): worker for worker in decoders}
    done, rest = await asyncio.wait(waits, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    next(worker for worker in decoders if worker is not waits[next(iter(done))]).die_at = None
    events = await body
    assert events.text() == bytes(expected_output(RENDERED, 6)).decode()
    assert events.done


async def test_a_client_that_goes_away_cancels_everywhere(front: HttpFront) -> None:
    await front.start()
    front.decode.hold(("output", 3))
    async with front.open_stream(CHAT, messages=MESSAGES, max_tokens=6) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
        await front.decode.got("cancel")
    await front.idle()
    assert front.server.dispatcher.history.requests_cancelled == 1


async def test_a_client_that_goes_away_before_the_first_token_cancels_everywhere(front: HttpFront) -> None:
    await front.start()
    front.prefill.hold("prefill")
    waiting = asyncio.create_task(front.post(CHAT, messages=MESSAGES))
    await front.prefill.reached("prefill")
    waiting.cancel()
    await front.prefill.got("cancel")
    await front.decode.got("cancel")
    await front.idle()
    assert front.server.dispatcher.history.requests_cancelled == 1


async def test_a_client_that_goes_away_between_two_writes_is_no_fault(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.start()

    async def broken(self: web.StreamResponse, data: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", broken)
    async with front.open_stream(CHAT, messages=MESSAGES, max_tokens=6) as response:
        assert await response.read() == b""
    await front.idle()
    history = front.server.dispatcher.history
    assert (history.requests_cancelled, history.requests_failed) == (1, 0)


@pytest.mark.parametrize(
    ("max_tokens", "n", "outcome"),
    [(170, 8, "DEADLINE_EXCEEDED"), (40, 1, "length")],  # 8: the kernel takes few writes, of whatever size
    ids=["in the middle", "at the end"],
)
async def test_a_client_that_does_not_read_is_cut_off(front: HttpFront, max_tokens: int, n: int, outcome: str) -> None:
    await front.start(min_gap_s=0.0, last_word_s=0.05)
    host, port = front.server.http_address.split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        front.prefill.hold("prefill")
        body = json.dumps({"messages": MESSAGES, "max_tokens": max_tokens, "n": n, "stream": True, "logprobs": True})
        head = f"POST {CHAT}?timeout=0.5 HTTP/1.1\r\nHost: x\r\nX-Request-Id: {'r' * 128}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(client, (head + body).encode())
        await front.prefill.reached("prefill")
        (connection,) = front.connections()
        connection.set_write_buffer_limits(high=0)
        connection.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        front.prefill.release("prefill")
        await front.disconnected(connection)
    await front.idle()
    assert front.server.dispatcher.history.find("r" * 128).outcome.startswith(outcome)


async def test_a_live_request_can_be_cancelled_by_its_id_and_ends_with_499(front: HttpFront) -> None:
    await front.start()
    front.prefill.hold("prefill")
    waiting = asyncio.create_task(front.post(CHAT, {"X-Request-Id": "r1"}, messages=MESSAGES))
    await front.prefill.reached("prefill")
    assert front.server.dispatcher.admission.cancel("r1")
    status, answer = await waiting
    assert (status, answer["error"]["code"]) == (499, "request_cancelled")


async def test_a_request_id_of_the_client_names_the_answer_and_must_be_readable(front: HttpFront) -> None:
    await front.start()
    body = {"messages": MESSAGES, "max_tokens": 2}
    async with front.http.post(CHAT, json=body, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["id"] == "chatcmpl-mine"
    assert front.server.dispatcher.history.find("mine").outcome == "length"
    status, answer = await front.post(CHAT, {"X-Request-Id": "x" * 129}, **body)
    assert (status, answer["error"]["param"]) == (400, "request_id")


async def test_a_fault_is_500_and_logged_and_the_router_lives_on(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await front.start()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(front.server.dispatcher, "_decide", lambda _: 1 / 0)
        status, error = await front.refused(CHAT, messages=MESSAGES)
    assert (status, error["code"]) == (500, "internal_error")
    assert "ZeroDivisionError" in caplog.text
    await front.ok(CHAT, messages=MESSAGES, max_tokens=2)


async def test_a_connection_that_asks_nothing_more_is_closed(front: HttpFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.server.KEEPALIVE_S", 0.05)
    await front.start()
    await front.get("/health")
    (connection,) = front.connections()
    await front.disconnected(connection)
    assert front.connections() == []


async def test_a_stop_lets_live_requests_finish(front: HttpFront) -> None:
    await front.start()
    front.decode.hold("handed_over")
    async with front.open_stream(CHAT, messages=MESSAGES, max_tokens=4) as response:
        await front.decode.reached("handed_over")
        stopping = asyncio.create_task(front.server.stop(grace_s=5.0))
        front.decode.release("handed_over")
        assert read_events(await response.text()).done
    await stopping


async def test_a_stop_tells_what_outlasts_the_grace_that_it_is_stopping(front: HttpFront) -> None:
    await front.start()
    front.prefill.hold("prefill")
    waiting = asyncio.create_task(front.post(CHAT, messages=MESSAGES))
    await front.prefill.reached("prefill")
    await front.server.stop(grace_s=0.05)
    status, answer = await waiting
    assert (status, answer["error"]["message"]) == (503, "the router is stopping")
    await front.idle()


async def test_a_stream_that_a_stop_ends_says_so(front: HttpFront) -> None:
    await front.start()
    front.decode.hold("handed_over")
    async with front.open_stream(CHAT, messages=MESSAGES, max_tokens=4) as response:
        await front.decode.reached("handed_over")
        stopping = asyncio.create_task(front.server.stop(grace_s=0.05))
        events = read_events(await response.text())
    assert [error["message"] for error in events.errors] == ["the router is stopping"]
    assert not events.done
    await stopping
