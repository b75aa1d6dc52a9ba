"""The Ray under a cluster: one of our own on this machine, started and ended with us, or one that we join.

Everything of a Ray of our own is on the loopback interface and in one folder. Its processes end with ours even if we
are killed: the kernel kills control store and raylet when the thread that started them ends (Ray asks it to), and the
actors when their raylet is gone (`worker.process.exit_with_raylet`). That thread is one of our own, alive until
`close`: on the main thread a signal handler could break into Ray's start, and would leave locks held.

Import this module only after `config.prepare_ray_environment`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import ray
from ray._private import state
from ray.exceptions import RayError

from cluster.config import CLUSTER_ID_VARIABLE, make_private
from cluster.finders import namespace_of
from cluster.processes import ProcessId, end, gone, marked
from cluster.ray_node import lean_ray, loopback_ray, ray_messages_to_log
from cluster.spec import RaySpec
from engine.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EXIT_TIMEOUT_S = 1.0
"""For actors to end after their Ray did; then they are killed."""
KILL_TIMEOUT_S = 5.0
DRAINING_POLL_S = 1.0
"""Ray tells nobody when a node begins to drain: it is asked, in one small call to the control store."""

ResultT = TypeVar("ResultT")


class RayRuntime:
    """A connection to Ray. Made by `start`; whoever made it calls `close`."""

    def __init__(self, *, local: bool, cluster_id: str, folder: Path) -> None:
        """`folder` belongs to this runtime alone, and exists while it does."""
        self.local = local
        self.address = ""
        self.processes: tuple[ProcessId, ...] = ()
        """Control store and raylet of a Ray of our own; none of one that we joined."""
        self._cluster_id = cluster_id
        self._folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")

    @classmethod
    async def start(cls, spec: RaySpec, *, cluster_id: str, name: str, folder: Path, num_actors: int) -> RayRuntime:
        """Join a Ray, or start one with a process ready for each of `num_actors`.

        Raises `UnavailableError` or `ConfigError`; then nothing is left running.
        """
        runtime = cls(local=spec.local, cluster_id=cluster_id, folder=folder)
        init = partial(_init_local, spec, name, folder, num_actors) if spec.local else partial(_join, spec, name)
        async with AsyncExitStack() as failed:
            failed.push_async_callback(runtime.close)
            runtime.address, runtime.processes = await runtime._on_thread(init)
            failed.pop_all()
        return runtime

    @property
    def log_dir(self) -> Path | None:
        """Where actors on this machine write what they print; None if that is not ours to know."""
        return self._folder / "session_latest" / "logs" if self.local else None

    async def lost(self) -> str:
        """Return, with the reason, when a process of our own Ray ends. Never, if we joined one."""
        if not self.processes:
            await asyncio.Event().wait()
        watches = [asyncio.create_task(gone(process)) for process in self.processes]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
        return "a process of Ray ended"

    async def leaving(self, known: frozenset[str]) -> frozenset[str]:
        """Wait until other nodes than those `known` are draining; returns all that are, by id.

        Of a Ray of our own there is no node to lose. A Ray that has no such call tells of none.
        """
        if self.local or not hasattr(state.state, "get_draining_nodes"):
            await asyncio.Event().wait()
        while True:
            try:
                draining = frozenset(await _on_daemon_thread(state.state.get_draining_nodes))
            except (RayError, RuntimeError, OSError) as error:
                logger.warning("Ray does not tell which nodes drain: %s", error)
                draining = known
            if draining != known:
                return draining
            await asyncio.sleep(DRAINING_POLL_S)

    async def close(self) -> None:
        """Disconnect, and end a Ray of our own with every process of it. Bounded by about 15 s; mostly under 1 s."""
        try:
            await self._on_thread(ray.shutdown)
        except (RayError, OSError, RuntimeError) as error:
            logger.warning("ray.shutdown failed: %s", error)
        self._thread.shutdown(wait=False)
        if not self.local:
            return
        left = await _end_marked(self._cluster_id)
        if left:
            logger.error("processes %s did not end", ", ".join(str(process.pid) for process in left))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _on_thread(self, function: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


async def _on_daemon_thread(function: Callable[[], ResultT]) -> ResultT:
    """For a call that waits as long as the control store is away: neither `close` nor the process's end does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not future.done():  # cancelled meanwhile
            set_it()

    def call() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            try:
                result = function()
            except (RayError, RuntimeError, OSError) as error:
                loop.call_soon_threadsafe(settle, partial(future.set_exception, error))
            else:
                loop.call_soon_threadsafe(settle, partial(future.set_result, result))

    threading.Thread(target=call, name="ray-nodes", daemon=True).start()
    return await future


def _init_local(spec: RaySpec, name: str, folder: Path, num_actors: int) -> tuple[str, tuple[ProcessId, ...]]:
    # What a killed predecessor left: two clusters of one name never run at once, so nobody uses it.
    shutil.rmtree(folder, ignore_errors=True)
    make_private(folder.parent)
    make_private(folder)
    try:
        ray_messages_to_log()
        with loopback_ray(), nullcontext() if spec.helpers else lean_ray():
            ray.init(
                address="local",
                include_dashboard=None if spec.helpers else False,
                num_cpus=num_actors,  # Ray starts as many worker processes at once, before they are asked for
                object_store_memory=spec.object_store_bytes,
                namespace=namespace_of(name),
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder),
            )
    except Exception as error:  # edge: Ray raises bare Exception when its processes do not start
        raise UnavailableError(f"a local Ray did not start: {error}") from error
    node = ray._private.worker.global_worker.node
    assert node is not None, "ray.init returned without a node"
    if node.node_ip_address != LOOPBACK:
        logger.warning("this version of Ray listens on %s; only its token protects it there", node.node_ip_address)
    identities = (ProcessId.of(info.process.pid) for entry in node.all_processes.values() for info in entry)
    return node.gcs_address, tuple(identity for identity in identities if identity is not None)


def _join(spec: RaySpec, name: str) -> tuple[str, tuple[ProcessId, ...]]:
    ray_messages_to_log()
    # Else Ray would take the loopback address for the machine's own one, at which that Ray does not listen.
    loopback = spec.address.startswith("127.")
    try:
        with loopback_ray() if loopback else nullcontext():
            context = ray.init(
                address=spec.address, namespace=namespace_of(name), log_to_driver=False, logging_level=logging.ERROR
            )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"ray.address: cannot join the Ray at {spec.address}: {error}") from error
    return str(context["gcs_address"]), ()  # type: ignore[index]  # a RayContext, unless the address is ray://


async def _end_marked(cluster_id: str) -> list[ProcessId]:
    """End every process of this cluster but this one. Returns those that live on."""
    leaving = marked(CLUSTER_ID_VARIABLE, cluster_id)
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            for process in leaving:
                await gone(process)
    except TimeoutError:
        logger.warning("processes %s outlive their Ray", ", ".join(str(p.pid) for p in leaving if p.alive))
    return await end(marked(CLUSTER_ID_VARIABLE, cluster_id), signal.SIGKILL, KILL_TIMEOUT_S)
