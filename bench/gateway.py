"""What a router costs: the latency that it adds, and how fast it relays tokens, over HTTP and over gRPC.

`python -m bench.gateway [--json] [--peers NAMES]`

Router, workers and clients are three processes. The workers compute nothing. Latency: one request at a time, from the
first byte of the request to the first byte of the first token, less the same two questions asked of the workers
directly. Throughput: 64 event streams at once, whose clients throw away what they read. Other systems' routers
(`make bench-peers`) get the same load, with workers that compute nothing either.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click
import grpc
import uvloop

from bench.gateway_client import prompt_of, stream
from bench.gateway_peers import GATEWAYS, Load, cpu_s, measure_peers
from bench.local_system import ready_line, spawn
from bench.report import Goal, Report, median_spread
from cluster.config import default_model_dir
from engine.block_hash import pack_tokens
from engine.model_store import pull_model
from kvrelay import AsyncClient
from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

GOALS = (Goal("added_ms_p50", "<=", 2.0), Goal("relay_tokens_s", ">=", 100_000.0))
STREAMS = 64
TOKENS = 1000
"""Of each stream."""
LATENCY_RUNS = 300
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class System:
    http: str
    grpc: str
    workers: dict[str, str]
    router_pid: int

    def cpu_s(self) -> float:
        return cpu_s(self.router_pid)


class Direct:
    """The router's two questions, asked of the workers without a router."""

    def __init__(self, system: System) -> None:
        self._channels = {role: grpc.aio.insecure_channel(address) for role, address in system.workers.items()}
        self._calls = {role: worker_pb2_grpc.WorkerStub(channel).Session() for role, channel in self._channels.items()}

    async def open(self) -> None:
        hello = worker_pb2.SessionRequest(hello=worker_pb2.Hello(protocol=PROTOCOL_VERSION, router_id="direct"))
        for role, call in self._calls.items():
            await call.write(hello)
            await self._answer(role, "welcome")

    async def ask(self, number: int, token_ids: bytes) -> float:
        """Seconds from Reserve to the first token."""
        request_id = f"direct-{number}"
        reserve = worker_pb2.Reserve(request_id=request_id, token_ids=token_ids)
        prefill = worker_pb2.Prefill(request_id=request_id, token_ids=token_ids)
        reserve.sampling.max_tokens = prefill.sampling.max_tokens = 1
        began = time.perf_counter()
        await self._calls["decode"].write(worker_pb2.SessionRequest(reserve=reserve))
        await self._answer("decode", "reserved")
        await self._calls["prefill"].write(worker_pb2.SessionRequest(prefill=prefill))
        await self._answer("prefill", "prefilled")
        return time.perf_counter() - began

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _answer(self, role: str, kind: str) -> None:
        async with asyncio.timeout(10):
            while cast(worker_pb2.SessionResponse, await self._calls[role].read()).WhichOneof("message") != kind:
                pass


async def measure_latency(system: System, report: Report) -> None:
    direct, token_ids = Direct(system), pack_tokens(range(100, 200))
    await direct.open()
    whole, floor, begun = [], [], system.cpu_s()
    for number in range(LATENCY_RUNS):
        began, reader = await stream(system.http, prompt_of(number), 1)
        whole.append((reader.first - began) * 1000)
        floor.append(await direct.ask(number, token_ids) * 1000)
    cpu_ms = (system.cpu_s() - begun) * 1000 / LATENCY_RUNS
    await direct.close()
    added = [one - statistics.median(floor) for one in whole]
    report.figures["added_ms_p50"] = statistics.median(added)
    report.figures["added_ms_p90"] = statistics.quantiles(added, n=10)[-1]
    report.figures["router_cpu_ms_per_request"] = cpu_ms
    report.notes.append(
        f"first token {median_spread(whole)} ms through the router, {median_spread(floor)} ms without; "
        f"{LATENCY_RUNS} requests, a new connection each"
    )


