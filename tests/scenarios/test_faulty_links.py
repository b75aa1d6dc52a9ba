"""Whole clusters over links on which everything goes wrong at random: every client still gets the oracle's tokens.

Leaving a cluster checks that no worker holds anything and that free plus cached blocks are all blocks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import expected_output
from one_process_cluster import OneProcessCluster

from kv_transfer.faults import Direction, Fault, FaultInjector, FaultKind, FaultPlan
from kv_transfer.link import LinkSettings
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender

REQUESTS = 40
FIRST_BLOCKS = 2
"""After HELLO and RENEW."""
PAYLOAD_BYTES = 8 * 512
"""Of the blocks of 60 tokens."""
EXPONENT_BIT = (2051 * 8 + 6.5) / (PAYLOAD_BYTES * 8)
"""Of one number in the middle of them: inverted, it changes what the model reads back."""


def inject(monkeypatch: pytest.MonkeyPatch, plan: FaultPlan) -> FaultInjector:
    """Into the links of all workers that are made from now on, in both directions."""
    injector = FaultInjector(plan, delay_s=0.05, freeze_s=0.5)

    def faulty(
        make: Callable[..., Any], direction: Direction, *args: Any, settings: LinkSettings, **others: Any
    ) -> Any:
        connection = injector.connection(direction)
        hurried = replace(settings, handshake_timeout_s=0.2, progress_timeout_s=0.2, connection=connection)
        return make(*args, settings=hurried, **others)

    sender = partial(faulty, KvSender, Direction.TO_RECEIVER)
    receiver = partial(faulty, KvReceiver, Direction.TO_SENDER)
    monkeypatch.setattr("prefill_worker.worker.KvSender", sender)
    monkeypatch.setattr("decode_worker.worker.KvReceiver", receiver)
    return injector


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_client_gets_its_tokens_whatever_the_links_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    injector = inject(monkeypatch, FaultPlan(rate=0.2, seed=1))
    rng = random.Random(1)
    prompts = [[rng.randrange(500) for _ in range(rng.randint(1, 120))] for _ in range(REQUESTS)]

    transports: dict[str, Any] = {"kv_transports": (transport,)}
    async with OneProcessCluster(tmp_path, num_prefill=2, num_decode=2, lease_s=0.5, **transports) as cluster:
        generations = await asyncio.gather(*(cluster.generate(prompt, 12) for prompt in prompts))

    assert [g.token_ids for g in generations] == [expected_output(prompt, 12) for prompt in prompts]
    assert sum(injector.injected().values()) > 10


@pytest.mark.parametrize("kind", list(FaultKind))
async def test_no_kind_of_fault_changes_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FaultKind
) -> None:
    fault = Fault(kind=kind, in_payload=True, position=EXPONENT_BIT)
    injector = inject(monkeypatch, FaultPlan(at={(Direction.TO_RECEIVER, FIRST_BLOCKS): fault}))
    rng = random.Random(1)
    prompts = [[rng.randrange(500) for _ in range(60)] for _ in range(4)]

    async with OneProcessCluster(tmp_path, lease_s=0.5, kv_transports=("tcp",)) as cluster:
        generations = [await cluster.generate(prompt, 6) for prompt in prompts]

    assert [g.token_ids for g in generations] == [expected_output(prompt, 6) for prompt in prompts]
    assert injector.injected()[kind] > 0
