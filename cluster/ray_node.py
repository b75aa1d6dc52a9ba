"""A local Ray on the loopback interface alone, and with only the processes that actors need: control store and raylet.

`ray.init` replaces 127.0.0.1 by the machine's own address, and then every process listens on all interfaces. Its
C++ parts keep to the loopback interface if they are given 127.0.0.1, so `loopback_ray` keeps it.

`ray.init` also starts a dashboard, a log monitor, an autoscaler monitor, a dashboard agent and a runtime environment
agent: five Python processes that we use nothing of. Together they cost 3 s of start on two cores and 400 MB.

`lean_ray` replaces, while `ray.init` runs, the class that starts them by a subclass that does not. If a later Ray calls
other methods, nothing is overridden and its helpers start as always. The two agents are part of the raylet's start,
which insists on them; they are replaced only in versions of Ray where that was tried.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import node, services, worker

logger = logging.getLogger(__name__)

_AGENTS_TRIED_WITH = ("2.60.",)
_AGENT_FLAGS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
_WORKER_FLAG = "--python_worker_command="
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def ray_messages_to_log() -> None:
    """What Ray prints about its workers on standard output, where a script reads our JSON, becomes log lines."""

    def log(data: Any, ignore_prefix: bool) -> None:
        logger.info("ray: %s", " ".join(data["lines"]))

    worker.print_to_stdstream = log


@contextmanager
def loopback_ray() -> Iterator[None]:
    """`ray.init(_node_ip_address="127.0.0.1")` inside takes the address as it is.

    A Ray that has no such function any more is left to choose, and says on which address it listens.
    """
    original = getattr(services, "resolve_ip_for_localhost", None)
    if original is None:
        logger.warning("Ray %s chooses its own address: it may listen on more than 127.0.0.1", ray.__version__)
        yield
        return
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = original


@contextmanager
def lean_ray(*, jobs: bool = False) -> Iterator[None]:
    """`ray.init(address="local")` inside starts no helper processes; with `jobs`, those that take and run jobs: the
    dashboard and both agents. Linux only; elsewhere it changes nothing."""
    if sys.platform != "linux":
        yield
        return
    original = node.Node
    node.Node = _JobNode if jobs else _LeanNode  # type: ignore[misc]
    try:
        yield
    finally:
        node.Node = original  # type: ignore[misc]


class _JobNode(node.Node):
    """Overrides nothing but what starts a helper that jobs do without."""

    def start_monitor(self) -> None:
        """Without: no autoscaler."""

    def start_log_monitor(self) -> None:
        """Without: what actors print stays in their log files."""


class _LeanNode(_JobNode):
    """Overrides nothing but what starts a helper."""

    def start_api_server(self, **_options: Any) -> None:
        """Without: no dashboard, no job submission."""
        self._webui_url = ""

    def start_raylet(self, *args: Any, **options: Any) -> None:
        agent = shutil.which("cat")
        if agent is None or not ray.__version__.startswith(_AGENTS_TRIED_WITH):
            super().start_raylet(*args, **options)
            return
        # Private, so it is only asked for in versions that are known to have it.
        from ray._raylet import persist_port  # type: ignore[attr-defined]  # compiled

        # The raylet waits for the ports of its agents, and ends when an agent does. `cat` waits for the end of its
        # input, a pipe from the raylet, so it goes with the raylet as the agents do. -1 is what an agent without
        # Ray's optional packages writes.
        for port in _AGENT_PORTS:
            persist_port(self._session_dir, self._node_id, port, -1)
        with _agents_replaced(agent):
            super().start_raylet(*args, **options)


def _tied(argument: str) -> str:
    """Of the raylet's command: its workers end with it from their first moment on. One that still starts when the
    raylet dies would look for it for a minute. Where there is no `setpriv`, it does."""
    setpriv = shutil.which("setpriv")
    if setpriv is None or not argument.startswith(_WORKER_FLAG):
        return argument
    return f"{_WORKER_FLAG}{setpriv} --pdeathsig KILL {argument.removeprefix(_WORKER_FLAG)}"


@contextmanager
def _agents_replaced(agent: str) -> Iterator[None]:
    original = services.start_ray_process

    def start(command: list[str], *args: Any, **options: Any) -> Any:
        replaced = [
            next((flag + agent for flag in _AGENT_FLAGS if argument.startswith(flag)), argument) for argument in command
        ]
        return original([_tied(argument) for argument in replaced], *args, **options)

    services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = original
