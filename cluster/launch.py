"""One run of a cluster in this process, from a spec to the last process gone.

    model ─▶ Ray ─▶ router and workers, all at once ─▶ ready ─▶ (a job, or until a signal) ─▶ stop in order ─▶ Ray ends

Runs on the main thread, which alone hears signals.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from cluster import state
from cluster.account import Account
from cluster.changes import pools_wanted, router_wanted
from cluster.config import (
    control_path,
    default_model_dir,
    make_folder,
    make_private,
    prepare_ray_environment,
    ray_dir,
    take_cluster_key,
)
from cluster.control import serve_orders
from cluster.operations import Operations
from cluster.pools import check_pools
from cluster.processes import ProcessId
from cluster.spec import DECODE, PREFILL, ROLES, ClusterSpec
from cluster.supervisor import Snapshot, Supervisor
from cluster.updates import Failed, Listener, StageBegan, StageDone, StageMoved
from engine.cluster_key import ClusterKey
from engine.errors import ConfigError, EngineError
from engine.machine import memory_bytes
from engine.model_config import load_model_config
from engine.model_store import resolve_model

if TYPE_CHECKING:
    from cluster.ray_runtime import RayRuntime

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Job = Callable[[state.ClusterRecord], Awaitable[None]]


class ClusterRun:
    """Owns everything that one run of a cluster leaves on the machine: the record, the Ray, the processes."""

    def __init__(
        self, spec: ClusterSpec, tell: Listener, *, started: float, new_log: Path | None = None, cluster_id: str = ""
    ) -> None:
        """`started` is the monotonic time at which the command began; `cluster_id` is made unless it was agreed with
        somebody. `new_log` is where this process writes if it has no terminal: it becomes the cluster's log when the
        name is ours, so that another run of the name keeps its own."""
        self._spec = spec
        self._tell = tell
        self._started = started
        self._new_log = new_log
        self._ray_began = False
        self._cluster_id = cluster_id or uuid.uuid4().hex
        self._ready = asyncio.Event()
        self._cluster_key = take_cluster_key() or ClusterKey.generate()
        self._interrupted = False
        self._supervisor: Supervisor | None = None

    def run(self, job: Job | None = None) -> None:
        """Bring the cluster up; do `job`, or serve until SIGINT, SIGTERM or SIGHUP; take everything down.

        A second signal does not wait for requests that run. Raises the `EngineError` for which the cluster could not
        start, did not stay up, or the job failed; `KeyboardInterrupt` if a signal came before it was ready. However it
        ends, no process, record or Ray of it is left.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _exit_on_signal)
        try:
            with state.sole_owner(self._spec.name):
                if self._new_log is not None:
                    os.replace(self._new_log, state.log_path(self._spec.name))
                try:
                    self._run(job)
                finally:
                    state.remove_record(self._spec.name, self._cluster_id)
                    if self._new_log is not None and not self._ray_began:  # all that it could tell is its error
                        state.log_path(self._spec.name).unlink(missing_ok=True)
        except EngineError as error:
            self._tell(Failed(str(error)))
            raise

    def _run(self, job: Job | None) -> None:
        self._check_ports()
        account = Account(self._first_record(), self._spec, self._tell, self._started)
        model_path = self._get_model()
        asyncio.run(self._run_on_ray(account, model_path, job))
        if self._interrupted and not self._ready.is_set():
            raise KeyboardInterrupt

    def _check_ports(self) -> None:
        """Say at once, rather than seconds later, that a port is in use."""
        host = self._spec.router.host
        for name, port in self._spec.router.ports.items():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    raise ConfigError(f"router.{name}: cannot listen on {host}:{port}: {error.strerror}") from error

    def _first_record(self) -> state.ClusterRecord:
        return state.ClusterRecord(
            name=self._spec.name,
            cluster_id=self._cluster_id,
            process=ProcessId.mine(),
            router_address="",
            model=self._spec.model,
            ready=False,
            started_at=time.time(),
            log_path="" if self._new_log is None else str(state.log_path(self._spec.name)),
            ray_address="",
        )

    def _get_model(self) -> str:
        began = time.monotonic()
        self._tell(StageBegan("model", self._spec.model))
        folder = resolve_model(
            self._spec.model,
            make_folder(default_model_dir(), private=False),
            lambda part, share: self._tell(StageMoved("model", part, share)),
        )
        self._tell(StageDone("model", time.monotonic() - began, self._spec.model))
        self._check_fits(str(folder), self._spec)
        return str(folder)

    async def _run_on_ray(self, account: Account, model_path: str, job: Job | None) -> None:
        self._listen()
        ray = await self._start_ray()
        self._listen()  # again: Ray has put handlers of its own in front
        try:
            account.ray_started(ray.address, ray.processes)
            if not self._interrupted:
                await self._serve(ray, account, model_path, job)
        finally:
            await ray.close()

    async def _start_ray(self) -> RayRuntime:
        began = time.monotonic()
        self._ray_began = True
        spec = self._spec.ray
        self._tell(StageBegan("ray", spec.address))
        prepare_ray_environment(cluster_id=self._cluster_id, local=spec.local, auth_token=secrets.token_hex(32))
        from cluster.ray_runtime import RayRuntime  # Ray reads its environment while it is imported

        starting = asyncio.create_task(
            RayRuntime.start(
                spec,
                cluster_id=self._cluster_id,
                name=self._spec.name,
                folder=ray_dir(self._spec.name),
                num_actors=1 + sum(self._spec.pool(role).replicas for role in ROLES),
            )
        )
        await asyncio.sleep(0)
        _import_actors()  # Ray's start, on a thread of its own, is mostly waiting for its processes
        ray = await starting
        self._tell(StageDone("ray", time.monotonic() - began, ray.address))
        return ray

    async def _serve(self, ray: RayRuntime, account: Account, model_path: str, job: Job | None) -> None:
        from cluster.ray_host import RayHost
        from decode_worker.actor import DecodeActor
        from prefill_worker.actor import PrefillActor

        def changed(snapshot: Snapshot) -> None:
            account.changed(snapshot)
            operations.changed(snapshot)
            if snapshot.ready:
                self._ready.set()

        host = RayHost(self._spec, model_path, ray, {PREFILL: PrefillActor, DECODE: DecodeActor}, self._cluster_key)
        pools, limits = pools_wanted(self._spec), self._spec.supervision
        router = router_wanted(self._spec)
        self._supervisor = supervisor = Supervisor(host, pools, limits, changed, router=router)
        operations = Operations(self._spec, supervisor, partial(self._check_fits, model_path), host.use)
        socket_path = control_path(self._spec.name)
        make_private(socket_path.parent)
        try:
            async with serve_orders(socket_path, operations.carry_out):
                await self._supervise(supervisor, account, job)
        finally:
            await operations.close()

    def _check_fits(self, model_path: str, spec: ClusterSpec) -> None:
        if spec.ray.local:
            check_pools(spec, load_model_config(Path(model_path)), memory_bytes())

    async def _supervise(self, supervisor: Supervisor, account: Account, job: Job | None) -> None:
        if job is None:
            await supervisor.run()
            return
        work = asyncio.create_task(self._do(job, account, supervisor))
        try:
            await supervisor.run()
        finally:
            if not work.done():
                work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _do(self, job: Job, account: Account, supervisor: Supervisor) -> None:
        await self._ready.wait()
        try:
            await job(account.record)
        finally:
            supervisor.request_stop()

    def _listen(self) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        again, self._interrupted = self._interrupted, True
        if self._supervisor is not None:
            if again:
                self._supervisor.give_up("interrupted twice")
            self._supervisor.request_stop()
        elif again:
            os._exit(EXIT_INTERRUPTED)  # Ray does not come up in time; the kernel ends what there is of it


def _import_actors() -> None:
    importlib.import_module("cluster.ray_host")
    for role in ROLES:
        importlib.import_module(f"{role}_worker.actor")


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    # While a model is fetched: through every `finally` on the way, like Ctrl-C.
    sys.exit(128 + number)
