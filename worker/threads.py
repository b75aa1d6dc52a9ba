"""Where the code of a worker runs: its event loop, its engine thread, its timers. Knows no request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVarTuple

from engine.engine import Engine
from engine.errors import WorkerLost
from engine.step_loop import StepLoop

Ts = TypeVarTuple("Ts")


class Timer(Protocol):
    def cancel(self) -> None: ...


class Threads(Protocol):
    """All ways by which the parts of a role reach each other, so that tests can decide what runs next, and when."""

    def start(self) -> None:
        """On the event loop, once, before everything else."""

    def now(self) -> float:
        """Monotonic seconds. From any thread."""

    def notify(self, callback: Callable[[*Ts], None], *args: *Ts) -> None:
        """From any thread: run `callback` on the event loop, in the order of the calls of each thread."""

    def post(self, operation: Callable[[Engine], None]) -> None:
        """From any thread: run `operation` on the engine thread before its next step, in the order of the calls."""

    def call_later(self, delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> Timer:
        """On the event loop: run `callback` there after `delay_s`, with or without traffic."""


class RealThreads:
    """`Threads` of a worker that runs: asyncio's loop and the engine's `StepLoop`."""

    def __init__(self, step_loop: StepLoop) -> None:
        self._step_loop = step_loop
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._step_loop.start()

    def now(self) -> float:
        return time.monotonic()

    def notify(self, callback: Callable[[*Ts], None], *args: *Ts) -> None:
        assert self._loop is not None, "the worker was not started"
        self._loop.call_soon_threadsafe(callback, *args)

    def post(self, operation: Callable[[Engine], None]) -> None:
        """Dropped once the engine thread has stopped."""
        with suppress(WorkerLost):
            self._step_loop.post(operation)

    def call_later(self, delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)
