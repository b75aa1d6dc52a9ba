"""What Triton makes of the kernels for GPUs that are not here: `bench.kernels`, and that it would see a bad one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bench.aot import Compiled
from bench.kernels import report_of


def compile_table(*options: str) -> dict[str, Any]:
    """In a process of its own: here Triton is in its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels", "--aot", "--json", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    table: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return table


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_attention_over_fp8_compiles_for_hopper_as_it_is_launched() -> None:
    figures = compile_table("--arch", "90", "--only", "Llama-3-8B, float16")["figures"]
    assert figures == {
        "kernels": 3,
        "spills": 0,
        "shared_memory_over_limit": 0,
        "attention_kernels_without_mma": 0,
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1000)
def test_every_kernel_compiles_for_every_gpu_without_a_spill_and_attention_uses_the_matrix_units() -> None:
    table = compile_table()
    assert table["figures"]["kernels"] > 150
    assert [goal["name"] for goal in table["goals"] if not goal["met"]] == []


def row(kernel: str = "decode_kernel", **changes: Any) -> Compiled:
    good: dict[str, Any] = {
        "case": "",
        "arch": 80,
        "registers": 64,
        "spilled": 0,
        "shared": 1024,
        "matrix": ("mma.sync",),
    }
    return Compiled(kernel=kernel, **(good | changes))


@pytest.mark.parametrize(
    ("bad", "figure"),
    [
        (row(spilled=8), "spills"),
        (row(shared=163 * 1024 + 1), "shared_memory_over_limit"),
        (row(matrix=()), "attention_kernels_without_mma"),
    ],
)
def test_what_a_kernel_must_not_have_is_counted(bad: Compiled, figure: str) -> None:
    assert report_of([row(), row("store_kernel", matrix=())]).figures[figure] == 0
    assert report_of([row(), bad]).figures[figure] == 1
