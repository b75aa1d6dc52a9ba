"""Tells when a peer has been silent for too long, by a clock that stands still while this process does.

If the event loop slept (a long computation in it, a stopped process, a machine without a free core), what the peer
said meanwhile lies unread, and its silence is ours. So silence is counted in ticks, and one that comes late is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

TICKS = 6
"""That make up the limit; a tick should be no longer than a heartbeat."""


class SilenceWatch:
    """A context manager: watches while it is entered. On the event loop."""

    def __init__(self, limit_s: float, on_silence: Callable[[], None]) -> None:
        """`on_silence` is called once, when nothing was heard for `limit_s`, or a sixth of that longer."""
        self._loop = asyncio.get_running_loop()
        self._tick_s = limit_s / TICKS
        self._on_silence = on_silence
        self._quiet_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        self._quiet_ticks = -1  # the tick under way began before this

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        due = self._loop.time() + self._tick_s
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if self._loop.time() - due < self._tick_s:
            self._quiet_ticks += 1
        if self._quiet_ticks < TICKS:
            self._wait()
        else:
            self._on_silence()
