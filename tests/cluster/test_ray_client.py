"""`cluster.connect("ray://...")` from a separate process, against a Ray client server on the loopback interface."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_process import make_tiny_model

from bench.operations import NAME, RESOURCE, Joined
from bench.ray_nodes import RayAddress, node_environment, ray_nodes

pytestmark = pytest.mark.processes

BOUND_S = 100.0
POOL = {"kv_memory_bytes": 4 << 20, "block_size": 8}
CLIENT = """
import json, sys
import cluster

address, name, source, output = sys.argv[1:]
with cluster.connect(address, name=name) as connected:
    answer = connected.generate("hello", max_tokens=6, temperature=0.0, ignore_eos=True)
    with connected.stream("hello", max_tokens=6, temperature=0.0, ignore_eos=True) as stream:
        pieces = [chunk.token_ids for chunk in stream]
    batch = connected.submit_batch(source, output)
    end = batch.result(60)
    scaled = connected.scale(prefill=2)
    flipped = connected.flip("prefill-1")
    workers = sorted(worker.worker_id for worker in connected.status().workers)
    try:
        connected.scale(decode=0)
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
print(json.dumps({
    "generated": answer.token_ids, "streamed": sum(map(list, pieces), []), "done": end.done, "failed": end.failed,
    "lines": scaled["lines"] + flipped["lines"], "workers": workers, "refusal": refusal,
    "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayAddress]:
    """A Ray with a running cluster."""
    environment = node_environment(secrets.token_hex(32)) | {"KVRELAY_HOME": str(tmp_path / "home")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "model").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ray_nodes(1, {RESOURCE: 4.0}, os.environ, client_port=port) as nodes:
        running = Joined(nodes.address, str(make_tiny_model(tmp_path / "model")), POOL, dtype="float32")
        asyncio.run(running.start(tmp_path))
        yield nodes
        asyncio.run(running.stop())


def test_a_client_process_generates_streams_runs_a_batch_and_scales(nodes: RayAddress, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "hello", "max_tokens": 4}
    lines = [json.dumps({"custom_id": f"id-{n}", "url": "/v1/completions", "body": body}) for n in range(5)]
    source.write_text("\n".join(lines) + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # It finds nothing by a record. A job that Ray runs finds its Ray in the same way.
    environment = {**os.environ, "KVRELAY_HOME": str(elsewhere), "RAY_ADDRESS": nodes.address}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, nodes.client_address, NAME, str(source), str(output)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["generated"] == told["streamed"]
    assert len(told["generated"]) == 6
    assert (told["done"], told["failed"]) == (5, 0)
    assert told["lines"] == [
        "prefill: 1 -> 2 workers: 1 worker is started",
        "prefill: 2 -> 1 workers: 1 worker is drained and stopped",
        "decode: 1 -> 2 workers: 1 worker is started",
    ]
    assert told["workers"] == ["decode-0", "decode-1", "prefill-0"]
    assert told["refusal"].startswith("ConfigError: decode: replicas must be at least 1")
    assert not told["torch"]
    assert len(output.read_text().splitlines()) == 5

    again = [str(source), "-o", str(tmp_path / "job.jsonl"), "--ray", "auto", "--cluster", NAME, "--json"]
    job = subprocess.run(
        [sys.executable, "-m", "cluster.jobs.batch", *again],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env=environment,
    )
    assert job.returncode == 0, job.stderr
    assert json.loads(job.stdout.splitlines()[-1])["done"] == 5
