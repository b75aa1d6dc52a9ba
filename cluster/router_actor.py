"""The router as a Ray actor: Ray starts and watches its process, and carries none of its requests."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from cluster.control import send_order
from engine.errors import EngineError, UnavailableError
from kvrelay._logs import log_to_stderr
from router.config import RouterConfig
from router.server import RouterServer
from worker.process import exit_with_raylet


class RouterActor:
    def __init__(self, config: RouterConfig, drain_s: float, control_path: str = "") -> None:
        """`control_path`: where whoever supervises the cluster takes orders."""
        log_to_stderr(config.router_id, config.log_format)
        exit_with_raylet()
        self._server = RouterServer(config, give_order=self._pass_on)
        self._drain_s = drain_s
        self._control_path = Path(control_path)
        self._scheme = "https" if config.tls_cert else "http"
        self._address = ""
        self._retires = False

    async def start(
        self, workers: Mapping[str, str] | None = None, draining: Collection[str] = (), timeout_s: float = 0.0
    ) -> dict[str, Any]:
        """Serve; returns the ready report. With `workers`, listen beside the router that this one takes over from once
        it is connected to them.

        Raises what `RouterServer.start` raises, or `UnavailableError` if they are not connected after `timeout_s`.
        """
        await self._server.prepare()
        if workers is not None and (missing := await self.set_workers(workers, draining, timeout_s)):
            await self._server.stop(0.0)
            raise UnavailableError(f"it cannot use its workers: {missing}")
        address = self._address = await self._server.listen()
        return {
            "worker_id": "router",
            "incarnation": uuid.uuid4().hex,
            "role": "router",
            "address": address,
            "http_address": self._server.http_address,
            "pid": os.getpid(),
            "node": os.uname().nodename,
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    async def set_workers(self, addresses: Mapping[str, str], draining: Collection[str], timeout_s: float) -> str:
        """Serve with exactly these workers, with nothing new for those that are `draining`, and wait for the sessions
        with the others.

        Returns an empty text when all are connected, else, after `timeout_s`, which are not and why.
        """
        registry = self._server.registry
        registry.set_workers(addresses, draining)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not addresses.keys() - set(draining) <= {snapshot.worker_id for snapshot in registry.snapshots()}:
                    await registry.changed()
                return ""
        return registry.why_not_ready()

    async def drained(self, worker_id: str, timeout_s: float) -> bool:
        """Wait until no request is on this worker, but not longer than `timeout_s`; whether there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._server.registry.wait_idle(worker_id)
                return True
        return False

    async def describe(self) -> dict[str, Any]:
        """Where clients reach this router, for one that finds it through Ray."""
        http_url = f"{self._scheme}://{self._server.http_address}"
        return {"address": self._address, "http_url": http_url, "retires": self._retires}

    async def order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Pass an order on to whoever supervises the cluster. Returns `done`, or `error` and `kind`."""
        try:
            return {"done": await self._pass_on(order)}
        except EngineError as error:
            return {"error": str(error), "kind": type(error).__name__}

    async def _pass_on(self, order: Mapping[str, Any]) -> dict[str, Any]:
        return await send_order(self._control_path, order)

    async def retire(self, drain_s: float) -> None:
        """After another router listens where this one does: see `RouterServer.retire`."""
        self._retires = True
        await self._server.retire(drain_s)

    async def stop(self) -> None:
        """Take no new calls, let the live ones finish within the drain time. Idempotent."""
        await self._server.stop(self._drain_s)

    async def until_gone(self) -> None:
        """Never returns. A call that waits here fails at once when this process ends, however it ends."""
        await asyncio.Event().wait()
