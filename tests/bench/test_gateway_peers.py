from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import gateway_peers
from bench.gateway_client import stream
from bench.local_system import ready_line, spawn
from bench.peers import Peer
from bench.report import Report

pytestmark = pytest.mark.processes
LOAD = gateway_peers.Load(latency_runs=3, rounds=1, streams=4, tokens=20)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer named `fake`, whose environment is this one."""
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", f"{support}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(gateway_peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(gateway_peers, "GATEWAYS", {"fake": "fake_gateway"})
    monkeypatch.setattr(gateway_peers, "PEERS", {"fake": Peer((("install", "fake==1.2"),))})
    (tmp_path / "fake" / "bin").mkdir(parents=True)
    python = tmp_path / "fake" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')  # a link would be a Python without our packages
    python.chmod(0o755)
    return tmp_path


async def test_the_worker_of_peers_sends_an_event_a_token_and_the_end() -> None:
    with ExitStack() as stack, tempfile.TemporaryFile("w+") as log:
        address = ready_line(spawn(stack, log, "bench.gateway_http_worker", []), log)["address"]
        _, reader = await stream(address, "some prompt", 20)
    assert reader.num_events == 20 + 1


def test_a_peer_gets_the_load_and_its_figures_stand_beside_ours(installed: Path) -> None:
    report = Report("gateway")
    gateway_peers.measure_peers(["fake"], LOAD, report)
    assert set(report.peers) == {"router_cpu_ms_per_request", "router_cpu_us_per_token", "relay_tokens_s"}
    assert report.peers["relay_tokens_s"] > 0
    assert report.notes[0].startswith("fake 1.2 (cache_aware): ")


def test_a_peer_that_is_not_installed_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_peers, "ENVIRONMENTS", tmp_path)
    report = Report("gateway")
    gateway_peers.measure_peers(["vllm-router"], LOAD, report)
    assert (report.peers, report.notes) == (
        {},
        ["no figures of a peer: vllm-router is not installed (make bench-peers)"],
    )


def test_a_peer_that_serves_nothing_is_a_note(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_peers, "GATEWAYS", {"fake": "this"})
    monkeypatch.setattr(gateway_peers, "READY_S", 0.3)
    report = Report("gateway")
    gateway_peers.measure_peers(["fake"], LOAD, report)
    assert "fake served nothing within 0.3 s" in report.notes[0]
