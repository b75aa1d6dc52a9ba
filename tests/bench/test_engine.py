from __future__ import annotations

from pathlib import Path

import pytest
from worker_process import make_tiny_model

from bench.engine import ask_peer, ask_peers, generate, summarize
from bench.report import Report
from engine.config import EngineConfig
from worker.engine_builder import build_engine


def test_every_stream_gets_all_its_tokens_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engine.VOCABULARY", range(10, 100))
    parts = build_engine(EngineConfig(model_path=str(make_tiny_model(tmp_path)), kv_memory_bytes=1 << 20))
    try:
        assert generate(parts.engine, batch=3, prompt=20, output=5) > 0.0
        parts.engine.check_integrity()
        assert not parts.engine.has_work()
    finally:
        parts.kv.close()


def test_a_ratio_needs_a_peer_that_was_measured() -> None:
    report = Report("engine", figures={"read_gb_s": 10.0})
    rates = {"decode_b1_tok_s": [10.0, 30.0, 20.0], "prefill_512_tok_s": [4.0]}

    summarize(report, rates, {"vllm": {"decode_b1_tok_s": 5.0}, "other": {}}, weights=250_000_000)

    assert report.figures["decode_b1_vs_vllm"] == 4.0
    assert "prefill_512_vs_vllm" not in report.figures
    assert report.figures["decode_b1_of_bandwidth"] == 0.5


def test_int8_is_compared_with_a_peers_int8_and_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "llamacpp": {"decode_b1_tok_s": 8.0, "int8_b1_tok_s": 10.0, "ready_int8_s": 1.0},
        "vllm": {"decode_b1_tok_s": 5.0, "prefill_512_tok_s": 50.0},
    }
    monkeypatch.setattr("bench.engine.ask_peer", lambda name, *_: answers[name])
    report = Report("engine", figures={"read_gb_s": 10.0})
    rates = {"decode_b1_tok_s": [16.0], "int8_b1_tok_s": [30.0], "prefill_512_int8_tok_s": [100.0]}

    summarize(report, rates, ask_peers(list(answers), Path(), 1, report), weights=0)

    ratios = {name: value for name, value in report.figures.items() if "_vs_" in name}
    assert ratios == {
        "decode_b1_vs_llamacpp": 2.0,
        "decode_b1_vs_vllm": 3.2,
        "decode_b1_vs_best": 2.0,
        "int8_b1_vs_llamacpp_q8": 3.0,
        "prefill_512_int8_vs_vllm": 2.0,
    }


def test_a_peer_that_is_not_there_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.ENVIRONMENTS", tmp_path)
    report = Report("engine")

    assert ask_peer("vllm", tmp_path, 1, report) == {}
    assert report.notes == ["vllm was not measured: vllm is not installed (make bench-peers)"]
