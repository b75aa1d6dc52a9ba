from __future__ import annotations

import random
from pathlib import Path

import pytest
from fakes import make_model_folder

from bench.report import Report
from bench.router_index import measure_memory, soak, time_ours
from bench.router_index_load import PROMPT_BLOCKS, SYSTEM_BLOCKS, OurDecision, OurIndex, conversations
from bench.router_index_restarts import restart_under_load
from bench.router_warm import warm_up
from engine.native.build import default_cache


def test_our_index_holds_each_conversation_where_it_is_said_to_be() -> None:
    held, ours = conversations(8, 20), OurIndex(8)
    for conversation in held:
        ours.feed(conversation.worker, ours.messages(conversation))
    ours.check()
    for conversation in held:
        depths = ours.depths(ours.matches(conversation.tokens))
        assert depths[conversation.worker] == PROMPT_BLOCKS
        assert set(depths.values()) <= {PROMPT_BLOCKS, SYSTEM_BLOCKS}
        cut = conversation.cut(300, random.Random(1))
        assert ours.depths(ours.matches(cut.tokens))[conversation.worker] == 300
    some = held[0]
    ours.feed(some.worker, ours.messages(some, SYSTEM_BLOCKS, remove=True))
    ours.check()
    assert ours.depths(ours.matches(some.tokens))[some.worker] == SYSTEM_BLOCKS


def test_the_decision_is_for_the_holder() -> None:
    held, ours = conversations(8, 20), OurIndex(8)
    for conversation in held:
        ours.feed(conversation.worker, ours.messages(conversation))
    decide = OurDecision(ours)
    assert [decide.choose(c.tokens) for c in held] == [f"w{c.worker}" for c in held]


async def test_a_new_router_knows_what_many_workers_hold() -> None:
    warm = await warm_up(4, 20_000, str(default_cache()))
    assert warm.seconds > 0.0


@pytest.mark.processes
async def test_a_router_that_is_killed_and_hears_wrongly_comes_to_know_what_its_workers_hold(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    found = await restart_under_load(folder, num_workers=3, num_blocks=6000, kills=1, faults=0.2)
    assert len(found.warm_s) == 2
    assert found.num_faults > 0
    assert set(found.codes) == {"OK", "UNAVAILABLE"}


def test_a_small_run_gives_every_figure() -> None:
    report = Report("router_index")
    measure_memory(report, 20)
    soak(report, 10_000)
    assert report.figures["bytes_per_block"] > 0
    assert report.figures["soak_growth"] > 0
    assert {"implementation", "store_ours", "lookup_ours", "decision_ours", "select_ours"} == time_ours(20, 2).keys()
