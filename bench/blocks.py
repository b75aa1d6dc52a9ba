"""What do scheduler and block manager cost, what do they waste, and how many requests does a pool hold?

`python -m bench.blocks [--json] [--rounds N]`

alloc_ops_s: calls a second that give a request its blocks, give it room for one more token, or free them.
lookup_ops_s: prompts of 1,024 tokens a second whose blocks are hashed and found in the prefix cache.
  Beside both the same work by the baseline (`bench.naive_blocks`) in turns, and by vLLM where it is installed.
step_us_per_sequence: scheduler and block manager together, for each running sequence and step, at 64 sequences.
waste_percent: of the slots that running requests hold, those without a token, averaged over all steps in which the
  recorded conversations of Azure go through a pool; a prompt's slots are not wasted while it is being computed.
waste_over_bound: the same in blocks for each running request, over the bound of half a block.
requests_ratio_contiguous: requests that run at once in that pool while others wait, over those that would if each had
  memory for the longest request (16,384 tokens) in one piece.
growth_ratio_static: output rate with learnt growth over that with the best static reserve, the worst of some pools.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import track

from bench.naive_blocks import NaiveBlockManager, NaiveSequence
from bench.peers import PeerMissing, ask
from bench.report import Goal, Report, median_spread
from bench.scheduler_load import (
    BLOCK_SIZE,
    IDENTITY,
    VOCABULARY,
    Job,
    Load,
    StaticGrowth,
    azure_conversations,
    simulate,
)
from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.config import CacheConfig
from engine.request import Request
from engine.sampling_params import SamplingParams

GOALS = (
    Goal("waste_percent", "<=", 4.0),
    Goal("waste_over_bound", "<=", 0.1),
    Goal("requests_ratio_contiguous", ">=", 3.0),
    Goal("step_us_per_sequence", "<=", 50.0),
    Goal("growth_ratio_static", ">=", 0.95),
)
T = TypeVar("T")

NUM_SEQUENCES = 64
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
LOOKUP_TOKENS = 1024
LONGEST_REQUEST = 16_384
"""Prompt and output; the longest recorded one has 14,089 tokens."""
AZURE_POOL_TOKENS = 131_072
AZURE_MAX_TOKENS = 2_048
"""Asked for by each request; the longest recorded output has 992."""
STATIC_RESERVES = (1, 32, 64, 128, 256, 512, 1024)


@click.command(help="Block manager and scheduler: operations a second, waste, and requests that fit.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--rounds", type=int, default=7, show_default=True, help="Repetitions of each timing.")
@click.option("--conversations", type=int, default=1500, show_default=True, help="Of the recorded ones.")
def main(as_json: bool, rounds: int, conversations: int) -> None:
    report = Report("blocks", GOALS)
    time_block_operations(report, rounds)
    time_steps(report, rounds)
    recorded = azure_conversations(AZURE_MAX_TOKENS)[:conversations]
    measure_waste(report, recorded)
    compare_growth(report, recorded)
    report.print(as_json)


def time_block_operations(report: Report, rounds: int) -> None:
    ours: dict[str, list[float]] = {"alloc_ops_s": [], "lookup_ops_s": []}
    naive: dict[str, list[float]] = {"alloc_ops_s": [], "lookup_ops_s": []}
    for number in _progress(range(rounds), "block operations"):
        dice = random.Random(number)
        prompts = [_tokens(dice, PROMPT_TOKENS) for _ in range(NUM_SEQUENCES)]
        outputs = [_tokens(dice, OUTPUT_TOKENS) for _ in range(NUM_SEQUENCES)]
        ours["alloc_ops_s"].append(_our_operations(prompts, outputs))
        naive["alloc_ops_s"].append(_naive_operations(prompts, outputs))
        long_prompts = [_tokens(dice, LOOKUP_TOKENS) for _ in range(NUM_SEQUENCES)]
        ours["lookup_ops_s"].append(_our_lookups(long_prompts))
        naive["lookup_ops_s"].append(_naive_lookups(long_prompts))
    vllm = _vllm_operations(rounds, report)
    for name in ours:
        report.figures[name] = statistics.median(ours[name])
        report.peers[name] = statistics.median(vllm.get(name, naive[name]))
        report.notes.append(f"{name}: {median_spread(ours[name])}; baseline {median_spread(naive[name])}")
        if name in vllm:
            report.notes.append(f"{name}: vLLM {median_spread(vllm[name])}")
    report.notes.append(
        "baseline: bench.naive_blocks, written after nano-vllm's block manager; it hashes with xxh64, ours with SHA-256"
    )


def _vllm_operations(rounds: int, report: Report) -> dict[str, list[float]]:
    """vLLM's block manager, hashing with SHA-256 too, at the same work, right after ours; empty if it is not there."""
    sizes = (NUM_SEQUENCES, PROMPT_TOKENS, OUTPUT_TOKENS, LOOKUP_TOKENS, BLOCK_SIZE, VOCABULARY)
    found: dict[str, list[float]] = {}
    try:
        for number in _progress(range(rounds), "vLLM's block operations"):
            for name, value in ask("vllm", "vllm_blocks.py", [str(number), *map(str, sizes)]).items():
                found.setdefault(name, []).append(value)
    except PeerMissing as missing:
        report.notes.append(f"vLLM's block manager was not measured: {missing}")
        return {}
    return found


