"""A batch of 200 lines of which most are nonsense, against a real router: every line gets one record that says why."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from http_front import HttpFront
from router_fleet import make_served_model

from cluster.jobs.http_sender import http_sender
from cluster.jobs.ledger import MAX_LINE_BYTES
from cluster.jobs.runner import BatchRun

LINES = 200
URL = "/v1/completions"


def line(number: int, url: str = URL, **body: Any) -> bytes:
    request = {"custom_id": f"id-{number}", "url": url, "body": {"prompt": "hello", "max_tokens": 2, **body}}
    return json.dumps(request).encode()


NONSENSE: dict[str, Callable[[int], bytes]] = {
    "invalid_line": lambda n: b'{"custom_id": "id-%d", ' % n,
    "invalid_line, no UTF-8": lambda n: line(n).replace(b"hello", b"\xff\xfe\x80"),
    "invalid_line, nested": lambda n: b"[" * 100_000,
    "invalid_line, digits": lambda n: line(n, max_tokens=7).replace(b"7", b"7" * 5000),
    "invalid_line, long": lambda n: line(n, prompt="x" * (10 << 20)) if n < 20 else b"x" * (MAX_LINE_BYTES + 1),
    "invalid_line, url": lambda n: line(n, "/v1/../metrics"),
    "invalid_line, text": lambda n: b'"just text"',
    "duplicate_custom_id": lambda n: line(0),
    "model_not_found": lambda n: line(n, model="gpt-99"),
    "too large": lambda n: line(n, prompt="x" * (MAX_LINE_BYTES - 150)) if n < 20 else line(n, prompt="x" * (2 << 20)),
    "not finite": lambda n: line(n, temperature=float("nan")),
    "surrogate": lambda n: line(n, prompt="\ud800"),
    "wrong types": lambda n: line(n, prompt={"a": [1]}, max_tokens="many"),
}


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[HttpFront]:
    (tmp_path / "model").mkdir()
    front = HttpFront(make_served_model(tmp_path / "model"))
    await front.start()
    yield front
    await front.idle()
    await front.close()


async def test_each_of_200_lines_gets_one_record_and_the_good_ones_an_answer(front: HttpFront, tmp_path: Path) -> None:
    kinds = list(NONSENSE)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("wb") as file:
        for number in range(LINES):
            kind = kinds[number // 2 % len(kinds)]
            file.write((NONSENSE[kind](number) if number % 2 else line(number)) + b"\n")
    async with http_sender(front.url, api_key=None, ca_file=None, timeout_s=20.0) as send:
        end = await BatchRun(source, output, send, concurrency=8, patience_s=5.0).run()
        again = await BatchRun(source, output, send, patience_s=5.0).run()

    records = [json.loads(each) for each in output.read_bytes().splitlines()]
    assert sorted(record["line"] for record in records) == list(range(1, LINES + 1))
    assert (end.done, end.failed, again.found) == (LINES, LINES // 2, LINES)
    for record in records:
        if record["line"] % 2:
            assert (record["error"], record["response"]["status_code"]) == (None, 200)
            continue
        kind = kinds[(record["line"] - 1) // 2 % len(kinds)]
        assert record["error"]["message"], kind
        if record["response"] is None:
            assert record["error"]["code"] == kind.partition(",")[0]
            assert record["error"]["message"].startswith(f"line {record['line']}: ")
        else:
            assert 400 <= record["response"]["status_code"] < 500, (kind, record["error"])
