"""The decode worker as a Ray actor."""

from __future__ import annotations

from worker.actor import WorkerActor
from worker.config import WorkerConfig
from worker.session import Role


class DecodeActor(WorkerActor):
    @staticmethod
    def build(config: WorkerConfig) -> Role:
        from decode_worker.worker import DecodeWorker

        return DecodeWorker.build(config)
