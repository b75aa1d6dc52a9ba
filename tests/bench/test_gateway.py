from __future__ import annotations

from pathlib import Path

import pytest
from fakes import make_model_folder

from bench import gateway
from bench.report import Report

pytestmark = pytest.mark.processes


def test_every_figure_is_measured_on_streams_that_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STREAMS", 3), ("TOKENS", 20), ("LATENCY_RUNS", 4), ("ROUNDS", 1)):
        monkeypatch.setattr(gateway, name, value)
    report = Report("gateway")
    gateway.run(make_model_folder(tmp_path), report)
    assert set(report.figures) == {
        "added_ms_p50",
        "added_ms_p90",
        "router_cpu_ms_per_request",
        "relay_tokens_s",
        "router_cpu_us_per_token",
        "tokens_per_event",
        "grpc_relay_tokens_s",
    }
    assert report.figures["relay_tokens_s"] > 0
