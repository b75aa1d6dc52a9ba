"""A batch through a real cluster whose every process is killed on the way, and the driver too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_process import make_tiny_model

from cluster import state

pytestmark = pytest.mark.processes

BOUND_S = 100.0
LINES = 200


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    pool = {"kv_memory_bytes": 4 << 20, "block_size": 8}
    spec = {
        "name": "batch",
        "model": str(make_tiny_model(tmp_path / "model")),
        "dtype": "float32",
        "router": {"port": 0},
        "pools": {"prefill": pool, "decode": pool},
        "supervision": {"backoff_min_s": 0.1},
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    run("up", "-d", "--json", str(tmp_path / "spec.yaml"))
    yield "batch"
    run("down", "batch")


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster", *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr


def start_batch(source: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cluster.jobs.batch", str(source), "-o", str(output), "--concurrency", "4"]
    return subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def wait_for(count: int, output: Path) -> None:
    """Until so many records are written."""
    tick, deadline = threading.Event(), time.monotonic() + BOUND_S
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"no {count} records in time"
        tick.wait(0.02)


def kill(name: str) -> None:
    member = next(member for member in state.find_running().members if member.member_id == name)
    assert member.process is not None
    assert member.process.signal(signal.SIGKILL)


def test_each_of_200_lines_is_answered_once_though_driver_router_and_workers_are_killed(
    cluster: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True}
    with source.open("w") as file:
        for number in range(LINES):
            file.write(json.dumps({"custom_id": f"id-{number}", "url": "/v1/completions", "body": body}) + "\n")
    with start_batch(source, output) as first:
        wait_for(20, output)
        os.kill(first.pid, signal.SIGKILL)
    with start_batch(source, output) as second:
        for count, name in ((50, "router"), (90, "prefill-0"), (130, "decode-0")):
            wait_for(count, output)
            kill(name)
        end = json.loads(second.communicate(timeout=BOUND_S)[0])

    assert (end["done"], end["failed"], end["over"]) == (LINES, 0, True)
    assert end["found"] >= 20
    found = records(output)
    assert sorted(record["line"] for record in found) == list(range(1, LINES + 1))
    texts = {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in found}
    assert len(set(texts.values())) > 1  # each line has a seed of its own
    again = tmp_path / "again.jsonl"
    (tmp_path / "few.jsonl").write_text("".join(source.read_text().splitlines(keepends=True)[:10]))
    with start_batch(tmp_path / "few.jsonl", again) as third:
        third.communicate(timeout=BOUND_S)
    assert {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in records(again)} == {
        name: texts[name] for name in texts if int(name.removeprefix("id-")) < 10
    }
