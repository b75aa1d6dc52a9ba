"""The command around a batch: where it sends, what it prints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cluster import cli, state
from cluster.jobs.batch import BatchJob
from cluster.jobs.runner import Progress
from cluster.processes import ProcessId
from engine.errors import UnavailableError

END = Progress(done=9, failed=2, found=4, refusals=1, in_flight=0, over=True)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BatchJob]:
    """Those that were run."""
    seen: list[BatchJob] = []

    async def run(job: BatchJob, tell: Callable[[Progress], None]) -> Progress:
        seen.append(job)
        if "away" in job.base_url:
            raise UnavailableError("the router is away")
        tell(END)
        return END

    monkeypatch.setattr(BatchJob, "run", run)
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    return seen


def batch(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["batch", "in.jsonl", "-o", "out.jsonl", *arguments], prog_name="kvrelay")


def test_the_local_cluster_is_the_default_and_what_came_of_it_is_told(jobs: list[BatchJob]) -> None:
    fields: dict[str, Any] = {"cluster_id": "c", "model": "m", "ready": True, "log_path": "", "ray_address": ""}
    record = state.ClusterRecord(
        name="default",
        process=ProcessId.mine(),
        router_address="127.0.0.1:1",
        started_at=time.time(),
        http_url="https://127.0.0.1:2",
        **fields,
    )
    state.write_record(record)
    result = batch("--concurrency", "3", "--tls-ca", "ca.pem")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "9 lines done, 4 of them by an earlier run, 2 with an error: out.jsonl\n"
    (job,) = jobs
    assert (job.source, job.output) == (Path("in.jsonl"), Path("out.jsonl"))
    assert (job.base_url, job.ca_file, job.concurrency, job.priority) == ("https://127.0.0.1:2", "ca.pem", 3, 8)


def test_json_is_one_object(jobs: list[BatchJob]) -> None:
    told = json.loads(batch("--url", "http://127.0.0.1:3", "--json").stdout)
    assert (told["done"], told["failed"], told["over"]) == (9, 2, True)
    assert jobs[0].base_url == "http://127.0.0.1:3"


def test_what_ends_it_is_one_line_and_exit_code_1(jobs: list[BatchJob]) -> None:
    result = batch("--url", "http://away")
    assert (result.exit_code, result.stderr) == (1, "kvrelay: the router is away\n")


def test_without_a_cluster_nothing_is_sent(jobs: list[BatchJob]) -> None:
    assert "no cluster runs here" in batch().stderr
    assert jobs == []
