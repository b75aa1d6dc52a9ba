"""Ours, and the cost rules of Dynamo, llm-d and SGLang, for `bench.replay`.

Theirs are written after their documents, and see the same index as ours, but for SGLang's, which keeps a tree of its
own choices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.replay_workers import DECODE_STEP_MS, Outcome, Rule, SimulatedWorker
from bench.traces import MOONCAKE_BLOCK, Recorded
from router.learnt_rates import LearntRates
from router.policy import Fleet, PlacementRequest
from router.reference_index import ReferenceIndex
from router.snapshot import DECODE, PREFILL, WorkerSnapshot

INDEX_BYTES = 1 << 28
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 60) - 1


def key_of(prefix_id: int) -> int:
    """Spread like a routing key."""
    mixed = ((prefix_id + 1) * _MIX) & _MASK
    return ((mixed ^ (mixed >> 29)) * _MIX) & _MASK


@dataclass(frozen=True, slots=True)
class TraceKeys:
    recorded: Recorded

    def __len__(self) -> int:
        return len(self.recorded.prefix_ids)

    def prober(self) -> Callable[[int], int]:
        ids = self.recorded.prefix_ids
        return lambda num_blocks: key_of(ids[num_blocks - 1])


class Indexed:
    """A rule that follows what is resident."""

    def begin(self, workers: Sequence[SimulatedWorker]) -> None:
        self.workers = workers
        self.index = ReferenceIndex(INDEX_BYTES)
        self.slots = [self.index.add_worker() for _ in workers]

    def told(self, worker: int, stored: Sequence[int], removed: Sequence[int], now: float) -> None:
        self.index.store(self.slots[worker], [key_of(key) for key in stored])
        self.index.remove(self.slots[worker], [key_of(key) for key in removed])
        self.index.maintain()

    def computed(self, worker: int, num_tokens: int, ms: float) -> None:
        """Not of interest."""

    def depths(self, recorded: Recorded, now: float) -> list[int]:
        matches = self.index.lookup(TraceKeys(recorded), now)
        return [max((m.num_blocks for m in matches if m.slots >> slot & 1), default=0) for slot in self.slots]

    def dispatched(self, worker: int, recorded: Recorded, now: float) -> None:
        self.index.speculate(self.slots[worker], [key_of(key) for key in recorded.prefix_ids], now)

    def least_streams(self) -> int:
        return min(range(len(self.workers)), key=lambda i: self.workers[i].streams)


class Ours(Indexed):
    """`router.policy` on `router.prefix_index`, as the router uses them."""

    def begin(self, workers: Sequence[SimulatedWorker]) -> None:
        super().begin(workers)
        self.rates = LearntRates()
        self.fleet = Fleet(self.rates)

    def computed(self, worker: int, num_tokens: int, ms: float) -> None:
        self.rates.prefilled(f"p{worker}", num_tokens, ms)

    def choose(self, recorded: Recorded, now: float) -> tuple[int, int, int]:
        self.fleet.refresh([self.snapshot(w, role) for role in (PREFILL, DECODE) for w in self.workers])
        matches = self.index.lookup(TraceKeys(recorded), now)
        placement = self.fleet.place(
            PlacementRequest(
                num_tokens=recorded.num_prompt,
                max_total_tokens=recorded.num_prompt + recorded.num_output,
                key=key_of(hash((recorded.prefix_ids, recorded.num_prompt))),
                matches=matches,
            )
        )
        assert placement is not None
        first, second = int(placement.prefill_worker[1:]), int(placement.decode_worker[1:])
        slot = self.slots[first]
        held = max((m.num_blocks for m in matches if m.slots >> slot & 1), default=0)
        self.dispatched(first, recorded, now)
        return first, second, held

    def snapshot(self, worker: SimulatedWorker, role: str) -> WorkerSnapshot:
        prefill = role == PREFILL
        return WorkerSnapshot(
            worker_id=f"{role[0]}{worker.number}",
            role=role,
            block_size=MOONCAKE_BLOCK,
            num_blocks=1_000_000,
            max_model_len=1_000_000,
            blocks_available=1_000_000,
            running=0 if prefill else worker.streams,
            decode_step_ms=DECODE_STEP_MS,
            in_flight=worker.queued if prefill else worker.streams,
            in_flight_tokens=worker.queued_tokens if prefill else 0,
            slot=self.slots[worker.number] if prefill else None,
        )


class LeastLoaded(Indexed):
    def choose(self, recorded: Recorded, now: float) -> tuple[int, int, int]:
        first = min(range(len(self.workers)), key=lambda i: self.workers[i].queued_tokens)
        return first, self.least_streams(), 0


class Dynamo(Indexed):
    """Blocks still to be prefilled there, this request's included, less those that overlap; ties at random."""

    def begin(self, workers: Sequence[SimulatedWorker]) -> None:
        super().begin(workers)
        self.dice = random.Random(1)

    def choose(self, recorded: Recorded, now: float) -> tuple[int, int, int]:
        depths, blocks = self.depths(recorded, now), recorded.num_prompt / MOONCAKE_BLOCK
        costs = [
            max(worker.queued_tokens / MOONCAKE_BLOCK + blocks - depth, 0.0)
            for worker, depth in zip(self.workers, depths, strict=True)
        ]
        best = min(costs)
        first = self.dice.choice([i for i, cost in enumerate(costs) if cost == best])
        self.dispatched(first, recorded, now)
        return first, self.least_streams(), depths[first]


