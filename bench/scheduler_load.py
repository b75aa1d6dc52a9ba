"""Drives a scheduler and its block manager through a workload, with nobody who computes: a step costs by its tokens."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.report import REPOSITORY
from engine.block_hash import BlockIdentity
from engine.block_manager import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.growth import GrowthPolicy, Stream
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

BLOCK_SIZE = 16
TOKENS_PER_STEP = 64.0
"""A step takes 1 + tokens / TOKENS_PER_STEP units of time."""
VOCABULARY = 32_000
IDENTITY = BlockIdentity(model_fingerprint=bytes(32), kv_dtype="bfloat16", block_size=BLOCK_SIZE)
AZURE = REPOSITORY / "bench" / "data" / "azure_llm_2023" / "conversation_lengths.csv.gz"


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    num_prompt: int
    num_output: int
    max_tokens: int

    @property
    def max_blocks(self) -> int:
        return -(-(self.num_prompt + self.max_tokens - 1) // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Outcome:
    throughput: float
    """Output tokens for each unit of time."""
    num_preemptions: int


class StaticGrowth:
    """Reserves the blocks of `reserve` output tokens for each request, whatever outputs are like."""

    def __init__(self, reserve: int) -> None:
        self._reserve = reserve

    def tokens_to_come(self, request: Request) -> int:
        return max(1, min(self._reserve, request.params.max_tokens) - request.num_output_tokens)

    def allows(self, running: Sequence[Stream], added: Stream, num_free: int, tokens_per_step: float) -> bool:
        return sum(map(self._missing, (*running, added))) <= num_free

    def observe(self, num_tokens: int) -> None:
        pass

    def _missing(self, stream: Stream) -> int:
        needed = -(-(stream.num_tokens + stream.num_to_come - 1) // BLOCK_SIZE)
        return max(0, needed - stream.num_blocks)


class Load:
    """A scheduler and the requests that it was given. Every token drawn is a random one."""

    def __init__(
        self,
        num_blocks: int,
        growth: GrowthPolicy | None = None,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_waiting: int = 100_000,
    ) -> None:
        cache_config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        config = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, max_waiting=max_waiting
        )
        self.pool = BlockManager(cache_config)
        self.scheduler = Scheduler(config, cache_config, self.pool, IDENTITY, max_model_len=1 << 20, growth=growth)
        self.now = 0.0
        self._ends: dict[str, int] = {}
        self._dice = random.Random(0)

    def add(self, job: Job) -> None:
        request = Request(
            request_id=str(len(self._ends)),
            token_ids=self._dice.choices(range(VOCABULARY), k=job.num_prompt),
            num_prompt_tokens=job.num_prompt,
            params=SamplingParams(max_tokens=job.max_tokens),
            scope=b"",
            arrival=self.now,
        )
        self.scheduler.add(request)
        self._ends[request.request_id] = job.num_output

    def step(self) -> int:
        """One step; returns how many sequences it had."""
        batch = self.scheduler.schedule(self.now, TOKENS_PER_STEP)
        self.now += 1.0 + batch.num_tokens / TOKENS_PER_STEP
        for sequence in batch.sequences:
            request = sequence.request
            self.scheduler.computed(sequence)
            if sequence.samples:
                request.token_ids.append(self._dice.randrange(VOCABULARY))
                if request.num_output_tokens == self._ends[request.request_id]:
                    self.scheduler.finish(request)
        return len(batch.sequences)


def simulate(
    jobs: Sequence[Job],
    num_blocks: int,
    growth: GrowthPolicy | None = None,
    *,
    max_num_seqs: int = 64,
    after_step: Callable[[Load], None] = lambda load: None,
) -> Outcome:
    """All jobs at once, until the last one is done."""
    load = Load(num_blocks, growth, max_num_seqs=max_num_seqs)
    for job in jobs:
        load.add(job)
    while load.scheduler.has_work():
        load.step()
        after_step(load)
    return Outcome(sum(job.num_output for job in jobs) / load.now, load.scheduler.stats().preemptions)


def azure_conversations(max_tokens: int) -> list[Job]:
    """The recorded lengths; each request could have drawn `max_tokens` tokens, and stopped before."""
    with gzip.open(AZURE, "rt") as lines:
        rows = list(csv.DictReader(lines))
    lengths = [(int(row["context_tokens"]), int(row["generated_tokens"])) for row in rows]
    return [Job(context, generated, max_tokens) for context, generated in lengths if context and generated]
