"""The thread that an engine lives on, and the only way to it from other threads. Owns the lock, commands and timers.

One turn of the loop: run what was posted and the timers that are due, then one engine step, then deliver its output.
Without work the thread sleeps until something is posted or the next timer is due.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.engine import Engine, StepOutput
from engine.errors import InternalError, QueueFull, WorkerLost

T = TypeVar("T")
Command = Callable[[Engine], None]

MAX_PENDING = 65_536
"""Commands not yet run, and timers not yet due, each; one more is refused with `QueueFull`."""
INTEGRITY_CHECK_AFTER_S = 1.0
"""Without a step for so long, the engine's invariants are re-derived once."""

_log = logging.getLogger(__name__)


class TimerHandle:
    """A command that is due at a point in time, unless it is cancelled before."""

    def __init__(self, loop: StepLoop, when: float, number: int, command: Command) -> None:
        self.when = when
        self.number = number
        self.command: Command | None = command
        """None once it was cancelled or its time has come."""
        self._loop = loop

    def cancel(self) -> None:
        """From any thread. Does nothing once the time has come. Idempotent."""
        self._loop.cancel_timer(self)

    def __lt__(self, other: TimerHandle) -> bool:
        return (self.when, self.number) < (other.when, other.number)


class StepLoop:
    """Runs `engine` on one thread of its own. Any thread may use the methods here, also from within callbacks.

    On the engine thread, one after the other: commands in the order of posting, timers in the order of their times,
    `deliver` after each step that has updates, and `on_fault` with whatever a command, a timer, `deliver` or the
    engine raises. A fault of the engine outside a batch fails all live requests, through `deliver`, and the loop goes
    on. None of the callbacks may block.

    If even that raises, the thread ends, and every later call raises `WorkerLost`, as after `stop`.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[StepOutput], None],
        *,
        on_fault: Callable[[Exception], None] | None = None,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_fault = on_fault or _log_fault
        self._max_pending = max_pending
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._integrity_check_at: float | None = None
        """Belongs to the engine thread; all that follows, to whoever holds `_changed`."""
        self._changed = threading.Condition()
        self._commands: deque[tuple[Command, Future[Any] | None]] = deque()
        self._timers: list[TimerHandle] = []
        """Heap. Cancelled timers stay until they are due or the majority."""
        self._num_cancelled = 0
        self._num_timers_set = 0
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step that it is in. Calls that did not run fail with `WorkerLost`. Idempotent.

        Raises `InternalError` if the step takes longer than `timeout_s`; the thread still ends after it.
        """
        self._abandon()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InternalError(f"the engine thread is still in a step {timeout_s} s after it was told to stop")

    def post(self, command: Command) -> None:
        """Run `command` before the next step. Raises `QueueFull`, or `WorkerLost` once the loop has ended."""
        self._enqueue(command, None)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` before the next step; the future has its result or what it raised. Raises as `post` does.

        Cancelling the future before its turn takes the call back. To wait for it on the engine thread is a deadlock.
        """
        future: Future[T] = Future()

        def run(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(engine))
            except Exception as error:  # noqa: BLE001
                # edge: whoever waits for the future gets what its function raised on this thread
                future.set_exception(error)

        self._enqueue(run, future)
        return future

    def call_at(self, when: float, command: Command) -> TimerHandle:
        """Run `command` once `time.monotonic()` has reached `when`, with or without traffic. Raises as `post` does."""
        with self._changed:
            self._check_accepts(len(self._timers) - self._num_cancelled)
            self._num_timers_set += 1
            timer = TimerHandle(self, when, self._num_timers_set, command)
            heapq.heappush(self._timers, timer)
            if self._timers[0] is timer:
                self._changed.notify()
            return timer

    def cancel_timer(self, timer: TimerHandle) -> None:
        """For `TimerHandle.cancel`."""
        with self._changed:
            if timer.command is None:
                return
            timer.command = None
            self._num_cancelled += 1
            if 2 * self._num_cancelled > len(self._timers):
                self._timers = [timer for timer in self._timers if timer.command is not None]
                heapq.heapify(self._timers)
                self._num_cancelled = 0

    def _enqueue(self, command: Command, future: Future[Any] | None) -> None:
        with self._changed:
            self._check_accepts(len(self._commands))
            self._commands.append((command, future))
            self._changed.notify()

    def _check_accepts(self, num_pending: int) -> None:
        if self._stopping:
            raise WorkerLost("the engine has stopped")
        if num_pending >= self._max_pending:
            raise QueueFull(f"{num_pending} calls wait for the engine thread, the limit is {self._max_pending}")

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    self._guarded(command, self._engine)
                if self._engine.has_work():
                    self._step()
        finally:
            self._abandon()

    def _next_commands(self) -> list[Command] | None:
        """Wait for commands, a due timer or work for the engine. None: stop."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                commands = [command for command, _ in self._commands]
                self._commands.clear()
                commands += self._due(now)
                if commands or self._engine.has_work():
                    return commands
                wake_times = [timer.when for timer in self._timers[:1]]
                if self._integrity_check_at is not None:
                    wake_times.append(self._integrity_check_at)
                self._changed.wait(min(wake_times) - now if wake_times else None)
            return None

    def _due(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while self._timers and self._timers[0].when <= now:
            timer = heapq.heappop(self._timers)
            if timer.command is None:
                self._num_cancelled -= 1
            else:
                commands.append(timer.command)
                timer.command = None
        if self._integrity_check_at is not None and self._integrity_check_at <= now:
            self._integrity_check_at = None
            commands.append(Engine.check_integrity)
        return commands

    def _step(self) -> None:
        try:
            output = self._engine.step()
        except Exception as error:  # noqa: BLE001
            # edge: a bug of ours must reach every client that waits, and must not end the worker
            self._on_fault(error)
            output = self._engine.fail_all(error)
        self._integrity_check_at = time.monotonic() + INTEGRITY_CHECK_AFTER_S
        if output.updates:
            self._guarded(self._deliver, output)

    def _guarded(self, function: Callable[[T], None], argument: T) -> None:
        try:
            function(argument)
        except Exception as error:  # noqa: BLE001
            # edge: the thread serves all requests, so it outlives the fault of one callback
            self._on_fault(error)

    def _abandon(self) -> None:
        with self._changed:
            self._stopping = True
            abandoned, self._commands = self._commands, deque()
            self._timers.clear()
            self._changed.notify()
        for _, future in abandoned:
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(WorkerLost("the engine has stopped"))


def _log_fault(error: Exception) -> None:
    _log.error("fault on the engine thread", exc_info=error)
