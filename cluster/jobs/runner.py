"""Runs a batch: reads lines as there is room, sends them, writes what came of each.

At most `Pace.most` requests are in flight, and as many lines in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from cluster.jobs.ledger import MAX_LINE_BYTES, Answer, Ask, Ledger, Record
from cluster.jobs.output import Output
from cluster.jobs.pace import Pace
from engine.errors import ConfigError, EngineError, UnavailableError

LOWEST_PRIORITY = 8
FAULT_ATTEMPTS = 3
"""Of a line that the router answers with a fault of its own, before that is its record."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Between attempts to reach a router that is away."""


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no room now."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Away:
    """No answer: the router is not there, or ended in the middle."""

    reason: str


Outcome: TypeAlias = Answer | Refused | Away


class Send(Protocol):
    async def __call__(self, ask: Ask) -> Outcome:
        """Raises an `EngineError` that every other line would meet too, such as a wrong key."""


@dataclass(frozen=True, slots=True)
class Progress:
    done: int
    """Lines with a record, those of earlier runs included."""
    failed: int
    """Of these, bad lines and requests that were refused or failed."""
    found: int
    """Of these, by earlier runs."""
    refusals: int
    """For want of room; asked again later."""
    in_flight: int
    over: bool = False


class BatchRun:
    """One run of a batch. `run` may be cancelled, or the process killed, at any moment: the next run goes on."""

    def __init__(
        self,
        source: Path,
        output: Path,
        send: Send,
        *,
        concurrency: int = 16,
        priority: int = LOWEST_PRIORITY,
        patience_s: float = 600.0,
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """`patience_s`: for how long the router may be away. `tell` is called on the event loop after each record."""
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {concurrency}")
        self._source = source
        self._output_path = output
        self._send = send
        self._pace = Pace(concurrency)
        self._ledger = Ledger(priority)
        self._patience_s = patience_s
        self._tell = tell
        self._found = 0
        self._in_flight = 0
        self._change = asyncio.Event()
        self._heard_at = 0.0
        """When the router last said anything."""

    async def run(self) -> Progress:
        """Until every line has its record.

        Raises `ConfigError` for files that cannot be used or do not belong together, `UnavailableError` once the router
        has been away for `patience_s`, and what `send` raises. What was written stays.
        """
        self._heard_at = time.monotonic()
        with Output(self._output_path) as output:
            self._ledger.resume(output.records())
            self._found = self._ledger.num_done
            try:
                async with asyncio.TaskGroup() as tasks:
                    for number, text in read_lines(self._source):
                        step = self._ledger.take(number, text)
                        if isinstance(step, Record):
                            self._write(output, step)
                        elif step is not None:
                            await self._room()
                            self._in_flight += 1
                            tasks.create_task(self._ask(step, output))
            except* EngineError as errors:
                raise _first(errors) from None
        progress = self._progress(over=True)
        self._tell(progress)
        return progress

    async def _ask(self, ask: Ask, output: Output) -> None:
        try:
            self._write(output, self._ledger.finish(ask, await self._answer(ask)))
        finally:
            self._in_flight -= 1
            self._changed()

    async def _answer(self, ask: Ask) -> Answer:
        """Ask until there is an answer that stays."""
        faults, pause_s = 0, FIRST_PAUSE_S
        while True:
            sent_at = time.monotonic()
            outcome = await self._send(ask)
            now = time.monotonic()
            if isinstance(outcome, Away):
                if now - self._heard_at > self._patience_s:
                    raise UnavailableError(f"the router is away for {self._patience_s:g} s: {outcome.reason}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self._heard_at, pause_s = now, FIRST_PAUSE_S
            if isinstance(outcome, Refused):
                self._pace.refused(sent_at, outcome.retry_after_s, now)
                await asyncio.sleep(max(0.0, self._pace.resumes_at - now))
                continue
            self._pace.answered()
            faults += outcome.status >= 500
            if outcome.status < 500 or faults >= FAULT_ATTEMPTS:
                return outcome
            await asyncio.sleep(FIRST_PAUSE_S * 2**faults)

    async def _room(self) -> None:
        while not self._pace.may_send(self._in_flight, time.monotonic()):
            pause_s = self._pace.resumes_at - time.monotonic()
            try:
                async with asyncio.timeout(pause_s if pause_s > 0 else None):
                    await self._change.wait()
            except TimeoutError:
                continue

    def _write(self, output: Output, record: Record) -> None:
        output.append(record)
        self._tell(self._progress())

    def _progress(self, *, over: bool = False) -> Progress:
        ledger = self._ledger
        return Progress(ledger.num_done, ledger.num_failed, self._found, self._pace.refusals, self._in_flight, over)

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def read_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1, without their ends; of one that is too long only as much
    as shows it. Raises `ConfigError` if there is no such file."""
    try:
        with source.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                rest = line
                while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_LINE_BYTES + 1)
                if line.strip():
                    yield number, line.rstrip(b"\r\n") if len(line) <= MAX_LINE_BYTES else line
    except OSError as error:
        raise ConfigError(f"input: cannot read {source}: {error.strerror}") from error


def count_lines(source: Path) -> int:
    """For a progress bar."""
    return sum(1 for _ in read_lines(source))


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("a group of no errors")
