"""Pools of every awkward size: each request finishes, or is refused with the reason, and decisions change nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from factories import fake_identity, make_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_manager import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.decision import decide
from engine.errors import RequestError
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Ask:
    """One request of a history."""

    num_prompt: int
    max_tokens: int
    num_output: int
    """Ends before `max_tokens`, unless this is larger."""
    arrives: int
    """Step."""
    first_token: int
    priority: int = 0
    tenant: int = 0


asks = st.builds(
    Ask,
    num_prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    num_output=st.integers(1, 24),
    arrives=st.integers(0, 20),
    first_token=st.sampled_from([0, 0, 100, 200]),
    priority=st.integers(-2, 2),
    tenant=st.integers(0, 2),
)
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


class History:
    """Runs requests to their ends; every decision is made twice, and every step checks the invariants."""

    def __init__(self, num_blocks: int, *, caching: bool = True, budget: int = 16, max_num_seqs: int = 4) -> None:
        self.cache_config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=caching)
        config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        self.pool = BlockManager(self.cache_config)
        self.scheduler = Scheduler(config, self.cache_config, self.pool, fake_identity(), max_model_len=200)
        self.requests: list[tuple[Request, Ask]] = []
        self.refused: list[tuple[Ask, RequestError]] = []

    def run(self, history: list[Ask]) -> None:
        to_come = sorted(history, key=lambda ask: ask.arrives)
        step = 0
        while to_come or self.scheduler.has_work():
            while to_come and to_come[0].arrives <= step:
                self.add(to_come.pop(0), float(step))
            self.step(float(step))
            step += 1
            assert step < 20_000, "no end in sight"

    def add(self, ask: Ask, now: float) -> None:
        request = make_request(
            range(ask.first_token, ask.first_token + ask.num_prompt),
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            scope=b"tenant%d" % ask.tenant,
            arrival=now,
        )
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self.refused.append((ask, error))
        else:
            self.requests.append((request, ask))

    def step(self, now: float) -> None:
        self.check_purity(now)
        batch = self.scheduler.schedule(now)
        self.scheduler.check_integrity()
        ends = {request.request_id: ask.num_output for request, ask in self.requests}
        for sequence in batch.sequences:
            request = sequence.request
            self.scheduler.computed(sequence)
            if sequence.samples:
                request.token_ids.append(7)
                if request.num_output_tokens >= min(ends[request.request_id], request.params.max_tokens):
                    self.scheduler.finish(request)
        self.scheduler.check_integrity()

    def check_purity(self, now: float) -> None:
        state = self.scheduler.snapshot(now)
        stats, queues = self.pool.stats(), self.scheduler.stats()
        tables = {request.request_id: list(request.block_table) for request, _ in self.requests}
        first, second = decide(state), decide(state)
        assert first == second
        assert (self.pool.stats(), self.scheduler.stats()) == (stats, queues)
        assert tables == {request.request_id: request.block_table for request, _ in self.requests}

    def check_ends(self) -> None:
        """Finished, or refused because it can never fit."""
        for request, ask in self.requests:
            assert request.status is RequestStatus.FINISHED
            assert request.num_output_tokens == min(ask.num_output, ask.max_tokens)
        for ask, error in self.refused:
            needed = self.cache_config.blocks_for(ask.num_prompt + ask.max_tokens - 1)
            assert needed > self.cache_config.num_blocks
            assert error.field == "max_tokens"
            assert f"may need {needed} blocks of 4 tokens; the pool has {self.cache_config.num_blocks}" in str(error)
        stats = self.pool.stats()
        assert stats.free + stats.cached == stats.total


@few
@given(history=st.lists(asks, min_size=1, max_size=12), num_blocks=st.integers(1, 20), caching=st.booleans())
def test_every_request_finishes_or_is_refused(history: list[Ask], num_blocks: int, caching: bool) -> None:
    run = History(num_blocks, caching=caching)
    run.run(history)
    run.check_ends()


@few
@given(ask=asks, copies=st.integers(1, 8), spare=st.integers(0, 1))
def test_requests_all_the_same_in_a_pool_for_one(ask: Ask, copies: int, spare: int) -> None:
    num_blocks = -(-(ask.num_prompt + ask.max_tokens - 1) // BLOCK_SIZE) + spare
    run = History(num_blocks)
    run.run([ask] * copies)
    run.check_ends()
    assert not run.refused


def prompts_that_are_exactly_the_pool(dice: random.Random, num_blocks: int) -> Ask:
    return Ask(num_blocks * BLOCK_SIZE, 1, 1, dice.randint(0, 9), dice.choice([0, 100]))


def one_block_too_large(dice: random.Random, num_blocks: int) -> Ask:
    return Ask(num_blocks * BLOCK_SIZE, 2, 2, dice.randint(0, 9), 0)


def all_different(dice: random.Random, num_blocks: int) -> Ask:
    num_prompt = dice.randint(1, num_blocks * BLOCK_SIZE)
    max_tokens = dice.randint(1, num_blocks * BLOCK_SIZE - num_prompt + 1)
    return Ask(num_prompt, max_tokens, dice.randint(1, 60), dice.randint(0, 30), dice.randint(0, 10**6))


@pytest.mark.parametrize("make_ask", [prompts_that_are_exactly_the_pool, one_block_too_large, all_different])
@pytest.mark.parametrize("num_blocks", [1, 2, 9])
def test_requests_as_large_as_the_pool(make_ask: Callable[[random.Random, int], Ask], num_blocks: int) -> None:
    dice = random.Random(num_blocks)
    run = History(num_blocks)
    run.run([make_ask(dice, num_blocks) for _ in range(20)])
    run.check_ends()
    assert len(run.refused) == (20 if make_ask is one_block_too_large else 0)


def test_with_one_block_left_by_a_link_small_requests_go_on() -> None:
    run = History(6)
    for block in run.pool.allocate(5):
        run.pool.quarantine([block])
    requests = [make_request([i], max_tokens=3) for i in range(5)]
    for request in requests:
        run.scheduler.add(request)
    while run.scheduler.has_work():
        for sequence in run.scheduler.schedule(0.0).sequences:
            run.scheduler.computed(sequence)
            sequence.request.token_ids.append(7)
            if sequence.request.num_output_tokens == 3:
                run.scheduler.finish(sequence.request)
    assert all(request.status is RequestStatus.FINISHED for request in requests)


def test_a_decision_is_made_of_its_state_alone() -> None:
    first, second = History(8), History(8)
    history = [Ask(9, 12, 12, i // 2, 10 * i, priority=i % 2, tenant=i % 3) for i in range(8)]
    decisions: list[list[tuple[list[str], int]]] = []
    for run in (first, second):
        made = []
        for step in range(60):
            for ask in history:
                if ask.arrives == step:
                    run.add(ask, float(step))
            state = copy.copy(run.scheduler.snapshot(float(step)))
            decision = decide(state)
            order = {request.request_id: i for i, (request, _) in enumerate(run.requests)}
            admitted = [str(order[admission.plan.request.request_id]) for admission in decision.admitted]
            made.append((admitted, len(decision.preempted)))
            run.step(float(step))
        decisions.append(made)
    assert decisions[0] == decisions[1]
    assert sum(count for _, count in decisions[0]) > 0
