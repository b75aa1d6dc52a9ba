"""A cluster on a Ray of several nodes, changed while it serves: does a request fail?

`python -m bench.operations [--json] [--model NAME]`

Pools are scaled 1 -> 3 -> 1; every worker is replaced because a knob changed; so is the router, several times; a node
is drained; a node is killed. All the while requests run, and each answer is compared with that of the quiet cluster.
Nodes are raylets on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from bench.operations_load import Answers, LoadResult, http_load, load, make_prompts, right_answers
from bench.ray_nodes import node_environment, ray_nodes
from bench.report import Goal, Report
from cluster.config import control_path, default_model_dir
from cluster.control import send_order
from cluster.state import find_running
from engine.model_store import resolve_model
from kvrelay import AsyncClient

NAME = "operations"
RESOURCE = "worker"
NODES, WORKERS_A_NODE = 3, 2.0
START_TIMEOUT_S = 180.0
ORDER_S = 120.0
SEEN_WITHIN_S = 30.0
PROMPT_TOKENS, OUTPUT_TOKENS, PROMPTS, STREAMS = 40, 80, 6, 4
VOCABULARY = range(100, 250)
RESTARTS = 5
"""Of the router."""
POLL_S = 0.01
GOALS = (
    Goal("scale_failed_requests", "==", 0),
    Goal("rolling_restart_errors", "==", 0),
    Goal("router_restart_failed", "==", 0),
    Goal("node_drain_failed_requests", "==", 0),
    Goal("node_kill_failed_requests", "==", 0),
    Goal("node_kill_seen_s", "<=", 3.0),
)


@dataclass
class Joined:
    """A cluster that joined a Ray: `kvrelay up` in a process of its own."""

    address: str
    """Of the Ray."""
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of both pools."""
    router_address: str = ""
    http_url: str = ""
    dtype: str = "bfloat16"

    def spec(self, **settings: Any) -> dict[str, Any]:
        """With one prefill and one decode worker."""
        pool = {"ray_resource": RESOURCE, **self.settings, **settings}
        spec = {"name": NAME, "model": self.model, "router": {"port": 0}, "ray": {"address": self.address}}
        return {**spec, "dtype": self.dtype, "pools": {"prefill": pool, "decode": pool}}

    async def start(self, folder: Path) -> None:
        path = folder / "spec.yaml"
        path.write_text(json.dumps(self.spec()))
        command = [sys.executable, "-m", "cluster", "up", "-d", "--json", str(path)]
        up = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        async with asyncio.timeout(START_TIMEOUT_S):
            out, err = await up.communicate()
        if up.returncode:
            raise click.ClickException(f"the cluster did not start: {err.decode()[-2000:]}")
        told = json.loads(out)
        self.router_address, self.http_url = told["router_address"], told["http_url"]

    async def stop(self) -> None:
        down = await asyncio.create_subprocess_exec(sys.executable, "-m", "cluster", "down", NAME)
        async with asyncio.timeout(START_TIMEOUT_S):
            await down.wait()

    async def order(self, name: str, **fields: Any) -> dict[str, Any]:
        return await send_order(control_path(NAME), {"order": name, "wait_s": ORDER_S, **fields})

    async def scale(self, **replicas: int) -> None:
        await self.order("scale", replicas=replicas)


@asynccontextmanager
async def joined(cluster: Joined) -> AsyncIterator[Answers]:
    with tempfile.TemporaryDirectory() as folder:
        await cluster.start(Path(folder))
    try:
        async with AsyncClient(cluster.router_address) as client:
            prompts = make_prompts(PROMPTS, VOCABULARY, PROMPT_TOKENS)
            yield await right_answers(client, prompts, OUTPUT_TOKENS)
    finally:
        await cluster.stop()


async def scale_up_and_down(cluster: Joined, answers: Answers, *roles: str) -> LoadResult:
    """1 -> 3 -> 1, each of these pools."""
    async with AsyncClient(cluster.router_address) as client, load(client, answers, STREAMS) as result:
        await cluster.scale(**dict.fromkeys(roles, 3))
        await cluster.scale(**dict.fromkeys(roles, 1))
    return result


async def rolling_restart(cluster: Joined, answers: Answers, max_num_seqs: int) -> LoadResult:
    """Every worker, because a knob changed."""
    async with AsyncClient(cluster.router_address) as client, load(client, answers, STREAMS) as result:
        await cluster.order("apply", spec=json.dumps(cluster.spec(max_num_seqs=max_num_seqs)))
    return result


async def router_restart(cluster: Joined, answers: Answers, restarts: int) -> tuple[LoadResult, LoadResult]:
    """Another router takes over, again and again: of clients of gRPC, and of plain HTTP."""
    async with (
        AsyncClient(cluster.router_address) as client,
        http_load(cluster.http_url, cluster.model, STREAMS) as over_http,
        load(client, answers, STREAMS) as over_grpc,
    ):
        for _ in range(restarts):
            await cluster.order("restart")
    return over_grpc, over_http


