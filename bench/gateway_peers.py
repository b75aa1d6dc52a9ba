"""Routers of other systems under the load of `bench.gateway`: the CPU time that each request and token costs them.

They relay their workers' events as they are; ours tokenizes prompts, and makes text and events of token ids.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import uvloop

from bench.gateway_client import prompt_of, stream
from bench.local_system import ready_line, spawn, stop_process
from bench.peers import ENVIRONMENTS, PEERS, PeerMissing
from bench.report import Report, median_spread
from engine.errors import InternalError

GATEWAYS = {"sglang-router": "sglang_router.launch_router", "vllm-router": "vllm_router.launch_router"}
"""Name in `bench.peers`, and the module that runs it."""
MODEL = "bench"
READY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    latency_runs: int
    rounds: int
    streams: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    cpu_ms_per_request: float
    cpu_us_per_token: Sequence[float]
    tokens_s: Sequence[float]


def measure_peers(names: Sequence[str], load: Load, report: Report) -> None:
    """The best peer's figures stand beside ours; those of each, or why there are none, are notes."""
    measured = {}
    for name in names:
        try:
            measured[name] = costs = measure_peer(name, load)
        except PeerMissing as missing:
            report.notes.append(f"no figures of a peer: {missing}")
            continue
        version = PEERS[name].steps[0][1].rpartition("==")[2]
        report.notes.append(
            f"{name} {version} (cache_aware): {costs.cpu_ms_per_request:.3g} ms of CPU a request of one token, "
            f"{median_spread(costs.cpu_us_per_token)} us a token, {median_spread(costs.tokens_s)} tokens/s; it passes "
            "events on as they are"
        )
    if measured:
        report.peers |= {
            "router_cpu_ms_per_request": min(costs.cpu_ms_per_request for costs in measured.values()),
            "router_cpu_us_per_token": min(statistics.median(costs.cpu_us_per_token) for costs in measured.values()),
            "relay_tokens_s": max(statistics.median(costs.tokens_s) for costs in measured.values()),
        }


def measure_peer(name: str, load: Load) -> Costs:
    """Raises `PeerMissing` if it is not installed or does not serve."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        raise PeerMissing(f"{name} is not installed (make bench-peers)")
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        workers = [ready_line(spawn(stack, log, "bench.gateway_http_worker", []), log) for _ in range(2)]
        port, metrics_port = free_ports(2)
        flags = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", "error"]
        flags += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        flags += ["--worker-urls", *(f"http://{worker['address']}" for worker in workers)]
        command = [str(python), "-m", GATEWAYS[name], *flags]
        router = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        stack.callback(stop_process, router)
        return uvloop.run(_measure(name, f"127.0.0.1:{port}", router.pid, load))


def free_ports(count: int) -> list[int]:
    """Of 127.0.0.1, free at this moment: these routers have no way to say which one they took."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


async def _measure(name: str, address: str, pid: int, load: Load) -> Costs:
    await _ready(name, address)
    for number in range(8):
        await stream(address, prompt_of(-1 - number), 8, MODEL)
    begun = cpu_s(pid)
    for number in range(load.latency_runs):
        await stream(address, prompt_of(number), 1, MODEL)
    per_request = (cpu_s(pid) - begun) * 1000 / load.latency_runs
    per_token, rates = [], []
    for turn in range(load.rounds):
        prompts = [prompt_of(10_000 + turn * load.streams + i) for i in range(load.streams)]
        begun = cpu_s(pid)
        results = await asyncio.gather(*(stream(address, prompt, load.tokens, MODEL) for prompt in prompts))
        seconds = time.perf_counter() - min(reader.first for _, reader in results)
        rates.append(load.streams * load.tokens / seconds)
        per_token.append((cpu_s(pid) - begun) * 1e6 / (load.streams * load.tokens))
    return Costs(cpu_ms_per_request=per_request, cpu_us_per_token=per_token, tokens_s=rates)


async def _ready(name: str, address: str) -> None:
    """Its workers are looked for in the background, and until then it answers with errors."""
    reason = "nobody listens"
    try:
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    await stream(address, prompt_of(-9), 1, MODEL)
                    return
                except (OSError, InternalError) as error:
                    reason = str(error)
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise PeerMissing(f"{name} served nothing within {READY_S:g} s: {reason[:200]}") from None


def cpu_s(pid: int) -> float:
    """Of a process and those that it started."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))
