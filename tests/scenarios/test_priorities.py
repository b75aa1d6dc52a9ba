"""Priorities through router, sessions and schedulers: whose turn it is of those that wait at a busy worker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import expected_output
from one_process_cluster import BOUND_S, ClusterWorker, OneProcessCluster

from engine.batch import ForwardBatch
from engine.kv_cache import KvCache
from kvrelay.v1 import worker_pb2
from worker.session import Session

PRIORITIES = (3, 0, -1, 3)
BEST_FIRST, OLDEST_FIRST = [2, 1, 0, 3], [0, 1, 2, 3]
STEP_S = 10.0  # SchedulerConfig.priority_step_s
FOUR_STEPS_S = 4 * STEP_S
"""From the worst of `PRIORITIES` to the best."""


def prompt_of(number: int) -> list[int]:
    return [100 + number] * 20


def count_arrivals(worker: ClusterWorker, monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[None]:
    """One entry a request that the worker has taken."""
    arrived: asyncio.Queue[None] = asyncio.Queue(maxsize=100)
    handle = worker.role.handle

    async def counted(session: Session, message: worker_pb2.SessionRequest) -> None:
        await handle(session, message)
        if message.WhichOneof("message") in ("reserve", "prefill"):
            arrived.put_nowait(None)

    monkeypatch.setattr(worker.role, "handle", counted)
    return arrived


def note_turns(worker: ClusterWorker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the prompts, in the order in which the worker computes them."""
    turns: list[int] = []
    runner = worker.parts.engine._runner
    forward = runner._forward

    def noted(batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        turns.append(int(batch.token_ids[0]) - 100)
        return forward(batch, kv)

    monkeypatch.setattr(runner, "_forward", noted)
    return turns


@pytest.mark.parametrize(("waited_s", "expected"), [(0.0, BEST_FIRST), (FOUR_STEPS_S, OLDEST_FIRST)])
@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_the_best_priority_overtakes_until_the_others_have_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_prefill: int, waited_s: float, expected: list[int]
) -> None:
    busy: dict[str, Any] = {"max_num_seqs": 1}
    settings = {"prefill": busy} if num_prefill else {"decode": busy}
    async with OneProcessCluster(tmp_path, num_prefill=num_prefill, **settings) as cluster:  # type: ignore[arg-type]
        worker = cluster.workers[0]
        turns, arrived = note_turns(worker, monkeypatch), count_arrivals(worker, monkeypatch)
        worker.model.pause_at(0)
        async with asyncio.timeout(BOUND_S):
            first = asyncio.create_task(cluster.generate(prompt_of(50), 1, priority=-1))
            await worker.model.paused()
            await arrived.get()
            calls = []
            for number, priority in enumerate(PRIORITIES):
                calls.append(asyncio.create_task(cluster.generate(prompt_of(number), 1, priority=priority)))
                await arrived.get()
            for owner, name in ((worker.parts.engine, "_clock"), (worker.role._core, "now")):
                monkeypatch.setattr(owner, name, lambda: time.monotonic() + waited_s)
            worker.model.go_on()
            await first
            answers = [await call for call in calls]
    assert turns == [50, *expected]
    assert [bool(answer.route.prefill_worker) for answer in answers] == [num_prefill == 1] * 4
    assert cluster.errors == {}
    assert [answer.token_ids for answer in answers] == [expected_output(prompt_of(i), 1) for i in range(4)]
