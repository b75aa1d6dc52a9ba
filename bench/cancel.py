"""Cancel storms: how soon is everything of a cancelled request free, and is anything left?

`python -m bench.cancel [--json] [--quick] [--requests 1000]`

Waves of requests at a router with one prefill and one decode worker, each a process. Each is cancelled at a random
point (queued, reserving, prefill, transfer, decode, and a random moment more) in a random way: by its id, by its call,
with its channel, by resetting an HTTP connection, by its deadline. Between router and workers sits a `SessionTap`,
which hears each worker's last word on each request. In every wave two requests are left alone; their tokens must be
those of an engine by itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

import click
import uvloop

from bench.local_system import ready_line, spawn
from bench.report import Goal, Report, median_spread
from bench.session_tap import RequestLog, Seen, SessionTap, Stage
from cluster.config import default_model_dir, native_dir
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import EngineError
from engine.model_store import resolve_model
from engine.request import Request
from engine.sampling_params import SamplingParams
from kvrelay import AsyncClient
from kvrelay.types import ClusterStatus
from worker.engine_builder import build_engine

ROLES = ("decode", "prefill")
WAYS = ("id", "call", "channel", "http", "deadline")
BOUND_S = 120.0
SETTLE_S = 20.0
POLL_S = 0.005
STALL_TICK_S = 0.02
FREE_MS = 250.0
CHUNK = SchedulerConfig().max_num_batched_tokens
VOCABULARY = range(100, 500)
SHORTEST, OUTPUT, CONTROL_OUTPUT = 16, 400, 16
Prompt: TypeAlias = tuple[int, ...]
Output: TypeAlias = tuple[int, ...]
CONTROL_PROMPTS = (40, 400)
"""Computed by the decode worker, and split."""


@dataclass(frozen=True, slots=True)
class Load:
    waves: int = 10
    per_wave: int = 100
    longest: int = 1024
    dtype: str = "bfloat16"


QUICK = Load(waves=2, per_wave=30, longest=256)


@dataclass(slots=True)
class System:
    grpc: str
    http: str
    client: AsyncClient
    log: RequestLog


@dataclass(slots=True)
class Cancelled:
    request_id: str
    way: str
    at: float
    stage: Stage
    """How far it was."""


@dataclass(slots=True)
class Storm:
    """What came of all waves."""

    cancelled: list[Cancelled] = field(default_factory=list)
    not_cancelled: Counter[str] = field(default_factory=Counter)
    """Requests that had ended before, by how."""
    chunk_ms: list[float] = field(default_factory=list)
    wrong: int = 0
    stall_ms: float = 0.0
    """For which this process did not run, at worst: what it measures is off by so much."""

    async def watch_own_stalls(self) -> None:
        """Until cancelled."""
        while True:
            slept = time.perf_counter()
            await asyncio.sleep(STALL_TICK_S)
            self.stall_ms = max(self.stall_ms, (time.perf_counter() - slept - STALL_TICK_S) * 1000)


class StormRequest:
    """One request and its cancellation, both drawn from `rng`."""

    def __init__(self, system: System, name: str, rng: random.Random, load: Load) -> None:
        length = round(SHORTEST * (load.longest / SHORTEST) ** rng.random())
        self._system, self._name, self._prompt = system, name, rng.choices(VOCABULARY, k=length)
        self._way, self._point, self._pause_s = rng.choice(WAYS), rng.choice(list(Stage)), rng.random() * 0.05
        self._timeout_s = rng.uniform(0.02, 3.0) if self._way == "deadline" else BOUND_S

    async def run(self, storm: Storm) -> None:
        seen, begun = self._system.log.of(self._name), time.perf_counter()
        async with AsyncExitStack() as stack:
            client, writer = self._system.client, None
            if self._way == "channel":
                client = await stack.enter_async_context(AsyncClient(self._system.grpc))
            if self._way == "http":
                reader, writer = await asyncio.open_connection(*self._system.http.split(":"))
                running = asyncio.create_task(read_http(reader, writer, self._name, self._prompt))
            else:
                running = asyncio.create_task(read_grpc(client, self._name, self._prompt, self._timeout_s))
            if self._way == "deadline":
                outcome = await running
                at, stage = begun + self._timeout_s, seen.stage
                over = outcome != "DeadlineExceeded"
            else:
                over = await self._over_before_the_point(running, seen)
                at, stage = time.perf_counter(), seen.stage
                if not over and not await self._cancel(client, writer, running):
                    storm.not_cancelled["cancelled too early"] += 1
                    return
            if over:
                storm.not_cancelled[running.result()] += 1
            else:
                storm.cancelled.append(Cancelled(self._name, self._way, at, stage))

    async def _over_before_the_point(self, running: asyncio.Task[str], seen: Seen) -> bool:
        reached = asyncio.create_task(seen.reach(self._point))
        await asyncio.wait({running, reached}, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        await asyncio.wait({running}, timeout=self._pause_s)
        return running.done()

    async def _cancel(
        self, client: AsyncClient, writer: asyncio.StreamWriter | None, running: asyncio.Task[str]
    ) -> bool:
        """Returns whether the router knew the request: a cancellation by id may overtake it."""
        found = True
        if writer is not None:
            writer.transport.abort()
        elif self._way == "id":
            found = await client.cancel(self._name)
        elif self._way == "channel":
            await client.aclose()
        if self._way == "call" or not found:
            running.cancel()
        await asyncio.wait({running}, timeout=BOUND_S)
        return found


async def read_grpc(client: AsyncClient, name: str, prompt: Sequence[int], timeout_s: float) -> str:
    """Returns how the answer ended."""
    try:
        async with client.stream(
            prompt_token_ids=prompt,
            request_id=name,
            max_tokens=OUTPUT,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=timeout_s,
        ) as chunks:
            async for _ in chunks:
                pass
    except EngineError as error:
        return type(error).__name__
    return "finished"


async def read_http(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, prompt: Sequence[int]
) -> str:
    fields = {"prompt": list(prompt), "max_tokens": OUTPUT, "stream": True, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nX-Request-Id: {name}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = b""
    with suppress(ConnectionError):  # ours, when we reset it
        while piece := await reader.read(1 << 16):
            answer = (answer + piece)[-200:]
    return "finished" if b"[DONE]" in answer else "HTTP error"


async def wave(system: System, number: int, load: Load, storm: Storm, oracle: Mapping[Prompt, Output]) -> None:
    rng = random.Random(number)
    prompts = control_prompts(number)
    async with asyncio.TaskGroup() as tasks:
        for index in range(load.per_wave):
            request = StormRequest(system, f"storm-{number}-{index}", rng, load)
            tasks.create_task(request.run(storm))
        controls = [
            tasks.create_task(
                system.client.generate(
                    prompt_token_ids=prompt, max_tokens=CONTROL_OUTPUT, temperature=0.0, ignore_eos=True
                )
            )
            for prompt in prompts
        ]
    storm.wrong += sum(
        task.result().token_ids != oracle[prompt] for task, prompt in zip(controls, prompts, strict=True)
    )


async def settle(system: System) -> ClusterStatus:
    """Wait until nothing is live and every block is free or cached. Returns what is so after `SETTLE_S` otherwise."""
    give_up = time.perf_counter() + SETTLE_S
    while True:
        status = await system.client.status()
        if not survivors(system, status) + leaked_blocks(status) or time.perf_counter() > give_up:
            return status
        await asyncio.sleep(POLL_S)


def survivors(system: System, status: ClusterStatus) -> int:
    """At the router, at workers as they report it, and by their last words: a request counts up to three times."""
    theres = sum(worker.running + worker.waiting for worker in status.workers)
    return status.live_requests + theres + system.log.num_live


def leaked_blocks(status: ClusterStatus) -> int:
    return sum(worker.blocks_total - worker.blocks_free - worker.blocks_cached for worker in status.workers)


def control_prompts(number: int) -> list[Prompt]:
    """Of one wave; new ones in each, so that they are computed and not found."""
    rng = random.Random(f"control {number}")
    return [tuple(rng.choices(VOCABULARY, k=length)) for length in CONTROL_PROMPTS]


def ask_oracle(folder: Path, load: Load) -> dict[Prompt, Output]:
    """What an engine of its own says to every control prompt."""
    config = EngineConfig(
        model_path=str(folder), dtype=load.dtype, kv_memory_bytes=256 << 20, native_cache=str(native_dir())
    )
    parts = build_engine(config)
    params = SamplingParams(max_tokens=CONTROL_OUTPUT, temperature=0.0, ignore_eos=True)
    outputs: dict[Prompt, list[int]] = {prompt: [] for n in range(load.waves) for prompt in control_prompts(n)}
    try:
        for number, prompt in enumerate(outputs):
            request = Request(
                request_id=str(number),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                scope=b"",
                arrival=time.perf_counter(),
            )
            parts.engine.submit(request)
        said = list(outputs.values())
        while parts.engine.has_work():
            for update in parts.engine.step().updates:
                if update.token is not None:
                    said[int(update.request_id)].append(update.token.token_id)
    finally:
        parts.kv.close()
    return {prompt: tuple(output) for prompt, output in outputs.items()}


async def measure(system: System, load: Load, report: Report, oracle: Mapping[Prompt, Output]) -> None:
    async with asyncio.timeout(BOUND_S):
        while {worker.state for worker in (await system.client.status()).workers} != {"ready"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for prompt in control_prompts(-1):  # the first steps of a process are no measure of it
        await system.client.generate(prompt_token_ids=prompt, max_tokens=CONTROL_OUTPUT, ignore_eos=True)
    storm = Storm()
    watch = asyncio.create_task(storm.watch_own_stalls())
    for number in range(load.waves):
        await wave(system, number, load, storm, oracle)
        status = await settle(system)
        rates = [worker.prefill_tokens_per_s for worker in status.workers if worker.role == "prefill"]
        storm.chunk_ms += [CHUNK / rate * 1000 for rate in rates if rate]
    watch.cancel()
    summarize(storm, system.log, report)
    report.figures["leaked_blocks"] = leaked_blocks(status)
    report.figures["survivors"] = survivors(system, status)


def summarize(storm: Storm, log: RequestLog, report: Report) -> None:
    freed = {one.request_id: (log.of(one.request_id).ended_at - one.at) * 1000 for one in storm.cancelled}
    held = [one for one in storm.cancelled if freed[one.request_id] > 0]
    times = [freed[one.request_id] for one in held]
    chunk_ms = statistics.median(storm.chunk_ms)
    report.figures |= {
        "requests": len(storm.cancelled) + storm.not_cancelled.total(),
        "cancelled": len(storm.cancelled),
        "cancelled_at_workers": len(held),
        "cancel_to_free_ms_p50": statistics.median(times),
        "cancel_to_free_ms_p99": statistics.quantiles(times, n=100, method="inclusive")[98],
        "cancel_to_free_ms_max": max(times),
        "chunk_ms": chunk_ms,
        "step_ms_p99": statistics.quantiles(log.step_ms, n=100, method="inclusive")[98],
        "control_wrong": storm.wrong,
    }
    report.goals = (
        Goal("cancel_to_free_ms_p99", "<=", max(FREE_MS, 2 * chunk_ms)),
        Goal("leaked_blocks", "==", 0),
        Goal("survivors", "==", 0),
        Goal("control_wrong", "==", 0),
    )
    report.notes.append(f"this process stood still for {storm.stall_ms:.0f} ms at worst")
    report.notes.append(f"chunk_ms: {CHUNK} tokens at the rate that the prefill worker measured in the storm")
    report.notes.append(
        f"step_ms: of the decode worker, decoding and a chunk together: {median_spread(log.step_ms)}; a step is broken "
        "off where that pays for the rest of its batch"
    )
    for stage in Stage:
        _note(report, stage.name.lower(), [freed[one.request_id] for one in held if one.stage is stage])
    for way in WAYS:
        _note(report, f"by {way}", [freed[one.request_id] for one in held if one.way == way])
    for role in ROLES:
        _note_worker(report, role, [(one.at, log.of(one.request_id)) for one in held])
    slowest = sorted(held, key=lambda one: -freed[one.request_id])[:5]
    described = ", ".join(
        f"{freed[one.request_id]:.0f} ms ({one.stage.name.lower()}, {one.way}, {log.of(one.request_id).last_role} last)"
        for one in slowest
    )
    report.notes.append(f"slowest: {described}")
    ended = ", ".join(f"{count} {how}" for how, count in storm.not_cancelled.most_common()) or "none"
    report.notes.append(
        f"{len(storm.cancelled) - len(held)} were cancelled before a worker had anything of them; over before: {ended}"
    )


def _note(report: Report, what: str, times: Sequence[float]) -> None:
    if times:
        report.notes.append(f"{what}: {len(times)} cancelled, free after {median_spread(times)} ms")


def _note_worker(report: Report, role: str, cancelled: Sequence[tuple[float, Seen]]) -> None:
    """How long its word took to a worker, and how long that took then: the rest of the step that it was in."""
    told = [(at, seen.told_at[role], seen.freed_at[role]) for at, seen in cancelled if seen.heard_last(role)]
    if told:
        to_worker = [(told_at - at) * 1000 for at, told_at, _ in told]
        there = [(freed_at - told_at) * 1000 for _, told_at, freed_at in told]
        report.notes.append(
            f"{role} worker: {len(told)} told after {median_spread(to_worker)}, free {median_spread(there)} ms later"
        )


async def serve(folder: Path, workers: Sequence[str], stack: ExitStack, log: IO[str]) -> Mapping[str, str]:
    """A router over `workers`; its ready line."""
    flags = [flag for address in workers for flag in ("--worker", address)]
    router = spawn(stack, log, "router", ["--model", str(folder), *flags])
    return await asyncio.to_thread(ready_line, router, log)


async def storm_over(folder: Path, load: Load, report: Report, oracle: Mapping[Prompt, Output]) -> None:
    requests = RequestLog()
    async with AsyncExitStack() as taps:
        with ExitStack() as stack:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            flags = ["--model", str(folder), "--dtype", load.dtype, "--native-cache", str(native_dir())]
            workers = {role: spawn(stack, log, f"{role}_worker", flags) for role in ROLES}
            addresses = []
            for role, worker in workers.items():
                ready = await asyncio.to_thread(ready_line, worker, log)
                tap = SessionTap(ready["address"], role, requests)
                taps.push_async_callback(tap.stop)
                addresses.append(await tap.start())
            router = await serve(folder, addresses, stack, log)
            async with AsyncClient(router["address"], timeout_s=BOUND_S) as client:
                system = System(router["address"], router["http_address"], client, requests)
                await measure(system, load, report, oracle)


def run(folder: Path, load: Load, report: Report) -> None:
    oracle = ask_oracle(folder, load)
    uvloop.run(storm_over(folder, load, report, oracle))


@click.command(help="Requests cancelled at random points: when all of them is free, and what is left.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--quick", is_flag=True, help="60 short requests.")
@click.option("--requests", type=click.IntRange(min=100), default=1000, show_default=True, help="In waves of 100.")
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, quick: bool, requests: int, model: str) -> None:
    report = Report("cancel")
    load = QUICK if quick else Load(waves=requests // Load().per_wave)
    run(resolve_model(model, default_model_dir()), load, report)
    report.print(as_json)


if __name__ == "__main__":
    main()