class LlmD(Indexed):
    """Queue 2, free KV 2, prefix 3, each from 0 to 1; who holds 80 % of the prompt is preferred; ties at random."""

    def begin(self, workers: Sequence[SimulatedWorker]) -> None:
        super().begin(workers)
        self.dice = random.Random(1)

    def choose(self, recorded: Recorded, now: float) -> tuple[int, int, int]:
        depths = self.depths(recorded, now)
        ratios = [Outcome.cached_tokens(recorded, depth) / recorded.num_prompt for depth in depths]
        queues = [worker.queued for worker in self.workers]
        span = max(queues) - min(queues)
        scores = [
            2 * ((max(queues) - worker.queued) / span if span else 1.0)
            + 2 * (1 - len(worker.resident) / worker.num_blocks)
            + 3 * ratio
            for worker, ratio in zip(self.workers, ratios, strict=True)
        ]
        kept = [i for i, ratio in enumerate(ratios) if ratio >= 0.8] or range(len(scores))
        best = max(scores[i] for i in kept)
        first = self.dice.choice([i for i in kept if scores[i] == best])
        self.dispatched(first, recorded, now)
        return first, self.least_streams(), depths[first]


class SgLang(Indexed):
    """Shortest queue for all if the fleet is imbalanced; else the longest match if it is more than half, else the
    smallest tree. The tree has what was sent to a worker."""

    def told(self, worker: int, stored: Sequence[int], removed: Sequence[int], now: float) -> None:
        """Follows no events."""

    def choose(self, recorded: Recorded, now: float) -> tuple[int, int, int]:
        queues = [worker.queued for worker in self.workers]
        depths = self.depths(recorded, now)
        deepest = max(range(len(depths)), key=depths.__getitem__)
        if max(queues) - min(queues) > 32 and max(queues) > 1.1 * min(queues):
            first = min(range(len(queues)), key=queues.__getitem__)
        elif depths[deepest] * MOONCAKE_BLOCK > 0.5 * recorded.num_prompt:
            first = deepest
        else:
            first = min(range(len(queues)), key=lambda i: self.sizes[i])
        keys = [key_of(key) for key in recorded.prefix_ids]
        self.sizes[first] += len(keys) - depths[first]
        self.index.store(self.slots[first], keys)
        return first, self.least_streams(), depths[first]

    def begin(self, workers: Sequence[SimulatedWorker]) -> None:
        super().begin(workers)
        self.sizes = [0] * len(workers)


RULES: dict[str, Callable[[], Rule]] = {
    "Dynamo": Dynamo,
    "llm-d": LlmD,
    "SGLang": SgLang,
    "least loaded": LeastLoaded,
}
