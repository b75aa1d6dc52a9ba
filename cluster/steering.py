"""Which workers of a pool to add, take away or replace so that it becomes what is wanted. Pure functions.

A pool is changed as little at a time as it takes to never do without: of two or more workers one is replaced in its
place, and the next one only when everything serves again; of a pool's only worker the successor comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cluster.events import Phase, PoolWanted


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker that is not on its way out for good."""

    member_id: str
    number: int
    role: str
    phase: Phase
    stale: bool
    """It starts or serves with other settings than are wanted."""

    @property
    def serves(self) -> bool:
        return self.phase is Phase.READY


@dataclass(frozen=True, slots=True)
class Add:
    role: str


@dataclass(frozen=True, slots=True)
class TakeAway:
    member_id: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Let it end, and start it again with the settings that are wanted then."""

    member_id: str


Step: TypeAlias = Add | TakeAway | Replace


def steer(pools: Mapping[str, PoolWanted], workers: Sequence[Standing], *, calm: bool) -> list[Step]:
    """What to do now; nothing once the pools are as wanted. `calm`: everything serves, and the router knows it.

    A worker that serves is replaced, or its successor started, only while it is calm, and one at a time in all pools.
    """
    steps: list[Step] = []
    for role, wanted in pools.items():
        steps += _resize(role, wanted, [worker for worker in workers if worker.role == role], calm and not steps)
    if steps or not calm:
        return steps
    return [*map(Replace, [worker.member_id for worker in workers if worker.stale][:1])]


def _resize(role: str, wanted: PoolWanted, workers: Sequence[Standing], calm: bool) -> list[Step]:
    stale = [worker for worker in workers if worker.stale and worker.serves]
    if wanted.replicas == 1 and stale:
        return _succeed(role, stale[0], workers, calm)
    excess = len(workers) - wanted.replicas
    lost = sorted(workers, key=_worth)[: max(excess, 0)]
    steps: list[Step] = [TakeAway(worker.member_id) for worker in lost]
    steps += _start_anew(worker for worker in workers if worker not in lost)
    return steps + [Add(role)] * -excess


def _succeed(role: str, old: Standing, workers: Sequence[Standing], calm: bool) -> list[Step]:
    """`old` is the only one that is needed, until its successor serves."""
    fresh = sorted((worker for worker in workers if not worker.stale), key=_worth, reverse=True)
    if calm and fresh and fresh[0].serves:
        return [TakeAway(worker.member_id) for worker in workers if worker is not fresh[0]]
    spare = [worker for worker in workers if worker is not old and worker not in fresh[:1]]
    steps: list[Step] = [TakeAway(worker.member_id) for worker in spare]
    return [*steps, Add(role)] if calm and not fresh else steps


def _start_anew(workers: Iterable[Standing]) -> list[Step]:
    """Nobody misses a worker that does not serve yet."""
    return [Replace(worker.member_id) for worker in workers if worker.stale and worker.phase is Phase.STARTING]


def _worth(worker: Standing) -> tuple[bool, bool, int]:
    """The least goes first when a pool shrinks."""
    return worker.serves, not worker.stale, -worker.number
