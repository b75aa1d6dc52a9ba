"""A worker's threads as lists of what they are to do next. Takes the place of `worker.threads.RealThreads`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVarTuple

from engine.engine import Engine

Ts = TypeVarTuple("Ts")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


@dataclass(slots=True, eq=False)
class Actor:
    """Somebody whose steps are in order. Two worlds in which every actor has the same `past` are in the same state."""

    name: str
    past: int = 0


@dataclass(slots=True, eq=False)
class ArmedTimer:
    agenda: Agenda
    when: float
    callback: Callable[..., None]
    args: tuple[Any, ...]

    def fire(self) -> None:
        self.cancel()
        self.callback(*self.args)

    def cancel(self) -> None:
        if self in self.agenda.timers:
            self.agenda.timers.remove(self)


class Agenda:
    """`Threads` of one worker. What is on a list carries the step that put it there."""

    def __init__(self, clock: Clock, origin: Callable[[], int]) -> None:
        self._clock = clock
        self._origin = origin
        self.notifications: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self.commands: deque[tuple[int, Callable[[Engine], None]]] = deque()
        self.timers: list[ArmedTimer] = []

    def start(self) -> None:
        pass

    def now(self) -> float:
        return self._clock.now

    def notify(self, callback: Callable[[*Ts], None], *args: *Ts) -> None:
        self.notifications.append((self._origin(), callback, args))

    def post(self, operation: Callable[[Engine], None]) -> None:
        self.commands.append((self._origin(), operation))

    def call_later(self, delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> ArmedTimer:
        timer = ArmedTimer(self, self._clock.now + delay_s, callback, args)
        self.timers.append(timer)
        return timer

    def next_timer(self) -> ArmedTimer | None:
        """The earliest; of those that are due together, the first that was armed."""
        return min(self.timers, key=lambda timer: timer.when, default=None)