def _our_operations(prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> float:
    tables = _new_tables()
    requests = [_request(prompt, OUTPUT_TOKENS + 1) for prompt in prompts]

    def work() -> None:
        for request in requests:
            plan = tables.plan(request)
            tables.hold(plan)
            tables.fill(plan)
            request.num_computed_tokens = PROMPT_TOKENS
            tables.publish(request)
        for i in range(OUTPUT_TOKENS):
            for request, output in zip(requests, outputs, strict=True):
                request.token_ids.append(output[i])
                tables.grow(request)
                request.num_computed_tokens += 1
                tables.publish(request)
        for request in requests:
            tables.free(request)

    return len(requests) * (OUTPUT_TOKENS + 2) / _seconds(work)


def _naive_operations(prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> float:
    manager = NaiveBlockManager(_pool_blocks(), BLOCK_SIZE)
    sequences = [NaiveSequence(list(prompt)) for prompt in prompts]

    def work() -> None:
        for sequence in sequences:
            manager.allocate(sequence)
        for i in range(OUTPUT_TOKENS):
            for sequence, output in zip(sequences, outputs, strict=True):
                sequence.token_ids.append(output[i])
                manager.append(sequence)
        for sequence in sequences:
            manager.free(sequence)

    return len(sequences) * (OUTPUT_TOKENS + 2) / _seconds(work)


def _our_lookups(prompts: Sequence[list[int]]) -> float:
    tables = _new_tables()
    for prompt in prompts:
        request = _request(prompt, 1)
        plan = tables.plan(request)
        tables.hold(plan)
        tables.fill(plan)
        request.num_computed_tokens = len(prompt)
        tables.publish(request)
        tables.free(request)
    again = [_request([*prompt, 1], 1) for prompt in prompts]
    found: list[int] = []
    seconds = _seconds(lambda: found.extend(len(tables.plan(request).cached) for request in again))
    assert found == [LOOKUP_TOKENS // BLOCK_SIZE] * len(prompts)
    return len(again) / seconds


def _naive_lookups(prompts: Sequence[list[int]]) -> float:
    manager = NaiveBlockManager(_pool_blocks(), BLOCK_SIZE)
    for prompt in prompts:
        sequence = NaiveSequence(list(prompt))
        manager.allocate(sequence)
        manager.free(sequence)
    found: list[int] = []
    seconds = _seconds(lambda: found.extend(len(manager.lookup(prompt)) for prompt in prompts))
    assert found == [LOOKUP_TOKENS // BLOCK_SIZE] * len(prompts)
    return len(prompts) / seconds


def time_steps(report: Report, rounds: int) -> None:
    """Decode steps of 64 sequences for which the pool has room; and while one more waits that would fit for now, so
    that every step works out that it does not pay."""
    job = Job(PROMPT_TOKENS, 4 * OUTPUT_TOKENS, 4 * OUTPUT_TOKENS)
    num_blocks = NUM_SEQUENCES * job.max_blocks + job.max_blocks // 2
    for name, num_waiting in (("step_us_per_sequence", 0), ("step_us_per_sequence_while_one_waits", 1)):
        medians = []
        for _ in _progress(range(rounds), "steps"):
            load = Load(num_blocks, max_num_seqs=NUM_SEQUENCES + 1, max_num_batched_tokens=4096)
            for _ in range(NUM_SEQUENCES + num_waiting):
                load.add(job)
            while load.step() < NUM_SEQUENCES:
                pass
            load.step()
            medians.append(statistics.median(_step_seconds(load) for _ in range(300)) / NUM_SEQUENCES * 1e6)
        report.figures[name] = statistics.median(medians)
        report.notes.append(f"{name}: {median_spread(medians)}")


def _step_seconds(load: Load) -> float:
    began = time.perf_counter()
    num_sequences = load.step()
    seconds = time.perf_counter() - began
    assert num_sequences == NUM_SEQUENCES
    return seconds


def measure_waste(report: Report, conversations: Sequence[Job]) -> None:
    waste = Waste()
    simulate(conversations, AZURE_POOL_TOKENS // BLOCK_SIZE, max_num_seqs=512, after_step=waste.note)
    report.figures["waste_percent"] = waste.percent
    report.peers["waste_percent"] = waste.bound_percent
    report.figures["waste_over_bound"] = waste.blocks_per_request - 0.5
    running = statistics.mean(waste.running_while_others_wait)
    contiguous = AZURE_POOL_TOKENS // LONGEST_REQUEST
    report.figures["requests_ratio_contiguous"] = running / contiguous
    report.notes.append(
        f"Azure: {len(conversations)} conversations through {AZURE_POOL_TOKENS} tokens of KV; {running:.1f} run at "
        f"once, {contiguous} with {LONGEST_REQUEST} contiguous tokens each; {waste.blocks_per_request:.3f} blocks "
        "wasted a request"
    )


class Waste:
    """Sums over the steps of a simulation."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.num_unused = 0
        self.num_requests = 0
        self.running_while_others_wait: list[int] = []

    def note(self, load: Load) -> None:
        running = [request for request in load.scheduler.live if request.block_table]
        for request in running:
            num_slots = len(request.block_table) * BLOCK_SIZE
            self.num_slots += num_slots
            # The last token known has no KV yet; it is on its way.
            self.num_unused += num_slots - len(request.token_ids)
        self.num_requests += len(running)
        if load.scheduler.stats().waiting:
            self.running_while_others_wait.append(len(running))

    @property
    def percent(self) -> float:
        return 100.0 * self.num_unused / self.num_slots

    @property
    def bound_percent(self) -> float:
        """Of half a block for each request."""
        return 100.0 * self.num_requests * BLOCK_SIZE / 2 / self.num_slots

    @property
    def blocks_per_request(self) -> float:
        return self.num_unused / BLOCK_SIZE / self.num_requests


def compare_growth(report: Report, conversations: Sequence[Job]) -> None:
    ratios = []
    for share in _progress((1.0, 2.0, 8.0), "growth"):
        jobs = list(islice(conversations, 300))
        num_blocks = math.ceil(share * max(job.max_blocks for job in jobs))
        learnt = simulate(jobs, num_blocks)
        rates = {reserve: simulate(jobs, num_blocks, StaticGrowth(reserve)) for reserve in STATIC_RESERVES}
        reserve, best = max(rates.items(), key=lambda item: item[1].throughput)
        ratios.append(learnt.throughput / best.throughput)
        report.notes.append(
            f"pool of {share:g} times the largest request: {learnt.throughput:.3g} tokens a unit of time and "
            f"{learnt.num_preemptions} preemptions; best static reserve {reserve}: {best.throughput:.3g}, "
            f"{best.num_preemptions}; none: {rates[1].throughput:.3g}, {rates[1].num_preemptions}"
        )
    report.figures["growth_ratio_static"] = min(ratios)


def _pool_blocks() -> int:
    return NUM_SEQUENCES * (LOOKUP_TOKENS // BLOCK_SIZE + 2)


def _new_tables() -> BlockTables:
    config = CacheConfig(num_blocks=_pool_blocks(), block_size=BLOCK_SIZE)
    return BlockTables(config, BlockManager(config), IDENTITY)


def _request(token_ids: Sequence[int], max_tokens: int) -> Request:
    return Request(
        request_id="r",
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=max_tokens),
        scope=b"",
        arrival=0.0,
    )


def _tokens(dice: random.Random, count: int) -> list[int]:
    return dice.choices(range(VOCABULARY), k=count)


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()  # as timeit does: what else is on the heap is not ours to pay for
    try:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    finally:
        gc.enable()


def _progress(items: Sequence[T], title: str) -> Iterable[T]:
    return track(items, title, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    main()
