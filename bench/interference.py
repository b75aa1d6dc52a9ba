"""What do long prompts do to streams that are being decoded? Split workers, one worker that does both, and vLLM.

`python -m bench.interference [--json] [--seconds N] [--peers vllm]`

Four streams decode all the time, each after a prompt of 128 tokens; then prompts of 2,048 tokens arrive on a clock as
well, 16 tokens of output each. All systems get the same clock: a prompt each time that the prefill worker, which does
nothing else, would need 70 % of. Clients read events over HTTP; a gap is the time between two events of one stream.

split: a prefill and a decode worker of one thread, each on a core of its own; router and client share the prefill
  worker's. colocated: one worker of ours with two threads and chunked prefill; nothing is pinned. vllm: its server.
itl_p99_loaded_over_idle: 99th percentile of the gaps with long prompts over that without, of the split system.
itl_p99_colocated_over_split: the same percentile, loaded, of the colocated worker over that of the split system.
ttft_p50_ms, ttft_p50_colocated_ms: from a long prompt's sending to its first token. What splitting costs: a prompt gets
  one core where the colocated worker gives it two.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import aiohttp
import click

from bench.gateway_peers import free_ports
from bench.local_system import ready_line, spawn, stop_process
from bench.peers import ENVIRONMENTS, PeerMissing, fastest_dtype
from bench.report import Goal, Report
from cluster.config import default_model_dir, native_dir
from engine.errors import InternalError
from engine.model_store import resolve_model

GOALS = (
    Goal("itl_p99_loaded_over_idle", "<=", 1.3),
    Goal("itl_p99_colocated_over_split", ">=", 4.0),
)
STREAMS, STREAM_PROMPT, STREAM_OUTPUT = 4, 128, 500
LONG_PROMPT, LONG_OUTPUT = 2048, 16
LOAD = 0.7
VOCABULARY = range(100, 30_000)
REQUEST_S = 120.0
VLLM_READY_S = 400.0


@dataclass(slots=True)
class Measured:
    """Milliseconds."""

    idle: list[float] = field(default_factory=list)
    """Gaps between events of the streams, without long prompts."""
    loaded: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    """Of long prompts that were answered before the end."""
    sent: int = 0
    """Long prompts."""


class Load:
    """What a client asks one server for."""

    def __init__(self, address: str, model: str, session: aiohttp.ClientSession) -> None:
        self._url, self._model, self._session = f"http://{address}/v1/completions", model, session
        self._dice = random.Random(0)

    async def events(self, prompt_tokens: int, output: int) -> AsyncIterator[float]:
        """When each event of one completion came. Raises `InternalError` if the server refuses."""
        body = {
            "model": self._model,
            "prompt": self._dice.choices(VOCABULARY, k=prompt_tokens),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise InternalError(f"{self._url} answers {answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise InternalError(f"{self._url}: {line[:200]!r}")
                    yield time.perf_counter()

    async def ttft_s(self, prompt_tokens: int, output: int) -> float:
        began, first = time.perf_counter(), 0.0
        async for at in self.events(prompt_tokens, output):
            first = first or at
        return first - began

    async def stream(self, gaps: list[float]) -> None:
        """One after the other, for ever."""
        while True:
            before = 0.0
            async for at in self.events(STREAM_PROMPT, STREAM_OUTPUT):
                if before:
                    gaps.append((at - before) * 1000)
                before = at

    async def decode(self, seconds: float, gaps: list[float], interval_s: float, measured: Measured) -> None:
        """`STREAMS` streams, and with an interval long prompts, for so long; then all of it is given up."""
        streams = [asyncio.create_task(self.stream(gaps)) for _ in range(STREAMS)]
        arrivals = [asyncio.create_task(self._arrivals(interval_s, measured))] if interval_s else []
        done, running = await asyncio.wait({*streams, *arrivals}, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        for task in done:
            task.result()

    async def _arrivals(self, interval_s: float, measured: Measured) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._long_prompt(measured))
                await asyncio.sleep(interval_s)

    async def _long_prompt(self, measured: Measured) -> None:
        measured.sent += 1
        measured.ttft.append(await self.ttft_s(LONG_PROMPT, LONG_OUTPUT) * 1000)


async def measure(address: str, model: str, seconds: float, interval_s: float) -> tuple[Measured, float]:
    """Also returns the interval, which is worked out here if it is 0: seconds for a long prompt alone, over `LOAD`."""
    measured = Measured()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Load(address, model, session)
        await load.ttft_s(STREAM_PROMPT, 8)  # the first steps of a process are no measure of it
        if not interval_s:
            times = [await load.ttft_s(LONG_PROMPT, 1) for _ in range(2)]
            interval_s = min(times) / LOAD
        await load.decode(seconds / 2, measured.idle, 0.0, measured)
        await load.decode(seconds, measured.loaded, interval_s, measured)
    return measured, interval_s


@contextmanager
def on_cores(cores: set[int] | None) -> Iterator[None]:
    """This thread, and processes that it starts meanwhile, on these cores; None: as before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def ours(folder: Path, workers: Sequence[tuple[str, set[int] | None]], near: set[int] | None) -> Iterator[str]:
    """Workers of these roles on these cores, and a router; the address of its HTTP front."""
    with ExitStack() as stack:
        log: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+"))
        flags = ["--model", str(folder), "--native-cache", str(native_dir())]
        addresses = []
        for role, cores in workers:
            threads = ["--threads", str(len(cores or os.sched_getaffinity(0)))]
            with on_cores(cores):
                addresses.append(ready_line(spawn(stack, log, role, [*flags, *threads]), log)["address"])
        with on_cores(near):
            flags = [flag for address in addresses for flag in ("--worker", str(address))]
            router = spawn(stack, log, "router", ["--model", str(folder), "--port", "0", *flags])
            yield str(ready_line(router, log)["http_address"])


