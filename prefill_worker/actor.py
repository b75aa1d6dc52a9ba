"""The prefill worker as a Ray actor: Ray starts and watches its process, and carries none of its requests."""

from __future__ import annotations

import asyncio
from typing import Any

from worker.config import WorkerConfig
from worker.process import RunningWorker, exit_with_raylet, log_to_stderr
from worker.session import Role


def _build(config: WorkerConfig) -> Role:
    # Imported in the actor's process alone: whoever starts actors needs neither torch nor the seconds that it takes.
    from prefill_worker.worker import PrefillWorker

    return PrefillWorker.build(config)


class PrefillActor:
    """One worker process. `ray.remote` is applied by whoever places it."""

    def __init__(self, config: WorkerConfig) -> None:
        log_to_stderr(config.worker_id)
        exit_with_raylet()
        self._worker = RunningWorker(config, _build)

    async def start(self) -> dict[str, Any]:
        """Load the model and serve; returns the ready report. On an `EngineError` the actor is of no use any more."""
        return await self._worker.start()

    async def stop(self) -> None:
        """Drain, end the sessions, give memory and port back. The process stays until Ray ends it. Idempotent."""
        await self._worker.stop()

    async def until_gone(self) -> None:
        """Never returns. A call that waits here fails at once when this process ends, however it ends."""
        await asyncio.Event().wait()
