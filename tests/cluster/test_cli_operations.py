"""`kvrelay apply`, `scale`, `drain` and `flip` against the socket of a cluster that a test plays."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_router import running_fake_router

from cluster import cli, state
from cluster.config import control_path, make_private
from cluster.control import Tell, serve_orders
from cluster.processes import ProcessId
from engine.errors import ConfigError


class PlayedCluster:
    """Serves orders on a thread of its own."""

    def __init__(self) -> None:
        self.orders: list[Mapping[str, Any]] = []
        self.answer: dict[str, Any] = {"changed": True, "lines": ["prefill: 1 -> 2 workers: 1 worker is started"]}
        self.error: ConfigError | None = None
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> PlayedCluster:
        self._thread.start()
        assert self._serving.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with serve_orders(control_path("default"), self._carry_out):
            self._serving.set()
            await self._over.wait()

    async def _carry_out(self, order: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
        self.orders.append(order)
        if self.error is not None:
            raise self.error
        await tell({"members": {"prefill-0": "ready"}})
        await tell({"members": {"prefill-0": "ready", "prefill-1": "starting"}})
        await tell({"members": {"prefill-1": "ready"}})
        return self.answer


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedCluster]:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    record = state.ClusterRecord(
        name="default",
        cluster_id="c",
        process=ProcessId.mine(),
        router_address="127.0.0.1:1",
        model="m",
        ready=True,
        started_at=time.time(),
        log_path="",
        ray_address="",
    )
    state.write_record(record)
    make_private(control_path("default").parent)
    with PlayedCluster() as played:
        yield played


def kvrelay(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), prog_name="kvrelay")


def test_scale_sends_the_sizes_and_shows_progress_and_outcome(played: PlayedCluster) -> None:
    result = kvrelay("scale", "prefill=2", "decode=1", "--wait", "7")
    assert result.exit_code == 0
    assert result.stdout == "prefill: 1 -> 2 workers: 1 worker is started\n"
    assert [line.split() for line in result.stderr.splitlines()] == [
        ["prefill-1", "starting"],
        ["prefill-1", "ready"],
        ["prefill-0", "gone"],
    ]
    assert played.orders == [{"order": "scale", "replicas": {"prefill": 2, "decode": 1}, "wait_s": 7.0}]


def test_apply_sends_the_whole_spec_of_the_file(played: PlayedCluster, tmp_path: Path) -> None:
    spec = tmp_path / "c.yaml"
    spec.write_text("pools: {decode: {replicas: 3}}\n")
    played.answer = {"changed": False, "lines": []}
    result = kvrelay("apply", "-f", str(spec), "--dry-run")
    assert result.stdout == "cluster default is as it is wanted\n"
    (order,) = played.orders
    assert (order["order"], order["dry_run"]) == ("apply", True)
    assert json.loads(order["spec"])["pools"]["decode"]["replicas"] == 3


def test_restart_orders_another_router_and_must_be_told_what(played: PlayedCluster) -> None:
    assert kvrelay("restart", "--router", "--wait", "3").exit_code == 0
    assert played.orders == [{"order": "restart", "wait_s": 3.0}]
    assert "Missing option '--router'" in kvrelay("restart").stderr


def test_an_order_to_a_router_goes_over_it_and_not_to_the_cluster_here(played: PlayedCluster) -> None:
    with running_fake_router() as router:
        for order in (("scale", "decode=2"), ("drain", "decode-1"), ("flip", "decode-1")):
            result = kvrelay(*order, "--router", router.address)
            assert (result.exit_code, result.stdout) == (0, f"{order[0]} is under way\n")
    assert played.orders == []


@pytest.mark.parametrize("command", ["drain", "flip"])
def test_json_is_one_object(played: PlayedCluster, command: str) -> None:
    result = kvrelay(command, "decode-1", "--json")
    assert json.loads(result.stdout) == played.answer
    assert result.stderr == ""
    assert (played.orders[0]["order"], played.orders[0]["worker"]) == (command, "decode-1")


def test_a_refusal_is_one_line_and_exit_code_1(played: PlayedCluster) -> None:
    played.error = ConfigError("decode-0 is the only decode worker")
    result = kvrelay("drain", "decode-0")
    assert (result.exit_code, result.stderr) == (1, "kvrelay: decode-0 is the only decode worker\n")


@pytest.mark.parametrize("size", ["cache=2", "prefill", "prefill=", "prefill=-1", "prefill=x"])
def test_a_size_that_is_none_is_refused_before_anything_is_sent(played: PlayedCluster, size: str) -> None:
    result = kvrelay("scale", size)
    assert result.exit_code == 1
    assert f"{size}: expected POOL=N, with a pool of prefill, decode" in result.stderr
    assert played.orders == []


def test_applying_to_a_cluster_that_does_not_run_says_how_to_start_it(played: PlayedCluster, tmp_path: Path) -> None:
    spec = tmp_path / "c.yaml"
    spec.write_text("name: other\n")
    result = kvrelay("apply", "-f", str(spec))
    assert "no cluster 'other' runs here; start one with `kvrelay up`" in result.stderr
