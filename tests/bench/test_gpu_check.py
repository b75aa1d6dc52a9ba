"""`make gpu-check` without a card: it says so, and every part of it runs in a rehearsal, so that a card is not the
first to see the code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import gpu_speed
from bench.gpu_check import main

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def gpu_check(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu_check", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)


def rehearsed(*parts: str) -> dict[str, Any]:
    options = [option for part in parts for option in ("--only", part)]
    done = gpu_check("--rehearse", "--json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "REHEARSAL" in result["notes"][0]
    return result


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_fails_with_a_status_of_its_own_and_says_why() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert "no CUDA card is here, so nothing was run" in done.stderr
    assert done.stdout == ""


def in_this_process(*parts: str) -> tuple[int, dict[str, Any]]:
    options = [option for part in parts for option in ("--only", part)]
    done = CliRunner().invoke(main, ["--rehearse", "--json", *options])
    return done.exit_code, json.loads(done.output.splitlines()[-1])


def test_a_package_that_is_missing_costs_its_part_alone_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bench.gpu_link", None)
    monkeypatch.setattr(gpu_speed, "measure_graphs", lambda report, bench: report.figures.update(reached=1))
    status, result = in_this_process("link", "graphs")
    assert status == 1
    assert "link: not run, bench.gpu_link is not installed" in result["notes"]
    assert result["figures"] == {"reached": 1, "parts_failed": 1}


def test_a_part_that_fails_costs_no_other_one_and_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(report: object, bench: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(gpu_speed, "measure_attention", broken)
    monkeypatch.setattr(gpu_speed, "measure_graphs", lambda report, bench: report.figures.update(reached=1))
    status, result = in_this_process("attention", "graphs")
    assert status == 1
    assert any("attention: FAILED" in note and "illegal memory access" in note for note in result["notes"])
    assert result["figures"]["reached"] == 1


def test_two_workers_and_their_links_are_rehearsed() -> None:
    figures = rehearsed("link", "workers")["figures"]
    assert figures["worker_tokens"] > 0
    assert (figures["worker_tokens_differing"], figures["worker_tokens_recomputed"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("kernels", {"kernel_checks", "kernel_checks_failed", "kernel_worst_error_to_limit"}),
        ("parity", {"parity_tokens", "parity_tokens_differing", "parity_logits_error_bfloat16"}),
        (
            "attention",
            {"decode_attention_copy_share", "decode_attention_copy_share_fp8", "prefill_attention_matrix_share"},
        ),
        ("graphs", {"decode_step_ms", "decode_step_without_graph_ms", "decode_step_launch_overhead"}),
    ],
)
def test_every_part_is_rehearsed(part: str, figures: set[str]) -> None:
    assert figures <= rehearsed(part)["figures"].keys()