@contextmanager
def vllm(folder: Path, cores: Sequence[int]) -> Iterator[str]:
    """Its server on these cores. Raises `PeerMissing` if it is not installed, or is not ready in time."""
    python = ENVIRONMENTS / "vllm" / "bin" / "python"
    if not python.exists():
        raise PeerMissing("vllm is not installed (make bench-peers)")
    (port,) = free_ports(1)
    flags = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", fastest_dtype()]
    flags += ["--max-model-len", "4096", "--no-enable-prefix-caching"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
    }
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags]
        server = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)
        stack.callback(stop_process, server)
        asyncio.run(_ready(f"http://127.0.0.1:{port}/health", server))
        yield f"127.0.0.1:{port}"


async def _ready(url: str, server: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + VLLM_READY_S
    async with aiohttp.ClientSession() as session:
        while server.poll() is None and time.monotonic() < give_up:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # nobody listens yet
            await asyncio.sleep(0.5)
    raise PeerMissing(f"vllm's server was not ready within {VLLM_READY_S:g} s")


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def summarize(report: Report, measured: dict[str, Measured], interval_s: float) -> None:
    for name, one in measured.items():
        end = "" if name == "split" else f"_{name}"
        report.figures |= {
            f"itl_p50_idle{end}_ms": statistics.median(one.idle),
            f"itl_p99_idle{end}_ms": p99(one.idle),
            f"itl_p50_loaded{end}_ms": statistics.median(one.loaded),
            f"itl_p99_loaded{end}_ms": p99(one.loaded),
            f"itl_max_loaded{end}_ms": max(one.loaded),
            f"ttft_p50{end}_ms": statistics.median(one.ttft) if one.ttft else float("inf"),
        }
        report.notes.append(
            f"{name}: {len(one.idle)} and {len(one.loaded)} gaps; {len(one.ttft)} of {one.sent} long prompts answered"
        )
    split = measured["split"]
    report.figures["interval_s"] = interval_s
    report.figures["itl_p99_loaded_over_idle"] = p99(split.loaded) / p99(split.idle)
    for name in measured.keys() - {"split"}:
        report.figures[f"itl_p99_{name}_over_split"] = p99(measured[name].loaded) / p99(split.loaded)
        for figure in ("itl_p99_loaded", "ttft_p50"):
            report.peers.setdefault(f"{figure}_ms", report.figures[f"{figure}_{name}_ms"])


@click.command(help="Gaps of decoding streams while long prompts arrive: split, colocated, and peers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="Of load on each system.")
@click.option("--peers", default="vllm", show_default=True, help="vllm, or nothing.")
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, seconds: float, peers: str, model: str) -> None:
    report = Report("interference", GOALS)
    folder = resolve_model(model, default_model_dir())
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise click.ClickException("two cores are needed: one for each worker")
    first, second = {cores[0]}, {cores[1]}
    measured: dict[str, Measured] = {}
    with ours(folder, [("prefill_worker", first), ("decode_worker", second)], first) as address, on_cores(first):
        measured["split"], interval_s = asyncio.run(measure(address, folder.name, seconds, 0.0))
    with ours(folder, [("decode_worker", None)], None) as address:
        measured["colocated"], _ = asyncio.run(measure(address, folder.name, seconds, interval_s))
    if peers == "vllm":
        try:
            with vllm(folder, cores[:2]) as address:
                measured["vllm"], _ = asyncio.run(measure(address, str(folder), seconds, interval_s))
        except PeerMissing as missing:
            report.notes.append(f"vllm was not measured: {missing}")
    summarize(report, measured, interval_s)
    report.print(as_json)


if __name__ == "__main__":
    main()
