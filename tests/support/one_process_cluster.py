"""A router and workers of both roles in one process, over loopback gRPC and real links, around `FakeModel`s."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import torch
from fakes import make_model_folder
from pausing_model import PausingModel

from decode_worker.worker import DecodeWorker
from engine.block_hash import pack_tokens, unpack_tokens
from engine.block_stats import BlockStats
from engine.config import EngineConfig, SchedulerConfig
from engine.model_config import model_fingerprint
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from prefill_worker.worker import PrefillWorker
from router.config import RouterConfig
from router.server import RouterServer
from worker.config import WorkerConfig
from worker.engine_builder import assemble_engine
from worker.server import WorkerServer

BOUND_S = 30.0
"""A wait longer than this is a failure."""


@dataclass
class Generation:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    finished: router_pb2.Finished | None = None

    @property
    def route(self) -> router_pb2.Route:
        assert self.finished is not None, "the stream did not finish"
        return self.finished.route


class ClusterWorker:
    """One worker with its server."""

    def __init__(self, worker_class: type[PrefillWorker] | type[DecodeWorker], config: WorkerConfig) -> None:
        self.model = PausingModel()
        fingerprint = model_fingerprint(Path(config.engine.model_path))
        role = "decode" if worker_class is DecodeWorker else "prefill"
        self.parts = assemble_engine(self.model, fingerprint, config.engine_of(role))
        self.config = config
        self.role = worker_class(config, self.parts)
        self.server = WorkerServer(self.role, config)
        self.address = ""

    async def start(self) -> None:
        await self.role.start()
        self.address = await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(0.0)
        await self.role.stop()

    async def block_stats(self) -> BlockStats:
        """On the engine thread."""
        return await asyncio.wrap_future(self.role._core._step_loop.call(lambda engine: engine.stats().blocks))

    async def check_idle(self) -> worker_pb2.Load:
        """Every request ends by itself, and nothing of any is left."""
        await self.role.drain(BOUND_S)
        await self.role.check_integrity()
        load = await self.role.load()
        assert (load.running, load.waiting) == (0, 0)
        assert load.blocks_free + load.blocks_cached == self.parts.kv.num_blocks, load
        return load


class OneProcessCluster:
    """An async context manager. Leaving it checks every worker that was not stopped, then takes all down."""

    def __init__(
        self,
        folder: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        **worker: Any,
    ) -> None:
        """Settings: `prefill`, `decode` of `EngineConfig`; `router` of `RouterConfig`; `worker` of `WorkerConfig`.

        Prompts are split, however short, unless `router` says otherwise.
        """
        torch.set_num_threads(1)
        self._folder = make_model_folder(folder)
        self._settings = {PrefillWorker: prefill or {}, DecodeWorker: decode or {}}
        self._worker_settings = worker
        self._numbers = {PrefillWorker: num_prefill, DecodeWorker: num_decode}
        self._router_config = RouterConfig(
            model_path=str(folder),
            model_name="fake",
            **{"no_worker_wait_s": 5.0, "reconnect_min_s": 0.01, "local_prefill_max_tokens": 0} | (router or {}),
        )
        self.prefill: list[ClusterWorker] = []
        self.decode: list[ClusterWorker] = []
        self.router = RouterServer(self._router_config)
        self.errors: dict[str, int] = {}
        """Of all workers, by class; filled in on leaving."""

    async def __aenter__(self) -> Self:
        self.prefill = [self._worker(PrefillWorker, i) for i in range(self._numbers[PrefillWorker])]
        self.decode = [self._worker(DecodeWorker, i) for i in range(self._numbers[DecodeWorker])]
        for worker in self.workers:
            await worker.start()
        self.router = RouterServer(self.router_config("router"))
        self.channel = grpc.aio.insecure_channel(await self.router.start())
        async with asyncio.timeout(BOUND_S):
            while len(self.router.registry.snapshots()) < len(self.workers):
                await self.router.registry.changed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channel.close()
        try:
            if error is None:
                for worker in self.workers:
                    await self._check(worker)
                self.router.dispatcher.admission.check_idle()
        finally:
            await self.router.stop(0.0)
            for worker in self.workers:
                await worker.stop()

    def router_config(self, router_id: str, **settings: Any) -> RouterConfig:
        """Of a router of this cluster."""
        addresses = tuple(worker.address for worker in self.workers)
        return replace(self._router_config, router_id=router_id, workers=addresses, **settings)

    @property
    def workers(self) -> list[ClusterWorker]:
        return [*self.prefill, *self.decode]

    async def stop_paused(self, worker: ClusterWorker) -> None:
        """Take away a worker whose model is paused; it goes on once the router has lost it."""
        (self.prefill if worker in self.prefill else self.decode).remove(worker)
        stopping = asyncio.create_task(worker.stop())
        registry = self.router.registry
        async with asyncio.timeout(BOUND_S):
            while worker.config.worker_id in {snapshot.worker_id for snapshot in registry.snapshots()}:
                await registry.changed()
        worker.model.go_on()
        await stopping

    def call(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        timeout_s: float = BOUND_S,
        priority: int = 0,
        api_key: str = "",
        **sampling: Any,
    ) -> grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]:
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling
        request = router_pb2.GenerateRequest(
            prompt_token_ids=pack_tokens(prompt), sampling=common_pb2.SamplingParams(**params), priority=priority
        )
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        return router_pb2_grpc.RouterStub(self.channel).Generate(request, timeout=timeout_s, metadata=metadata)

    async def generate(self, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> Generation:
        """Refuses a repeated or skipped index."""
        generation = Generation()
        async for event in self.call(prompt, max_tokens, **sampling):
            match event.WhichOneof("event"):
                case "tokens":
                    assert event.tokens.index == len(generation.token_ids)
                    generation.token_ids += unpack_tokens(event.tokens.token_ids)
                case "finished":
                    generation.finished = event.finished
        return generation

    def _worker(self, worker_class: type[PrefillWorker] | type[DecodeWorker], number: int) -> ClusterWorker:
        settings = {"num_blocks_override": 256, "block_size": 8} | self._settings[worker_class]
        scheduler = SchedulerConfig(
            max_num_batched_tokens=settings.pop("max_num_batched_tokens", 64),
            max_num_seqs=settings.pop("max_num_seqs", 16),
        )
        engine = EngineConfig(model_path=str(self._folder), dtype="float32", scheduler=scheduler, **settings)
        if "adopt" in self._worker_settings.get("kv_transports", ()):
            engine = replace(
                engine, native_cache=str(Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}" / "native")
            )
        name = "prefill" if worker_class is PrefillWorker else "decode"
        return ClusterWorker(
            worker_class,
            WorkerConfig(worker_id=f"{name}-{number}", model_name="fake", engine=engine, **self._worker_settings),
        )

    async def _check(self, worker: ClusterWorker) -> None:
        load = await worker.check_idle()
        for name, count in load.errors.items():
            self.errors[name] = self.errors.get(name, 0) + count
