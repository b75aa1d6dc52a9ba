"""What a worker reports about itself: the engine's counts, its error counters, its memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import psutil

from engine.engine import Engine, EngineStats
from engine.step_loop import StepLoop
from kvrelay.v1 import worker_pb2

STATS_TIMEOUT_S = 0.5


class LoadReporter:
    """Builds load reports, on the event loop."""

    def __init__(self, step_loop: StepLoop, stats: EngineStats) -> None:
        """`stats` is reported until the engine thread has answered for the first time."""
        self.errors: Counter[str] = Counter()
        """Typed errors by class name."""
        self._step_loop = step_loop
        self._stats = stats
        self._process = psutil.Process()
        self._resident_bytes = 0

    async def report(self) -> worker_pb2.Load:
        """The engine's state between two steps. If the running step takes longer than `STATS_TIMEOUT_S`, the last one
        known: a long step must not look like a dead worker. Raises `WorkerLost` if the engine thread has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._stats = await asyncio.wrap_future(self._step_loop.call(Engine.stats))
        return self._message(self._stats)

    def _message(self, stats: EngineStats) -> worker_pb2.Load:
        blocks = stats.blocks
        counted = {"BorrowedBlocksLost": blocks.borrowed_lost, "BlocksDamaged": blocks.damaged}
        return worker_pb2.Load(
            running=stats.running,
            waiting=stats.waiting + stats.awaiting_kv,
            waiting_tokens=stats.waiting_tokens,
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            blocks_owned=blocks.owned,
            blocks_leased=blocks.leased,
            blocks_quarantined=blocks.quarantined,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_step_ms=stats.decode_step_ms,
            resident_bytes=self._resident(),
            preemptions=stats.preemptions,
            preemptions_swapped=stats.swaps,
            blocks_evicted=blocks.evictions,
            host_blocks_restored=stats.host.restored,
            host_blocks_used=stats.host.cached + stats.host.held,
            blocks_lent=blocks.lent,
            errors=self.errors | {name: n for name, n in counted.items() if n},
        )

    def _resident(self) -> int:
        """As last known, where the system does not tell: a process without free file descriptors still has a load."""
        with suppress(OSError, psutil.Error):
            self._resident_bytes = self._process.memory_info().rss
        return self._resident_bytes
