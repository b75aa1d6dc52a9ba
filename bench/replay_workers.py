"""Simulated prefill and decode workers under a virtual clock, for `bench.replay`. Nothing here decides where to go.

A prefill worker computes one prompt after the other, at one speed; what it computed it holds, up to a number of blocks,
least recently used first out. A decode worker is a number of streams. The router learns of blocks and of ends a little
later than they happen.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.traces import MOONCAKE_BLOCK, Recorded

PREFILL_MS_PER_TOKEN = 1000 / 15_928
"""The rate that llm-d's defaults assume."""
PREFILL_OVERHEAD_MS = 10.0
DECODE_STEP_MS = 15.0
TOLD_AFTER_S = 0.02
"""From an event at a worker to its being known."""


@dataclass(slots=True)
class SimulatedWorker:
    """What a router can know: prompts and uncached tokens in its queue, its streams, how much it holds."""

    number: int
    num_blocks: int
    busy_until: float = 0.0
    resident: OrderedDict[int, None] = field(default_factory=OrderedDict)
    queued: int = 0
    queued_tokens: int = 0
    """Expected, of requests that are not known to be computed."""
    streams: int = 0
    """Of the decode worker beside it."""
    computed_blocks: int = 0

    def held(self, recorded: Recorded) -> int:
        ids = recorded.prefix_ids
        return next((i for i, key in enumerate(ids) if key not in self.resident), len(ids))

    def compute(self, recorded: Recorded, now: float) -> tuple[int, float, float, list[int]]:
        """Blocks that were cached; when it begins and ends; blocks that had to go."""
        held = self.held(recorded)
        uncached = recorded.num_prompt - Outcome.cached_tokens(recorded, held)
        begin = max(now, self.busy_until)
        self.busy_until = begin + (PREFILL_OVERHEAD_MS + uncached * PREFILL_MS_PER_TOKEN) / 1000
        self.computed_blocks += -(-uncached // MOONCAKE_BLOCK)
        for key in reversed(recorded.prefix_ids):  # the first block is used last: it goes last
            self.resident[key] = None
            self.resident.move_to_end(key)
        gone = [self.resident.popitem(last=False)[0] for _ in range(max(0, len(self.resident) - self.num_blocks))]
        return held, begin, self.busy_until, gone


class Rule(Protocol):
    def begin(self, workers: Sequence[SimulatedWorker]) -> None: ...

    def choose(self, recorded: Recorded, now: float) -> tuple[int, int, int]:
        """Prefill worker, decode worker, and how many blocks the first one is believed to hold."""

    def told(self, worker: int, stored: Sequence[int], removed: Sequence[int], now: float) -> None:
        """What is resident at a prefill worker has changed."""

    def computed(self, worker: int, num_tokens: int, ms: float) -> None:
        """A prompt is done: so many tokens were computed in this time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float
    """Percent of all blocks, those that are partial included."""
    balance: float
    """Blocks computed by the busiest worker over the mean."""
    ttfts_ms: Sequence[float]

    def ttft_ms(self, percent: int) -> float:
        return statistics.quantiles(self.ttfts_ms, n=100)[percent - 1]

    @staticmethod
    def cached_tokens(recorded: Recorded, held: int) -> int:
        return min(held * MOONCAKE_BLOCK, recorded.num_prompt - 1)

    def __str__(self) -> str:
        ttfts = ", ".join(f"p{percent} {self.ttft_ms(percent):.0f}" for percent in (50, 90, 99))
        return f"hit rate {self.hit_rate:.2f} %, computed max/mean {self.balance:.3f}, TTFT ms {ttfts}"


class Simulation:
    def __init__(self, num_workers: int, cache_blocks: int) -> None:
        self._workers = [SimulatedWorker(number, cache_blocks) for number in range(num_workers)]
        self._due: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()

    def run(self, recorded: Sequence[Recorded], rule: Rule) -> Outcome:
        rule.begin(self._workers)
        hits, ttfts = 0, []
        for one in recorded:
            self._catch_up(one.at_s, rule)
            first, second, expected = rule.choose(one, one.at_s)
            worker = self._workers[first]
            tokens = one.num_prompt - Outcome.cached_tokens(one, expected)
            worker.queued, worker.queued_tokens = worker.queued + 1, worker.queued_tokens + tokens
            self._workers[second].streams += 1
            held, begin, end, gone = worker.compute(one, one.at_s)
            cached = Outcome.cached_tokens(one, held)
            hits += held
            ttfts.append((end - one.at_s) * 1000)
            done = _Done(first, tokens, one, gone, one.num_prompt - cached, (end - begin) * 1000)
            self._push(end + TOLD_AFTER_S, done)
            self._push(end + one.num_output * DECODE_STEP_MS / 1000, _StreamOver(second))
        blocks = [worker.computed_blocks for worker in self._workers]
        total = sum(one.num_blocks for one in recorded)
        return Outcome(100 * hits / total, max(blocks) / statistics.fmean(blocks), ttfts)

    def _push(self, at: float, what: object) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), what))

    def _catch_up(self, now: float, rule: Rule) -> None:
        while self._due and self._due[0][0] <= now:
            at, _, what = heapq.heappop(self._due)
            if isinstance(what, _StreamOver):
                self._workers[what.worker].streams -= 1
            elif isinstance(what, _Done):
                worker = self._workers[what.worker]
                worker.queued, worker.queued_tokens = worker.queued - 1, worker.queued_tokens - what.tokens
                rule.told(what.worker, what.recorded.prefix_ids, what.gone, at)
                rule.computed(what.worker, what.num_computed, what.ms)


@dataclass(frozen=True, slots=True)
class _Done:
    worker: int
    tokens: int
    recorded: Recorded
    gone: Sequence[int]
    num_computed: int
    ms: float


@dataclass(frozen=True, slots=True)
class _StreamOver:
    worker: int
