"""Which steps are taken: at random, as a list says, or all of them to some depth. And what to do with a failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from explorer.checks import check_rest
from explorer.faults import FAULTS, faults
from explorer.node import virtual
from explorer.world import Setup, Step, World
from kv_transfer.frames import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from kv_transfer.identity import ADOPT, SHM, TCP

T = TypeVar("T")
MAX_SHRINKS = 300
MAX_STEPS = 3000
"""A schedule that takes more does not come to rest."""
PROMPTS = ((1, 2, 3), (1, 2, 4), (1, 2, 3, 4), (5, 6), (1, 2), (5, 6, 7))
LONG_PROMPTS = ((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 8, 9), (5, 6, 7, 8, 9, 10, 11, 12), (9, 8, 7, 6, 5))
Choose = Callable[[World, Sequence[Step]], int]
"""Place of a step in the list, or behind it among the faults."""


@dataclass(frozen=True)
class Failure:
    setup: Setup
    choices: tuple[int, ...]
    error: Exception
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}\n" + "\n".join(self.trace)


def random_setup(rng: random.Random, transport: str = "") -> Setup:
    if transport == ADOPT:
        return _lending_setup(rng)
    prompts = rng.sample(PROMPTS, rng.choice((1, 2)))
    requests = [(prompt, rng.randint(1, 3)) for prompt in rng.choices(prompts, k=rng.choice((1, 2, 2, 3)))]
    return Setup(
        requests=tuple(requests),
        num_prefill=rng.choice((1, 1, 2)),
        num_decode=rng.choice((1, 1, 2)),
        num_blocks=rng.choice((3, 3, 4, 6)),
        prefill_budget=rng.choice((2, 4)),
        transport=transport or rng.choice((SHM, TCP)),
        protocol=rng.choice((PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION)),
        faults=tuple(FAULTS),
        max_faults=rng.choice((0, 1, 2, 3)),
        silence=rng.random() < 0.2,
    )


def _lending_setup(rng: random.Random) -> Setup:
    """Longer prompts, of which blocks are lent, and longer outputs, which read them meanwhile."""
    prompts = rng.sample(LONG_PROMPTS, rng.choice((1, 2, 3)))
    requests = [(prompt, rng.randint(1, 7)) for prompt in rng.choices(prompts, k=rng.choice((1, 2, 3)))]
    return Setup(
        requests=tuple(requests),
        num_prefill=rng.choice((1, 1, 2)),
        num_decode=rng.choice((1, 1, 2)),
        num_blocks=rng.choice((5, 6, 7, 8)),
        prefill_budget=rng.choice((2, 4)),
        transport=ADOPT,
        faults=tuple(FAULTS),
        max_faults=rng.choice((0, 1, 2, 3)),
        silence=rng.random() < 0.2,
    )


class AtRandom:
    """Some schedules choose evenly; in others some actors are much slower than the rest."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._fault_rate = rng.choice((0.01, 0.03, 0.1))
        self._time_rate = rng.choice((0.0, 0.01, 0.05))
        self._slow = rng.choice((0.0, 0.0, 0.5))
        self._speeds: dict[str, float] = {}

    def __call__(self, world: World, steps: Sequence[Step]) -> int:
        rng = self._rng
        if rng.random() < self._fault_rate and (possible := faults(world)):
            return len(steps) + rng.randrange(len(possible))
        timed = steps[-1].kind == "time"
        if timed and (len(steps) == 1 or rng.random() < self._time_rate):
            return len(steps) - 1
        count = len(steps) - timed
        if not self._slow:
            return rng.randrange(count)
        weights = [self._speed(step) for step in steps[:count]]
        return rng.choices(range(count), weights)[0]

    def _speed(self, step: Step) -> float:
        name = step.actors[0].name
        if name not in self._speeds:
            self._speeds[name] = 0.02 if self._rng.random() < self._slow else 1.0
        return self._speeds[name]


class AsListed:
    """Then always the first that is possible."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = iter(choices)

    def __call__(self, world: World, steps: Sequence[Step]) -> int:
        return next(self._choices, 0)


def play(setup: Setup, choose: Choose) -> Failure | None:
    """One schedule, to its end."""
    world = World(setup)
    choices: list[int] = []
    try:
        while steps := world.steps():
            choice = choose(world, steps)
            possible = steps if choice < len(steps) else [*steps, *faults(world)]
            step = possible[choice % len(possible)]
            choices.append(choice)
            world.take(step)
            world.require(len(choices) < MAX_STEPS, "the world does not come to rest")
        check_rest(world)
    except _Seen:
        raise
    except Exception as error:  # noqa: BLE001
        # edge: whatever the explored code raises is what was looked for
        return Failure(setup, tuple(choices), error, tuple(world.trace))
    finally:
        world.close()
    return None


def play_seed(seed: int, transport: str = "") -> Failure | None:
    """`transport` of all links, in place of the seed's choice."""
    rng = random.Random(seed)
    return play(random_setup(rng, transport), AtRandom(rng))


def replay(seed: int, choices: Sequence[int], transport: str = "") -> Failure | None:
    """These steps in the world of `seed`."""
    return play(random_setup(random.Random(seed), transport), AsListed(choices))


def shrunk(failure: Failure) -> Failure:
    """The same kind of failure with fewer choices: its end left to chance-free order, then single steps left out."""
    for tries, size in ((len(failure.choices), 0), (MAX_SHRINKS, 1)):
        for i in reversed(range(min(tries, len(failure.choices)))):
            choices = failure.choices[:i] + failure.choices[i + 1 :] if size else failure.choices[:i]
            shorter = play(failure.setup, AsListed(choices))
            if shorter is not None and type(shorter.error) is type(failure.error):
                failure = replace(shorter, choices=choices)
            elif not size:
                break
    return failure


@dataclass(slots=True)
class Exhausted:
    """What became of all schedules to some depth."""

    num_states: int = 0
    num_schedules: int = 0
    """That were run to their end: one for each state at the last depth, and for each that came to rest before."""
    failure: Failure | None = None


def exhaust(setup: Setup, depth: int, start: Sequence[int] = ()) -> Exhausted:
    """After `start`, all orders of the next `depth` steps, faults included, and each then run to its end.

    Of schedules that differ only in the order of steps that do not touch each other, one is run (`World.fingerprint`).
    """
    found = Exhausted()
    seen: set[int] = set()
    pending = [tuple(start)]
    while pending and found.failure is None:
        prefix = pending.pop()

        def choose(world: World, steps: Sequence[Step], prefix: tuple[int, ...] = prefix) -> int:
            taken = len(world.trace)
            if taken < len(prefix):
                return prefix[taken]
            if taken > len(start) + depth:
                return 0
            state = world.fingerprint()
            if state in seen:
                raise _Seen
            seen.add(state)
            if taken == len(start) + depth:
                return 0
            path = (*prefix, *(0 for _ in range(taken - len(prefix))))
            pending.extend((*path, i) for i in range(1, len(steps) + len(faults(world))))
            return 0

        try:
            found.failure = play(setup, choose)
            found.num_schedules += 1
        except _Seen:
            pass
    found.num_states = len(seen)
    return found


class _Seen(Exception):
    """Another schedule has led to this state."""


def exploring(explore: Callable[[], T]) -> T:
    """Run `explore` where worlds can be played."""

    async def run() -> T:
        with virtual():
            return explore()

    return asyncio.run(run())
