"""A scheduler and its block manager under a clock of their own, and nobody who computes: a step costs by its tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from factories import fake_identity, make_request

from engine.block_manager import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.growth import GrowthPolicy, Stream
from engine.request import Request
from engine.scheduler import Scheduler

BLOCK_SIZE = 16
TOKENS_PER_STEP = 64.0
"""A step takes 1 + tokens / TOKENS_PER_STEP units of time."""


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


def simulate(
    jobs: Sequence[Job],
    num_blocks: int,
    growth: GrowthPolicy | None = None,
    *,
    max_num_seqs: int = 64,
    check: bool = False,
) -> Outcome:
    """All jobs at once, until the last one is done. `check`: re-derive the invariants at every step (slow)."""
    cache_config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_waiting=2 * len(jobs))
    pool = BlockManager(cache_config)
    scheduler = Scheduler(config, cache_config, pool, fake_identity(BLOCK_SIZE), max_model_len=1 << 20, growth=growth)
    ends: dict[str, int] = {}
    dice = random.Random(0)
    for job in jobs:
        request = make_request(dice.choices(range(1000), k=job.num_prompt), max_tokens=job.max_tokens)
        scheduler.add(request)
        ends[request.request_id] = job.num_output
    now = 0.0
    while scheduler.has_work():
        batch = scheduler.schedule(now, TOKENS_PER_STEP)
        now += 1.0 + batch.num_tokens / TOKENS_PER_STEP
        for sequence in batch.sequences:
            request = sequence.request
            scheduler.computed(sequence)
            if sequence.samples:
                request.token_ids.append(dice.randrange(1000))
                if request.num_output_tokens == ends[request.request_id]:
                    scheduler.finish(request)
        if check:
            scheduler.check_integrity()
    assert not scheduler.live, "a request was left behind"
    return Outcome(sum(job.num_output for job in jobs) / now, scheduler.stats().preemptions)
