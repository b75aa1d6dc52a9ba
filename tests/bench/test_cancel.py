from __future__ import annotations

from pathlib import Path

import pytest
from worker_process import make_tiny_model

from bench import cancel
from bench.report import Report

pytestmark = pytest.mark.processes


def test_nothing_is_left_of_requests_cancelled_at_random(tmp_path: Path) -> None:
    report = Report("cancel")
    cancel.run(make_tiny_model(tmp_path), cancel.Load(waves=2, per_wave=20, longest=256, dtype="float32"), report)

    figures = report.figures
    assert figures["requests"] == 40
    assert figures["cancelled_at_workers"] > 10
    assert figures["cancel_to_free_ms_p99"] > 0
    assert figures["chunk_ms"] > 0
    assert figures["step_ms_p99"] > 0
    assert any(note.startswith("decode worker: ") for note in report.notes)
    assert (figures["leaked_blocks"], figures["survivors"], figures["control_wrong"]) == (0, 0, 0)
