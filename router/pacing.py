"""Wakes all streams that let tokens gather by one timer, where a timer for each would cost more than the tokens do."""

from __future__ import annotations

import asyncio

MAX_AT_ONCE = 16
"""Streams that go on in one turn of the event loop; what has come in meanwhile has its turn before the others."""


class Pacer:
    """Invariant: a timer is armed, or the next turn is due, exactly while somebody waits."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._waiting: list[asyncio.Future[None]] = []
        """For the next beat."""
        self._due: list[asyncio.Future[None]] = []
        """Their beat has come; last first."""

    async def wait(self) -> None:
        """Until the next beat: `gap_s` at most, and just that for who came with the last one."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self._gap_s, self._beat)
        future = loop.create_future()
        self._waiting.append(future)
        await future

    def _beat(self) -> None:
        was_idle = not self._due
        self._due = [*reversed(self._waiting), *self._due]
        self._waiting = []
        if was_idle:
            self._wake()

    def _wake(self) -> None:
        for _ in range(min(MAX_AT_ONCE, len(self._due))):
            future = self._due.pop()
            if not future.done():  # it was cancelled
                future.set_result(None)
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake)
