"""A fake model that a test can hold in the middle of a request."""

from __future__ import annotations

import asyncio
import threading

import torch
from fakes import FakeModel

from engine.batch import ForwardBatch
from engine.interruption import PassControl
from engine.kv_cache import KvCache

BOUND_S = 30.0
"""A wait longer than this is a failure."""


class PausingModel(FakeModel):
    """A `FakeModel` that can be stopped before a forward, on the engine thread, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self._pauses_at: int | None = None
        self._go_on = threading.Event()
        self._paused: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.control: PassControl | None = None
        """Of the last forward. This model does not look at it."""

    def pause_at(self, num_forwards: int) -> None:
        """Pause once `num_forwards` more were done. On the event loop."""
        self._loop, self._paused = asyncio.get_running_loop(), asyncio.Event()
        self._go_on.clear()
        self._pauses_at = self.num_forwards + num_forwards

    async def paused(self) -> None:
        assert self._paused is not None, "nobody called pause_at"
        async with asyncio.timeout(BOUND_S):
            await self._paused.wait()

    def go_on(self) -> None:
        self._go_on.set()

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        self.control = batch.control
        if self.num_forwards == self._pauses_at and self._loop is not None and self._paused is not None:
            self._pauses_at = None
            self._loop.call_soon_threadsafe(self._paused.set)
            assert self._go_on.wait(BOUND_S), "nobody called go_on"
        return super().forward(batch, kv)
