"""A worker as a Ray actor: Ray starts and watches its process, and carries none of its requests. Knows no role."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import ray.util

from kvrelay._logs import log_to_stderr
from worker.config import NODE_HOST, WorkerConfig
from worker.process import RunningWorker, exit_with_raylet
from worker.session import Role


class WorkerActor(ABC):
    """One worker process. `ray.remote` is applied to its subclasses, by whoever places them."""

    def __init__(self, config: WorkerConfig) -> None:
        log_to_stderr(config.worker_id, config.log_format)
        exit_with_raylet()
        if config.host == NODE_HOST:
            config = replace(config, host=str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        self._worker = RunningWorker(config, self.build)

    @staticmethod
    @abstractmethod
    def build(config: WorkerConfig) -> Role:
        """Load the model and make the role. Imports it here, in the actor's process alone: whoever starts actors needs
        neither torch nor the seconds that it takes."""

    async def start(self) -> dict[str, Any]:
        """Load the model and serve; returns the ready report. On an `EngineError` the actor is of no use any more."""
        # Without Ray, as in tests, the question itself would start one.
        node_id = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return {**await self._worker.start(), "node": os.uname().nodename, "node_id": node_id}

    async def stop(self) -> None:
        """Drain, end the sessions, give memory and port back. The process stays until Ray ends it. Idempotent."""
        await self._worker.stop()

    async def until_gone(self) -> None:
        """Never returns. A call that waits here fails at once when this process ends, however it ends."""
        await asyncio.Event().wait()
