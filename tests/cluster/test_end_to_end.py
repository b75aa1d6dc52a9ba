"""The commands with real processes, a real Ray and the real model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import state
from cluster.config import CLUSTER_ID_VARIABLE, control_path, ray_dir
from cluster.control import send_order
from cluster.processes import ProcessId, gone, marked
from kvrelay import Client, Generation, UnavailableError

pytestmark = [pytest.mark.processes, pytest.mark.model]

BOUND_S = 90.0
"""A wait longer than this is a failure. Starts take seconds, several times that on a busy machine."""
PROMPT = "The capital of France is"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder of our own, for the commands and for this process."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("home")
        patch.setenv("KVRELAY_HOME", str(path))
        yield path


@pytest.fixture(scope="module")
def cluster(smollm2_folder: Path, home: Path) -> Iterator[state.ClusterRecord]:
    """One prefill and one decode worker, shared by the tests that leave them as they were."""
    spec = home / "spec.yaml"
    spec.write_text("supervision: {hung_after_s: 6}\n")
    up = kvrelay("up", "-d", "--json", "--port", "0", "--model", str(smollm2_folder), str(spec))
    assert up.returncode == 0, up.stderr
    yield state.find_running()
    kvrelay("down")


def kvrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False
    )


def generate(record: state.ClusterRecord) -> Generation:
    with Client(record.router_address, timeout_s=BOUND_S) as client:
        return client.generate(PROMPT, max_tokens=4, temperature=0.0)


def processes_of(record: state.ClusterRecord) -> list[ProcessId]:
    """Everything that the run started: found by its mark, by its session, and by what it recorded."""
    sessions = [process.pid for process in psutil.process_iter() if session_of(process.pid) == record.process.pid]
    recorded = [record.process, *record.ray_processes, *(member.process for member in record.members)]
    found = [*marked(CLUSTER_ID_VARIABLE, record.cluster_id), *map(ProcessId.of, sessions), *recorded]
    return list({process: None for process in found if process is not None and process.alive})


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def wait_until_gone(processes: list[ProcessId], bound_s: float) -> None:
    async def wait() -> None:
        async with asyncio.timeout(bound_s):
            for process in processes:
                await gone(process)

    asyncio.run(wait())


def member(name: str) -> state.MemberRecord:
    return next(member for member in state.find_running().members if member.member_id == name)


def test_a_prompt_is_prefilled_on_one_worker_and_decoded_on_the_other(cluster: state.ClusterRecord) -> None:
    answer = generate(cluster)

    assert answer.text.strip().startswith("Paris")
    assert (answer.route.prefill_worker, answer.route.decode_worker) == ("prefill-0", "decode-0")
    assert answer.route.blocks_adopted == answer.route.blocks_sent > 0
    assert answer.route.recomputed_tokens == 0


def test_up_tells_where_it_serves_and_what_runs(cluster: state.ClusterRecord) -> None:
    assert cluster.ready
    assert len(cluster.ray_processes) == 2  # control store and raylet: no helper that costs seconds of start
    assert sorted(member.role for member in cluster.members) == ["decode", "prefill", "router"]
    assert all(address.startswith("127.0.0.1:") for address in (cluster.router_address, cluster.ray_address))
    status = json.loads(kvrelay("status", "--json").stdout)
    assert {worker["state"] for worker in status["workers"]} == {"ready"}


def test_http_answers_as_grpc_does(cluster: state.ClusterRecord) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://{cluster.http_address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=BOUND_S) as response:
        answer = json.load(response)
    assert answer["choices"][0]["text"] == generate(cluster).text


def test_nothing_listens_beyond_the_loopback_interface(cluster: state.ClusterRecord) -> None:
    listening: list[Any] = []
    for process in processes_of(cluster):
        for connection in psutil.Process(process.pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                listening.append(connection.laddr.ip.removeprefix("::ffff:"))
    assert set(listening) == {"127.0.0.1"}


def test_a_second_up_of_the_same_name_says_where_the_first_one_is(cluster: state.ClusterRecord) -> None:
    second = kvrelay("up", "--port", "0")
    assert second.returncode == 1
    assert f"runs already (process {cluster.process.pid}) and serves {cluster.router_address}" in second.stderr


def test_a_port_in_use_is_named_before_anything_is_started(cluster: state.ClusterRecord) -> None:
    port = cluster.router_address.rpartition(":")[2]
    other = kvrelay("up", "--name", "other", "--port", port)
    assert other.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in other.stderr
    assert state.read_record("other") is None


@pytest.mark.parametrize(
    ("number", "names"), [(signal.SIGKILL, ["decode-0"]), (signal.SIGSTOP, ["router", "decode-0"])]
)
def test_what_is_killed_or_hangs_is_replaced_and_requests_work_again(
    cluster: state.ClusterRecord, number: signal.Signals, names: list[str]
) -> None:
    before = [member(name) for name in names]
    processes = [each.process for each in before if each.process is not None]
    assert [process.signal(number) for process in processes] == [True] * len(names)
    wait_until_gone(processes, BOUND_S)  # what is only stopped ends when it is given up

    deadline = time.monotonic() + BOUND_S
    # A process each time: a loop of failing connections would take the machine from those that start.
    while (answer := kvrelay("generate", PROMPT, "--max-tokens", "4", "--json")).returncode != 0:
        assert time.monotonic() < deadline, f"not replaced: {answer.stderr}"

    assert json.loads(answer.stdout)["route"]["decode_worker"] == "decode-0"
    for old in before:
        assert member(old.member_id).incarnation != old.incarnation
        assert member(old.member_id).process != old.process


def test_down_leaves_no_process_and_no_file_of_ray(smollm2_folder: Path) -> None:
    arguments = ("--name", "brief", "--prefill", "0", "--port", "0", "--model", str(smollm2_folder))
    assert kvrelay("up", "-d", *arguments).returncode == 0
    record = state.find_running("brief")
    processes = processes_of(record)
    assert len(processes) >= 5  # up, control store, raylet, router, decode worker

    down = kvrelay("down", "brief", "--json")

    assert json.loads(down.stdout) == {"stopped": "brief"}
    assert [process for process in processes if process.alive] == []
    assert processes_of(record) == []
    assert state.read_record("brief") is None
    assert not ray_dir("brief").exists()


def test_an_up_that_is_killed_in_the_middle_of_an_order_leaves_no_process_and_is_cleared_by_the_next_command(
    smollm2_folder: Path,
) -> None:
    command = [sys.executable, "-m", "cluster", "up", "--json", "--name", "killed", "--prefill", "0", "--port", "0"]
    with subprocess.Popen(
        [*command, "--model", str(smollm2_folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as up:
        assert up.stdout is not None
        assert json.loads(up.stdout.readline())["name"] == "killed"
        record = state.find_running("killed")
        processes: list[ProcessId] = []

        def under_way(_: object) -> None:
            processes.extend(processes_of(record))
            up.kill()

        order = {"order": "scale", "replicas": {"decode": 2}, "wait_s": BOUND_S}
        with pytest.raises(UnavailableError, match="the cluster ended before it answered"):
            asyncio.run(send_order(control_path("killed"), order, under_way))
    wait_until_gone(processes, 10.0)

    assert processes_of(record) == []
    assert ray_dir("killed").exists()
    assert "no cluster 'killed' runs here" in kvrelay("status", "--cluster", "killed").stderr
    assert kvrelay("down", "killed").returncode == 0
    assert not ray_dir("killed").exists()
    assert state.running_record("killed") is None
