"""Passing over workers changes no answer."""

from __future__ import annotations

import random

import pytest

from router.candidates import Candidates, tied
from router.costs import WorkerCosts, assumed_rates, worker_costs
from router.learnt_rates import LearntRates
from router.prefix_index import Match
from router.snapshot import DECODE, WorkerSnapshot

NUM_WORKERS = 12


def snapshot(number: int, rng: random.Random) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=f"w{number}",
        role=DECODE,
        block_size=16,
        num_blocks=1000,
        max_model_len=16_000,
        running=rng.randrange(3),
        waiting_tokens=rng.choice([0, 0, 10, 1000]),
        blocks_available=2 if rng.random() < 0.02 else 1000,
        prefill_tokens_per_s=rng.choice([1000.0, 1000.0, 5000.0]),
        decode_step_ms=10.0,
        slot=number if rng.random() < 0.9 else None,
    )


def costs_of(workers: list[WorkerSnapshot]) -> list[WorkerCosts]:
    rates = LearntRates()
    assumed = assumed_rates(workers, rates)
    return [worker_costs(worker, rates, assumed[DECODE]) for worker in workers]


def local(member: WorkerCosts) -> tuple[float, float, float]:
    return member.queue_ms + member.step_ms, member.token_ms, member.token_ms * 1.5


def some_matches(rng: random.Random) -> list[Match]:
    """Each slot once, deepest first."""
    slots = rng.sample(range(NUM_WORKERS + 2), rng.randrange(NUM_WORKERS))
    depths = sorted(rng.sample(range(1, 12), rng.randrange(4)), reverse=True)
    groups = [slots[i :: len(depths)] for i in range(len(depths))]
    return [Match(n, sum(1 << slot for slot in group)) for n, group in zip(depths, groups, strict=True) if group]


@pytest.mark.parametrize("seed", range(200))
def test_the_best_are_those_that_a_look_at_each_would_find(seed: int) -> None:
    rng = random.Random(seed)
    workers = [snapshot(n, rng) for n in range(NUM_WORKERS)]
    candidates = Candidates(costs_of(workers), local)
    for _ in range(10):
        changed = rng.randrange(NUM_WORKERS)
        workers[changed] = snapshot(changed, rng)
        candidates.replace(costs_of(workers)[changed])
        matches, total = some_matches(rng), rng.choice([150, 300])
        held = candidates.held(matches, 200)
        ranks = Candidates(candidates.members, local).ranks(200, held, total)
        best = [(rank, i) for i, rank in enumerate(ranks) if rank <= tied(min(ranks))]
        assert candidates.best(matches, 200, held, total) == best


def test_what_is_held_is_told_of_members_alone_and_never_the_last_token() -> None:
    rng = random.Random(1)
    workers = [snapshot(n, rng) for n in range(NUM_WORKERS)]
    candidates = Candidates(costs_of(workers), local)
    with_slot = [worker.slot for worker in workers if worker.slot is not None]
    first, second = with_slot[:2]
    matches = [Match(4, 1 << first | 1 << 300), Match(2, 1 << second)]
    held = candidates.held(matches, 64)
    assert (held[first], held[second], sum(held)) == (63, 32, 95)
