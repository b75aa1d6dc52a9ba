"""The prefill worker as a Ray actor."""

from __future__ import annotations

from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.session import Role


class PrefillActor(WorkerActor):
    @staticmethod
    def build(config: WorkerConfig) -> Role:
        from prefill_worker.worker import PrefillWorker

        return PrefillWorker.build(config)
