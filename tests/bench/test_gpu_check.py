"""`make gpu-check` without a card: it says so, and every part of it runs in a rehearsal, so that a card is not the
first to see the code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

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


def test_a_link_between_two_workers_is_rehearsed() -> None:
    figures = rehearsed("link")["figures"]
    assert figures["link_tokens_differing"] == 0


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
