"""What a worker adds to the price of any request, from its snapshot and what was learnt of its rates. Pure.

A rate that is not known yet is taken to be the slowest known of its role, or a low constant, so that an unknown worker
is tried when the known ones are busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from router.learnt_rates import LearntRates
from router.snapshot import ROLES, WorkerSnapshot

PRIOR_PREFILL_MS_PER_TOKEN = 2.0
"""Of a small model on one CPU core; slower than any accelerator."""
PRIOR_DECODE_STEP_MS = 50.0
PRIOR_LINK_MS_PER_TOKEN = 0.02
STREAM_SHARE = 0.05
"""How much longer one more stream makes a decode step, as a share of the step."""


class WorkerCosts(NamedTuple):
    """In milliseconds. A tuple, because one is made for every decision."""

    worker: WorkerSnapshot
    token_ms: float
    """To compute a token of a prompt."""
    queue_ms: float
    """Until a new prompt has its turn."""
    link_ms: float
    """To get the KV of a token."""
    step_ms: float
    """Decode step with the request in it."""
    slowdown_ms: float
    """What all running streams together lose in that step."""
    room: int
    """Tokens that fit without a wait."""
    growth_ms: float
    """For each token more: about the time in which the running streams produce one."""
    seat: int
    """For rendezvous hashing: a number made of its id."""

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    def blocks_ms(self, total_tokens: int) -> float:
        return max(0, total_tokens - self.room) * self.growth_ms


@dataclass(frozen=True, slots=True)
class AssumedRates:
    """For workers of a role that have no rates of their own yet."""

    token_ms: float
    step_ms: float
    link_ms: float


def assumed_rates(workers: Sequence[WorkerSnapshot], rates: LearntRates) -> Mapping[str, AssumedRates]:
    """The slowest known: of the role, or for prompts of all workers."""
    computing = {role: max((_prefill_ms(w, rates) for w in workers if w.role == role), default=0.0) for role in ROLES}
    steps = {role: max((w.decode_step_ms for w in workers if w.role == role), default=0.0) for role in ROLES}
    link_ms = max((rates.link_ms_per_token(w.worker_id) for w in workers), default=0.0) or PRIOR_LINK_MS_PER_TOKEN
    slowest = max(computing.values()) or PRIOR_PREFILL_MS_PER_TOKEN
    return {
        role: AssumedRates(computing[role] or slowest, steps[role] or PRIOR_DECODE_STEP_MS, link_ms) for role in ROLES
    }


def _prefill_ms(worker: WorkerSnapshot, rates: LearntRates) -> float:
    learnt = rates.prefill_ms_per_token(worker.worker_id)
    return learnt or (1000.0 / worker.prefill_tokens_per_s if worker.prefill_tokens_per_s else 0.0)


def worker_costs(worker: WorkerSnapshot, rates: LearntRates, assumed: AssumedRates) -> WorkerCosts:
    token_ms = _prefill_ms(worker, rates) or assumed.token_ms
    step_ms = worker.decode_step_ms or assumed.step_ms
    streams = worker.streams
    return WorkerCosts(
        worker,
        token_ms,
        worker.queued_tokens * token_ms,
        rates.link_ms_per_token(worker.worker_id) or assumed.link_ms,
        step_ms * (1.0 + STREAM_SHARE * streams),
        step_ms * STREAM_SHARE * streams,
        worker.blocks_available * worker.block_size,
        step_ms / (worker.running or 1),
        _seat(worker.worker_id),
    )


@lru_cache(maxsize=1024)
def _seat(worker_id: str) -> int:
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8).digest())
