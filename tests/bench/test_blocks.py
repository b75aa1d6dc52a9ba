from __future__ import annotations

import random

import pytest

from bench.blocks import Waste, measure_waste
from bench.naive_blocks import NaiveBlockManager, NaiveSequence
from bench.report import Report
from bench.scheduler_load import Job, Load, StaticGrowth, azure_conversations, simulate


def test_the_recorded_conversations_are_all_there() -> None:
    jobs = azure_conversations(max_tokens=2048)
    assert len(jobs) == 19_366
    assert (jobs[0].num_prompt, jobs[0].num_output) == (374, 44)
    assert max(job.num_prompt + job.num_output for job in jobs) == 14_089


def test_waste_is_what_is_held_and_has_no_token() -> None:
    load, waste = Load(num_blocks=64), Waste()
    load.add(Job(num_prompt=20, num_output=30, max_tokens=30))
    load.step()
    waste.note(load)  # 3 blocks, one of them to grow into; 20 tokens and the first one drawn
    assert (waste.num_slots, waste.num_unused, waste.num_requests) == (48, 27, 1)
    assert waste.percent == pytest.approx(100 * 27 / 48)
    assert waste.bound_percent == pytest.approx(100 * 8 / 48)


def test_the_recorded_conversations_waste_about_half_a_block_each() -> None:
    report = Report("blocks")
    measure_waste(report, azure_conversations(max_tokens=2048)[:100])
    assert report.figures["waste_percent"] < 4.0
    assert abs(report.figures["waste_over_bound"]) < 0.1
    assert report.figures["requests_ratio_contiguous"] >= 3.0


def test_every_job_of_a_simulation_ends_with_its_tokens() -> None:
    jobs = [Job(10, num_output=n, max_tokens=40) for n in (1, 7, 40)]
    outcome = simulate(jobs, num_blocks=4, growth=StaticGrowth(1))
    assert outcome.throughput > 0.0


def test_the_baseline_finds_what_was_computed_and_nothing_else() -> None:
    dice = random.Random(1)
    manager = NaiveBlockManager(num_blocks=12, block_size=4)
    prompt = dice.choices(range(100), k=10)
    first = NaiveSequence(list(prompt))
    manager.allocate(first)
    for token_id in (1, 2, 3):
        first.token_ids.append(token_id)
        manager.append(first)
    assert len(first.block_table) == 4
    blocks = list(first.block_table)
    manager.free(first)
    assert manager.lookup([*prompt, 1, 2, 9, 9]) == blocks[:3]
    assert manager.lookup([5, *prompt]) == []
    second = NaiveSequence(list(prompt))
    manager.allocate(second)
    assert second.block_table[:2] == blocks[:2]