async def node_drain(cluster: Joined, answers: Answers) -> LoadResult:
    """A node with a decode worker is told to end, as by the preStop hook of a pod: its worker moves."""
    await cluster.scale(decode=2)
    async with AsyncClient(cluster.router_address) as client, load(client, answers, STREAMS) as result:
        worker, raylet = _node_of_a_decode_worker()
        flag = next(part for part in psutil.Process(raylet).cmdline() if part.startswith("--node_id="))
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "bench"]
        node_id = flag.partition("=")[2]
        command = ["drain-node", "--address", cluster.address, "--node-id", node_id, *reason]
        ray = [sys.executable, "-m", "ray.scripts.scripts", *command, "--deadline-remaining-seconds", "300"]
        drained = await asyncio.create_subprocess_exec(*ray, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        async with asyncio.timeout(ORDER_S):
            _, err = await drained.communicate()
            if drained.returncode:
                raise click.ClickException(f"ray drain-node failed: {err.decode()[-500:]}")
            shown = await cluster.order("show")
            while _raylets().get(worker) == raylet or not shown["settled"]:
                await asyncio.sleep(POLL_S)
                shown = await cluster.order("show")
        await cluster.scale(decode=1)
    return result


async def node_kill(cluster: Joined, answers: Answers) -> tuple[LoadResult, float]:
    """Of two nodes with decode workers, one is killed. Returns how long it took until the supervisor knew.

    The two nodes that are left now are full, so each has one.
    """
    await cluster.scale(decode=3)
    async with AsyncClient(cluster.router_address) as client, load(client, answers, STREAMS) as result:
        async with asyncio.timeout(ORDER_S):
            status = await client.status()
            while any(worker.role == "decode" and not worker.running for worker in status.workers):
                await asyncio.sleep(POLL_S)  # until all are at work
                status = await client.status()
        victim, raylet = _node_of_a_decode_worker()
        started = time.monotonic()
        os.kill(raylet, signal.SIGKILL)
        while (await cluster.order("show"))["members"].get(victim) == "ready":
            if time.monotonic() > started + SEEN_WITHIN_S:
                raise click.ClickException(f"the death of {victim} was not seen within {SEEN_WITHIN_S:g} s")
            await asyncio.sleep(POLL_S)
        seen_s = time.monotonic() - started
        await cluster.scale(decode=1)
    return result, seen_s


def _node_of_a_decode_worker() -> tuple[str, int]:
    """A decode worker and its raylet; of one whose node does not have them all, if there is one."""
    raylets = {name: raylet for name, raylet in _raylets().items() if name.startswith("decode")}
    several = [name for name, raylet in raylets.items() if any(other != raylet for other in raylets.values())]
    name = (several or list(raylets))[0]
    return name, raylets[name]


def _raylets() -> dict[str, int]:
    """Of each member, the raylet under which it runs."""
    processes = {m.member_id: m.process for m in find_running(NAME).members}
    alive = {name: process for name, process in processes.items() if process is not None and process.alive}
    return {name: psutil.Process(process.pid).ppid() for name, process in alive.items()}


async def measure(cluster: Joined, report: Report) -> None:
    async with joined(cluster) as answers:
        scaled = await scale_up_and_down(cluster, answers, "prefill", "decode")
        restarted = await rolling_restart(cluster, answers, max_num_seqs=32)
        over_grpc, over_http = await router_restart(cluster, answers, RESTARTS)
        drained = await node_drain(cluster, answers)
        killed, seen_s = await node_kill(cluster, answers)
    report.figures |= {
        "scale_failed_requests": scaled.failed,
        "rolling_restart_errors": restarted.failed,
        "router_restart_failed": over_grpc.failed + over_http.failed,
        "node_drain_failed_requests": drained.failed,
        "node_kill_failed_requests": killed.failed,
        "node_kill_seen_s": seen_s,
    }
    named = {
        "scaling": scaled,
        "rolling restart": restarted,
        "router restart": over_grpc,
        "router restart, HTTP": over_http,
        "node drain": drained,
        "node kill": killed,
    }
    for name, result in named.items():
        report.notes.append(f"{name}: {result.finished} answers, {result.resumed} of them resumed on another worker")
        report.notes += [f"{name}: {error}" for error in result.errors[:3]]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, model: str) -> None:
    """Change a cluster while it serves, and count the requests that fail."""
    report = Report("operations", GOALS)
    folder = resolve_model(model, default_model_dir())
    with tempfile.TemporaryDirectory(prefix="kvr-") as home:
        environment = node_environment(secrets.token_hex(32))
        os.environ.update(environment, KVRELAY_HOME=home)
        with ray_nodes(NODES, {RESOURCE: WORKERS_A_NODE}, environment) as nodes:
            asyncio.run(measure(Joined(nodes.address, str(folder)), report))
    report.print(as_json)


if __name__ == "__main__":
    main()
