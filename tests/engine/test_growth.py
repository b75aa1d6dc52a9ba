from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from factories import make_request

from bench.scheduler_load import Job, StaticGrowth, simulate
from engine.growth import LearntGrowth, Stream, preemption_pays, steps_until_full

RESERVES = (1, 32, 64, 128)


def test_streams_that_fit_to_their_ends_never_fill_the_pool() -> None:
    streams = [Stream(num_tokens=16, num_blocks=1, num_to_come=40)] * 2
    assert steps_until_full(streams, num_free=6, block_size=16) == math.inf


def test_the_pool_is_full_when_all_have_grown_into_what_is_free() -> None:
    streams = [Stream(num_tokens=9, num_blocks=1, num_to_come=1000)] * 4
    # 8 blocks are 128 tokens; 36 are there, and half of each last block is unused
    assert steps_until_full(streams, num_free=4, block_size=16) == pytest.approx((128 - 36 - 4 * 7.5) / 4)


def test_blocks_of_those_that_end_before_are_there_for_the_others() -> None:
    short, long = Stream(num_tokens=60, num_blocks=4, num_to_come=2), Stream(12, 1, num_to_come=60)
    assert steps_until_full([short, long], num_free=1, block_size=16) == math.inf
    assert steps_until_full([Stream(60, 4, num_to_come=60), long], num_free=1, block_size=16) < 60


def test_a_pool_that_is_full_already_leaves_no_step() -> None:
    assert steps_until_full([Stream(16, 1, 10), Stream(16, 1, 10)], num_free=0, block_size=16) == 0.0


def test_a_preemption_that_never_comes_costs_nothing() -> None:
    assert preemption_pays(math.inf, num_tokens=10_000, num_running=500, tokens_per_step=1.0)


def test_next_to_few_a_preemption_pays_soon_and_next_to_many_never() -> None:
    assert preemption_pays(10, num_tokens=100, num_running=1, tokens_per_step=64.0)
    assert not preemption_pays(10, num_tokens=100, num_running=16, tokens_per_step=64.0)
    assert preemption_pays(40, num_tokens=100, num_running=16, tokens_per_step=64.0)
    assert not preemption_pays(1e6, num_tokens=100, num_running=64, tokens_per_step=64.0)


def test_what_is_to_come_is_clamped_to_max_tokens() -> None:
    growth = LearntGrowth(block_size=16)
    assert growth.tokens_to_come(make_request([1], output=[2, 3], max_tokens=30)) == 28
    for _ in range(100):
        growth.observe(10)
    assert growth.tokens_to_come(make_request([1], output=[2, 3], max_tokens=30)) == 8
    assert growth.tokens_to_come(make_request([1], output=[2, 3], max_tokens=5)) == 3


def alike(dice: random.Random) -> Job:
    return Job(dice.randint(20, 60), num_output=64, max_tokens=256)


def all_different(dice: random.Random) -> Job:
    return Job(dice.randint(20, 60), num_output=dice.randint(1, 192), max_tokens=192)


def few_long(dice: random.Random) -> Job:
    return Job(dice.randint(20, 60), num_output=200 if dice.random() < 0.15 else 8, max_tokens=200)


def all_to_the_limit(dice: random.Random) -> Job:
    return Job(dice.randint(20, 60), num_output=128, max_tokens=128)


@pytest.mark.parametrize("make_job", [alike, all_different, few_long, all_to_the_limit])
@pytest.mark.parametrize("pool", [1.0, 3.0])
def test_learnt_growth_is_as_good_as_the_best_static_reserve(
    make_job: Callable[[random.Random], Job], pool: float
) -> None:
    """`pool`: how many of the largest requests fit in it."""
    dice = random.Random(5)
    jobs = [make_job(dice) for _ in range(80)]
    num_blocks = math.ceil(pool * max(job.max_blocks for job in jobs))
    best = max(simulate(jobs, num_blocks, StaticGrowth(reserve)).throughput for reserve in RESERVES)
    assert simulate(jobs, num_blocks).throughput >= 0.95 * best


def test_in_a_large_pool_preemption_is_rare_and_throughput_stays() -> None:
    dice = random.Random(6)
    jobs = [Job(dice.randint(20, 60), min(512, int(dice.lognormvariate(4.0, 0.8)) + 1), 512) for _ in range(200)]
    outcome = simulate(jobs, 200)
    best = max(simulate(jobs, 200, StaticGrowth(reserve)).throughput for reserve in RESERVES)
    greedy = simulate(jobs, 200, StaticGrowth(1))
    assert outcome.num_preemptions < 0.1 * len(jobs) < 0.4 * greedy.num_preemptions
    assert outcome.throughput >= 0.95 * best
