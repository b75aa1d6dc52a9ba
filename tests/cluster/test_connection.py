from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_router import running_fake_router

import cluster
from cluster import connection, state
from cluster.connection import BatchHandle
from cluster.jobs.runner import Progress
from cluster.processes import ProcessId
from engine.errors import ConfigError, RequestCancelled, UnavailableError

END = Progress(1, 0, 0, 0, 0, over=True)


def record(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    fields: dict[str, Any] = {"cluster_id": "c", "model": "m", "ready": True, "log_path": "", "ray_address": ""}
    state.write_record(
        state.ClusterRecord(
            name="here",
            process=ProcessId.mine(),
            router_address=address,
            started_at=time.time(),
            http_url="http://127.0.0.1:1",
            **fields,
        )
    )


def test_the_cluster_of_this_machine_is_found_by_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_fake_router() as router:
        record(router.address, tmp_path, monkeypatch)
        for name in (None, "here"):
            with cluster.connect("local", name=name) as connected:
                assert connected.generate("hello").text == "Grüße ✓"
                assert connected.place.http_url == "http://127.0.0.1:1"
        with cluster.connect() as connected, pytest.raises(UnavailableError, match="takes no orders"):
            connected.scale(prefill=2)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "127.0.0.1:1", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address must be local, auto or ray://HOST:PORT"):
        cluster.connect(address)


def test_without_a_cluster_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no cluster runs here"):
        cluster.connect()


def test_a_batch_handle_tells_progress_and_the_end() -> None:
    async def run(tell: Any) -> Progress:
        tell(Progress(0, 0, 0, 0, 1))
        return END

    handle = BatchHandle(run)
    assert handle.result(10) == END
    assert handle.done
    assert handle.progress == Progress(0, 0, 0, 0, 1)
    handle.cancel()


def test_what_ends_a_batch_is_raised_to_who_asks() -> None:
    async def run(tell: Any) -> Progress:
        raise UnavailableError("the router is away")

    with pytest.raises(UnavailableError, match="away"):
        BatchHandle(run).result(10)


def test_a_cancelled_batch_has_ended_when_cancel_returns() -> None:
    ended = []

    async def run(tell: Any) -> Progress:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return END

    handle = BatchHandle(run)
    handle.cancel()
    assert ended == [True]
    with pytest.raises(RequestCancelled, match="submitted again, it goes on"):
        handle.result(10)


def test_importing_the_package_loads_neither_ray_nor_grpc() -> None:
    code = "import sys, json, cluster; print(json.dumps([n for n in ('ray', 'grpc', 'torch') if n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []
    assert connection.TIMEOUT_S > 0
