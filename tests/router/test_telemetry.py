"""The line of the log for each call, and that a router which wants none does nothing for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from http_front import HttpFront

from router.served_model import ServedModel
from router.telemetry import CallRecord

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a secret prompt"}]


@pytest.fixture
async def front(model: ServedModel) -> AsyncIterator[HttpFront]:
    front = HttpFront(model)
    yield front
    await front.close()


async def test_each_call_is_one_line_with_its_end_its_tokens_and_its_workers(
    front: HttpFront, caplog: pytest.LogCaptureFixture
) -> None:
    await front.start(log_calls=True)
    caplog.set_level(logging.INFO, "kvrelay.calls")
    await front.post(CHAT, {"X-Request-Id": "one"}, messages=MESSAGES, max_tokens=3, n=2)
    front.server.set_workers({})
    await front.post(CHAT, {"X-Request-Id": "two", "X-Request-Timeout": "0.05"}, messages=MESSAGES)
    told = [record.__dict__["fields"] for record in caplog.records if record.name == "kvrelay.calls"]
    assert [(each["request_id"], each["outcome"]) for each in told] == [("one", "length,length"), ("two", "NoWorkers")]
    assert (told[0]["completion_tokens"], told[0]["prefill_worker"], told[0]["decode_worker"]) == (6, "p0", "d0")
    assert told[0]["ttft_ms"] > 0
    assert "secret" not in caplog.text


async def test_a_router_that_tells_nobody_keeps_no_record(front: HttpFront, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a record was kept")

    await front.start()
    monkeypatch.setattr(CallRecord, "note", fail)
    assert (await front.post(CHAT, messages=MESSAGES, max_tokens=2))[0] == 200
