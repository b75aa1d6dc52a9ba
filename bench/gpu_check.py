"""What of kvrelay runs on this machine's GPU, is it right, and how near is it to what the card can do?

`python -m bench.gpu_check [--json] [--only PART] [--rehearse]`

Needs a CUDA card, torch, triton and this repository's `engine` and `kv_transfer`: no model, no Ray. Meant to take less
than 8 minutes. The parts, each of which runs whether others fail or not:

  kernels    attention against float64, all others against the CPU, for the types of activations and KV
  parity     prompts, chunks and decode steps of a model with random weights against the CPU in float32
  attention  decode at 32 x 4k as a share of measured copy bandwidth, prefill at 8k of the measured matrix rate, beside
             torch's SDPA and FlashInfer where that is installed
  graphs     a decode step by CUDA graph, without one, and the part of it in which the card waits
  link       blocks from pool to pool on the card against a plain copy
  workers    a prefill and a decode worker on this card, whole but for a router and Ray: prompts computed by the one go
             on in the other, with KV over links through pinned host memory; tokens against one CPU engine in float32

Exit status: 0 all goals met, 1 something failed or missed its goal, 2 there is no card and so nothing was run.

`--rehearse` runs the same code with tiny shapes on the CPU in Triton's interpreter, so that a card is not the first to
see it; it measures nothing, and its figures of speed have no goals.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module

import click

from bench.report import Goal, Report

_FUNCTIONS = {
    "kernels": ("bench.gpu_kernels", "check"),
    "parity": ("bench.gpu_parity", "check"),
    "attention": ("bench.gpu_speed", "measure_attention"),
    "graphs": ("bench.gpu_speed", "measure_graphs"),
    "link": ("bench.gpu_link", "check"),
    "workers": ("bench.gpu_workers", "check"),
}
PARTS = tuple(_FUNCTIONS)
GOALS = (
    Goal("parts_failed", "==", 0),
    Goal("kernel_checks_failed", "==", 0),
    Goal("parity_tokens_differing", "==", 0),
    Goal("worker_tokens_differing", "==", 0),
    Goal("worker_tokens_recomputed", "==", 0),
    Goal("decode_attention_copy_share", ">=", 0.8),
    Goal("prefill_attention_matrix_share", ">=", 0.6),
    Goal("decode_step_launch_overhead", "<=", 0.05),
    Goal("pool_to_pool_copy_share", ">=", 0.9),
)
NO_CARD = 2


@click.command(help="Check and measure the GPU path on this machine's card.")
@click.option("--only", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, help="One part; repeatable.")
@click.option("--rehearse", is_flag=True, help="Tiny shapes on the CPU, in Triton's interpreter.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(parts: tuple[str, ...], rehearse: bool, as_json: bool) -> None:
    if rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not rehearse and not torch.cuda.is_available():
        click.echo(
            "gpu_check: no CUDA card is here, so nothing was run (--rehearse tries the code on the CPU)", err=True
        )
        sys.exit(NO_CARD)
    goals = [goal for goal in GOALS if goal.op == "==" or not rehearse]
    report = Report("gpu_check", goals)
    report.notes.append(_versions(rehearse))
    failed = 0
    for part in parts:
        began = time.monotonic()
        try:
            _run(part, rehearse)(report)
        except ModuleNotFoundError as error:
            report.notes.append(f"{part}: not run, {error.name} is not installed")
            failed += 1
        except Exception:  # noqa: BLE001
            # edge: a new card, driver or compiler may raise anything, and must cost one part only
            report.notes.append(f"{part}: FAILED\n{traceback.format_exc(limit=-6)}")
            failed += 1
        report.notes.append(f"{part}: {time.monotonic() - began:.0f} s")
    report.figures["parts_failed"] = failed
    report.print(as_json)
    if any(not goal.met(report.figures[goal.name]) for goal in goals if goal.name in report.figures):
        sys.exit(1)


def _run(part: str, rehearse: bool) -> Callable[[Report], None]:
    """Imports only what the part needs: a package that is missing costs that part alone."""
    from bench.gpu_bench import Bench

    module, function = _FUNCTIONS[part]
    check: Callable[[Report, Bench], None] = getattr(import_module(module), function)
    bench = Bench.on_cpu() if rehearse else Bench.on_card()
    return lambda report: check(report, bench)


def _versions(rehearse: bool) -> str:
    import torch
    import triton

    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    if rehearse:
        return f"REHEARSAL on the CPU: no figure here is a measurement; {versions}"
    card, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    return f"{card} (1 of {count} used), CUDA {torch.version.cuda}; {versions}; more than one card: not run"


if __name__ == "__main__":
    main()
