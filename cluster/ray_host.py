"""Runs a cluster's actors on Ray, for the supervisor: which class, which arguments, what Ray's errors mean.

Ray never restarts an actor by itself: a restart is the supervisor's decision, and a new incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import control_path, native_dir
from cluster.events import ROUTER_ID, PublishWorkers
from cluster.finders import ROUTER_ACTORS
from cluster.health import answers, answers_tls
from cluster.host import ActorLost, ReadyReport
from cluster.pools import threads_of
from cluster.processes import ProcessId, gone
from cluster.ray_runtime import RayRuntime
from cluster.router_actor import RouterActor
from cluster.spec import ClusterSpec, parse_labels
from engine.cluster_key import ClusterKey
from engine.errors import EngineError, InternalError

logger = logging.getLogger(__name__)

LOG_TAIL_BYTES = 4096
TAKE_OVER_TIMEOUT_S = 15.0
"""For a router that takes over to be connected to the workers."""
REASON_TIMEOUT_S = 0.3
"""For Ray to say why a process ended, once it has."""

ResultT = TypeVar("ResultT")


class RayHost:
    """Starts the actors of one cluster. A `Host` of `cluster.host`."""

    def __init__(
        self,
        spec: ClusterSpec,
        model_path: str,
        runtime: RayRuntime,
        worker_classes: Mapping[str, type],
        key: ClusterKey,
    ) -> None:
        """`worker_classes` by role: made from a `WorkerConfig`, with the methods `start`, `stop` and `until_gone`."""
        self._spec = spec
        self._worker_classes = worker_classes
        self._model_path = model_path
        self._runtime = runtime
        self._key = key
        self._router_config = replace(
            spec.router_config(model_path),
            routing_seed=secrets.randbits(64),
            cluster_key=key,
            native_cache=str(native_dir()),
            shares_ports=True,
        )
        self._router_name = ROUTER_ACTORS[0]
        self._router_node = ""

    @property
    def serves_tls(self) -> bool:
        """Whether the router does."""
        return bool(self._router_config.tls_cert)

    def use(self, spec: ClusterSpec) -> None:
        """Whoever is started from now on is as `spec` says. Where the router listens does not change."""
        self._spec = spec
        config, kept = spec.router_config(self._model_path), self._router_config
        self._router_config = replace(
            config,
            port=kept.port,
            http_port=kept.http_port,
            routing_seed=kept.routing_seed,
            cluster_key=kept.cluster_key,
            native_cache=kept.native_cache,
            shares_ports=kept.shares_ports,
        )

    def start(self, member_id: str, role: str, takes_over: PublishWorkers | None = None) -> RayHandle:
        if member_id == ROUTER_ID:
            orders_at = str(control_path(self._spec.name))
            arguments = (self._router_config, self._spec.supervision.drain_s, orders_at)
            needs = self._router_needs(takes_over is not None)
            router = self._create(RouterActor, needs, *arguments)
            return RayHandle(self, router, router_name=needs["name"], takes_over=takes_over)
        config = self._spec.worker_config(role, member_id, self._model_path, str(native_dir()))
        config = replace(config, cluster_key=self._key)
        pool = self._spec.pool(role)
        needs = self._needs(threads_of(pool), pool.ray_resource, pool.ray_labels, num_gpus=int(pool.takes_card))
        return RayHandle(self, self._create(self._worker_classes[role], needs, config))

    def _needs(self, num_cpus: int, resource: str, labels: str = "", *, num_gpus: int = 0) -> dict[str, Any]:
        """Of a Ray of our own nothing but cards, of which each actor then sees its own: how many workers there are is
        for the spec to say."""
        cards = {"num_gpus": num_gpus} if num_gpus else {}
        if self._runtime.local:
            return {"num_cpus": 0, **cards}
        return {**actor_needs(num_cpus, resource, labels), **cards}

    def _router_needs(self, takes_over: bool) -> dict[str, Any]:
        """By its name clients of Ray find it. It passes orders on to us, so it should run on our node; one that takes
        over runs where the other does, and needs no room of its own there, as the other one ends."""
        if takes_over:
            here = NodeAffinitySchedulingStrategy(self._router_node, soft=False)
            (name,) = (name for name in ROUTER_ACTORS if name != self._router_name)
            return {"num_cpus": 0, "scheduling_strategy": here, "name": name}
        needs = self._needs(1, self._spec.router.ray_resource)
        if not self._spec.router.ray_resource:
            ours = ray.get_runtime_context().get_node_id()
            needs["scheduling_strategy"] = NodeAffinitySchedulingStrategy(ours, soft=True)
        return {**needs, "name": self._router_name}

    async def leaving(self, known: frozenset[str]) -> frozenset[str]:
        return await self._runtime.leaving(known)

    async def lost(self) -> str:
        return await self._runtime.lost()

    def pin_router(self, name: str, node_id: str, address: str, http_address: str) -> None:
        """Another router must be where clients expect it, also if the ports were for us to choose."""
        self._router_name, self._router_node = name, node_id
        port, http_port = (int(each.rpartition(":")[2]) for each in (address, http_address))
        self._router_config = replace(self._router_config, port=port, http_port=http_port)

    def log_tail(self, process: ProcessId | None) -> str:
        """The last words of an actor on this machine."""
        folder = self._runtime.log_dir
        if folder is None or process is None:
            return ""
        lines = [line for path in sorted(folder.glob(f"worker-*-{process.pid}.err")) for line in _tail(path)]
        return "\n".join(line for line in lines if not line.startswith(":"))  # Ray's own marks begin so

    def _create(self, actor_class: type, needs: Mapping[str, Any], *arguments: object) -> ActorHandle[Any]:
        remote_class: Any = ray.remote(actor_class)
        options = remote_class.options(max_restarts=0, max_task_retries=0, **needs)
        try:
            actor: ActorHandle[Any] = options.remote(*arguments)
        except ValueError as error:  # its name is that of another one, which may be about to end
            raise ActorLost(f"it cannot be made: {error}") from error
        return actor


def actor_needs(num_cpus: int, resource: str, labels: str) -> dict[str, Any]:
    """What Ray shall set aside for an actor, and where, as options of Ray; `resource` and `labels` as in `PoolSpec`."""
    resources = {resource: 1.0} if resource else {}
    needs = {"num_cpus": num_cpus, "resources": resources, "scheduling_strategy": "SPREAD"}
    return {**needs, "label_selector": parse_labels(labels)} if labels else needs


class RayHandle:
    """One actor. A `Handle` of `cluster.host`."""

    def __init__(
        self,
        host: RayHost,
        actor: ActorHandle[Any],
        *,
        router_name: str = "",
        takes_over: PublishWorkers | None = None,
    ) -> None:
        self._host = host
        self._actor = actor
        self._router_name = router_name
        self._takes_over = takes_over
        self._process: ProcessId | None = None
        self._address = self._http_address = ""
        self._killed = False

    async def ready(self) -> ReadyReport:
        told = self._takes_over
        arguments = () if told is None else (dict(told.addresses), told.draining, TAKE_OVER_TIMEOUT_S)
        report: dict[str, Any] = await _result(self._actor.start.remote(*arguments))
        local = report.get("node", os.uname().nodename) == os.uname().nodename
        self._process = ProcessId.of(report["pid"]) if local else None
        http_address = report.get("http_address", "")
        if self._router_name:
            self._host.pin_router(self._router_name, report["node_id"], report["address"], http_address)
        self._address, self._http_address = report["address"], http_address
        timings, pool = report.get("timings", {}), report.get("pool", "")
        return ReadyReport(
            report["address"],
            report["incarnation"],
            self._process,
            timings,
            pool,
            http_address,
            report.get("node_id", ""),
        )

    async def gone(self) -> str:
        """As soon as either Ray or, of a process on this machine, the kernel says so: Ray may have to find out first
        that the actor's node is gone."""
        told = asyncio.create_task(self._told_gone())
        watches = [told] if self._process is None else [told, asyncio.create_task(gone(self._process))]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({told}, timeout=REASON_TIMEOUT_S)
            if self._process is not None:
                await gone(self._process)
            reason = told.result() if told.done() else "its process ended"
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)
        if not self._killed and (words := self._host.log_tail(self._process)):
            logger.warning("the last words of process %d:\n%s", self._process.pid if self._process else 0, words)
        return reason

    async def _told_gone(self) -> str:
        try:
            await _result(self._actor.until_gone.remote())
        except ActorLost as error:
            return str(error)
        return "its tripwire returned"

    async def answers(self, timeout_s: float) -> bool:
        if self._http_address and self._host.serves_tls:
            return await answers_tls(self._http_address, timeout_s)
        return await answers(self._address, timeout_s)

    async def stop(self) -> None:
        await _result(self._actor.stop.remote())

    async def retire(self, drain_s: float) -> None:
        await _result(self._actor.retire.remote(drain_s))

    async def set_workers(self, addresses: Mapping[str, str], draining: frozenset[str], timeout_s: float) -> str:
        return str(await _result(self._actor.set_workers.remote(dict(addresses), draining, timeout_s)))

    async def drained(self, worker_id: str, timeout_s: float) -> bool:
        return bool(await _result(self._actor.drained.remote(worker_id, timeout_s)))

    def kill(self, *, force: bool) -> None:
        self._killed = True
        try:
            ray.kill(self._actor, no_restart=True)
        except (RayError, ValueError) as error:
            logger.debug("ray.kill: %s", error)  # it is dead already
        # Ray asks the process to end itself, which a stopped or stuck one does not.
        if force and self._process is not None:
            self._process.signal(signal.SIGKILL)


async def _result(call: Awaitable[ResultT]) -> ResultT:
    """The result of an actor's method. Raises what the method raised if that is ours, else `ActorLost`."""
    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, EngineError):
            raise error.cause from None
        logger.error("an actor failed:\n%s", error)
        raise InternalError(f"{type(error.cause).__name__}: {error.cause}") from None
    except (RayActorError, ActorUnschedulableError, RaySystemError) as error:
        raise ActorLost(_reason(error)) from error


def _reason(error: RayError) -> str:
    """Ray tells an actor's death in a paragraph, with advice; this is the part about the cause."""
    lines = str(error).split("\n")
    if "error raised in its creation task" in lines[0]:
        return f"it cannot be made: {lines[-1].strip() or lines[-2].strip()}"
    text = " ".join(str(error).split())
    if "End of file" in text:
        return "its process was killed, or crashed"
    if (detail := re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text)) is not None:
        return detail[1]
    if "died unexpectedly" in lines[0]:  # of the method that was running: no word about the cause
        return "its process ended"
    return lines[0] or type(error).__name__


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
