"""The Ray under a cluster: one of our own on this machine, started and ended with us, or one that we join.

Everything of a Ray of our own is on the loopback interface and in one folder. Its processes end with ours even if we
are killed: the kernel kills control store and raylet (Ray asks it to, for the thread that called `ray.init`, which is
therefore the main thread), and actors follow when their raylet is gone.

Import this module only after `config.prepare_ray_environment`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import ray
from ray.exceptions import RayError

from cluster.config import CLUSTER_ID_VARIABLE
from cluster.processes import ProcessId, end, gone, marked
from cluster.ray_node import lean_ray, loopback_ray
from cluster.spec import RaySpec
from engine.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
END_TIMEOUT_S = 5.0
"""For processes to end after they were told to."""


class RayRuntime:
    """A connection to Ray. Made and closed on the main thread.

    `folder` belongs to this runtime alone; it exists while the runtime does.
    """

    def __init__(self, spec: RaySpec, *, cluster_id: str, name: str, folder: Path, num_actors: int) -> None:
        """Connect, or start a Ray for `num_actors` actors. Raises `UnavailableError`; then nothing is left running."""
        self._cluster_id = cluster_id
        self._local = spec.local
        self._folder = folder
        if spec.local:
            self._start(spec, name, num_actors)
        else:
            self._join(spec, name)
        node = ray._private.worker.global_worker.node
        assert node is not None, "ray.init returned without a node"
        self._processes = tuple(
            identity
            for entry in node.all_processes.values()
            for info in entry
            if (identity := ProcessId.of(info.process.pid)) is not None
        )
        self.address: str = node.gcs_address

    @property
    def local(self) -> bool:
        return self._local

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """Control store and raylet of a Ray of our own; none of one that we joined."""
        return self._processes

    @property
    def log_dir(self) -> Path | None:
        """Where actors on this machine write what they print; None if that is not ours to know."""
        return self._folder / "session_latest" / "logs" if self._local else None

    async def lost(self) -> str:
        """Return, with the reason, when a process of our own Ray ends. Never, if we joined one.

        The raylet's actors outlive it (they take a dead raylet that nobody reaped for alive), so `close` must follow.
        """
        if not self._processes:
            await asyncio.Event().wait()
        watches = [asyncio.create_task(gone(process)) for process in self._processes]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
        return f"a process of Ray ended; its logs are in {self.log_dir}"

    def close(self) -> None:
        """Disconnect, and end a Ray of our own with every process of it. Blocks up to about `END_TIMEOUT_S`, twice."""
        try:
            ray.shutdown()
        except (RayError, OSError, RuntimeError) as error:
            logger.warning("ray.shutdown failed: %s", error)
        if not self._local:
            return
        left = asyncio.run(_end_marked(self._cluster_id))
        if left:
            logger.error("processes %s did not end", ", ".join(str(process.pid) for process in left))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, spec: RaySpec, name: str, num_actors: int) -> None:
        # What a killed predecessor left: two clusters of one name never run at once, so nobody uses it.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)
        try:
            with loopback_ray(), nullcontext() if spec.helpers else lean_ray():
                ray.init(
                    address="local",
                    include_dashboard=None if spec.helpers else False,
                    num_cpus=num_actors,  # Ray starts as many worker processes at once, before they are asked for
                    object_store_memory=spec.object_store_bytes,
                    namespace=f"kvrelay-{name}",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=LOOPBACK,
                    _temp_dir=str(self._folder),
                )
        except Exception as error:  # edge: Ray raises bare Exception when its processes do not start
            ray.shutdown()
            asyncio.run(_end_marked(self._cluster_id))
            raise UnavailableError(f"a local Ray did not start: {error}; its logs are in {self._folder}") from error

    def _join(self, spec: RaySpec, name: str) -> None:
        try:
            ray.init(
                address=spec.address, namespace=f"kvrelay-{name}", log_to_driver=False, logging_level=logging.ERROR
            )
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(f"ray.address: cannot join the Ray at {spec.address}: {error}") from error


async def _end_marked(cluster_id: str) -> list[ProcessId]:
    """End every process of this cluster but this one: there is none unless something died out of order."""
    await _all_gone(marked(CLUSTER_ID_VARIABLE, cluster_id))
    return await end(marked(CLUSTER_ID_VARIABLE, cluster_id), signal.SIGKILL, END_TIMEOUT_S)


async def _all_gone(processes: list[ProcessId]) -> None:
    try:
        async with asyncio.timeout(1.0):
            for process in processes:
                await gone(process)
    except TimeoutError:
        logger.warning("processes %s outlive Ray; killing them", ", ".join(str(p.pid) for p in processes if p.alive))