async def measure_throughput(system: System, report: Report) -> None:
    rates, cpu_us, per_event = [], [], []
    for turn in range(ROUNDS):
        prompts = [prompt_of(10_000 + turn * STREAMS + i) for i in range(STREAMS)]
        begun_cpu = system.cpu_s()
        results = await asyncio.gather(*(stream(system.http, prompt, TOKENS) for prompt in prompts))
        seconds = time.perf_counter() - min(reader.first for _, reader in results)
        rates.append(STREAMS * TOKENS / seconds)
        cpu_us.append((system.cpu_s() - begun_cpu) * 1e6 / (STREAMS * TOKENS))
        per_event.append(STREAMS * TOKENS / sum(reader.num_events for _, reader in results))
    report.figures["relay_tokens_s"] = statistics.median(rates)
    report.figures["router_cpu_us_per_token"] = statistics.median(cpu_us)
    report.figures["tokens_per_event"] = statistics.median(per_event)
    report.notes.append(f"relay_tokens_s {median_spread(rates)} over {ROUNDS} rounds of {STREAMS} x {TOKENS} tokens")


async def measure_grpc(system: System, report: Report) -> None:
    rates = []
    async with AsyncClient(system.grpc, timeout_s=120.0) as client:

        async def one(prompt: str) -> None:
            async with client.stream(prompt, max_tokens=TOKENS, ignore_eos=True) as chunks:
                async for _ in chunks:
                    pass

        for turn in range(ROUNDS):
            began = time.perf_counter()
            await asyncio.gather(*(one(prompt_of(20_000 + turn * STREAMS + i)) for i in range(STREAMS)))
            rates.append(STREAMS * TOKENS / (time.perf_counter() - began))
    report.figures["grpc_relay_tokens_s"] = statistics.median(rates)
    report.notes.append("grpc_relay_tokens_s includes our Python client, which shares the cores with the router")


async def workers_ready(system: System) -> None:
    async with AsyncClient(system.grpc, timeout_s=10.0) as client, asyncio.timeout(30):
        while {worker.state for worker in (await client.status()).workers} != {"ready"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def measure(system: System, report: Report) -> None:
    await workers_ready(system)
    await asyncio.gather(*(stream(system.http, prompt_of(-1 - i), 8) for i in range(8)))  # warm
    await measure_latency(system, report)
    await measure_throughput(system, report)
    await measure_grpc(system, report)


def run(folder: Path, report: Report, peers: Sequence[str] = ()) -> None:
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        workers = ready_line(spawn(stack, log, "bench.gateway_worker", [str(folder)]), log)
        flags: Sequence[str] = [flag for address in workers.values() for flag in ("--worker", address)]
        router = spawn(stack, log, "router", ["--model", str(folder), "--local-prefill-max-tokens", "0", *flags])
        ready = ready_line(router, log)
        system = System(ready["http_address"], ready["address"], workers, router.pid)
        uvloop.run(measure(system, report))
    load = Load(latency_runs=LATENCY_RUNS, rounds=ROUNDS, streams=STREAMS, tokens=TOKENS)
    measure_peers(peers, load, report)


@click.command(help="Latency that a router adds, and tokens that it relays.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--peers", default=",".join(GATEWAYS), show_default=True, help="Of `bench.peers`, with commas.")
@click.option("--model", default="smollm2-135m", show_default=True, help="Its tokenizer is used, not its weights.")
def main(as_json: bool, peers: str, model: str) -> None:
    names = [name for name in peers.split(",") if name]
    if unknown := set(names) - set(GATEWAYS):
        raise click.BadParameter(f"must be of {', '.join(GATEWAYS)}, got {', '.join(sorted(unknown))}")
    report = Report("gateway", GOALS)
    run(pull_model(model, default_model_dir(), lambda _stage, _share: None), report, names)
    report.print(as_json)


if __name__ == "__main__":
    main()
