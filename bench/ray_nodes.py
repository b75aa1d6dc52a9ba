"""A Ray of several nodes on this machine, to join and to kill nodes of. Every socket is on 127.0.0.1.

All nodes have that address: Ray's processes keep to the loopback interface at no other. The nodes belong to a process
of their own, because Ray reads its environment while it is imported; they end with it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"
LABEL = ("place", "worker")
OBJECT_STORE_BYTES = 80 << 20
END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class RayAddress:
    address: str
    client_address: str
    """`ray://` of its Ray client server; empty without one."""
    jobs_url: str = ""
    """Where it takes jobs; empty if it does not."""


def node_environment(token: str) -> dict[str, str]:
    """For every process that starts nodes or joins them."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        # Else whatever joins, and each process of a Ray client server does, looks for 127.0.0.1 at another address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # A dead node is noticed within 2 s rather than 15 s: docs/cluster.md, "Joining a Ray".
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_health_check_initial_delay_ms": "1000",
    }


@contextmanager
def ray_nodes(
    num_nodes: int,
    resources: Mapping[str, float],
    environment: Mapping[str, str],
    client_port: int = 0,
    jobs_port: int = 0,
) -> Iterator[RayAddress]:
    """Nodes that offer `resources` each and have the label `LABEL`, and a head that has neither. With `client_port`,
    the head has a Ray client server there; with `jobs_port`, it takes jobs there."""
    ports = [str(client_port), str(jobs_port)]
    command = [sys.executable, "-m", "bench.ray_nodes", str(num_nodes), json.dumps(resources), *ports]
    nodes = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        line = nodes.stdout.readline()
        if not line:
            raise RuntimeError("Ray's nodes did not start")
        yield RayAddress(**json.loads(line))
    finally:
        nodes.stdin.close()  # asks it to end
        try:
            nodes.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            nodes.kill()
            nodes.wait(END_TIMEOUT_S)
        nodes.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def main(num_nodes: int, resources: Mapping[str, float], client_port: int, jobs_port: int) -> None:
    """Start the nodes, say where, and end them when standard input ends."""
    from ray._private import node
    from ray._private.parameter import RayParams

    from cluster.ray_node import lean_ray, loopback_ray

    with ExitStack() as stack:
        # Short: the kernel limits the length of a socket's path.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvr-", ignore_cleanup_errors=True))
        address = ""
        for number in range(num_nodes + 1):
            takes_jobs = number == 0 and bool(jobs_port)
            with loopback_ray(), lean_ray(jobs=takes_jobs):
                params = RayParams(
                    node_ip_address=LOOPBACK,
                    gcs_address=address or None,
                    num_cpus=8 * (os.cpu_count() or 1),
                    num_gpus=0,
                    resources=dict(resources) if number else None,
                    object_store_memory=OBJECT_STORE_BYTES,
                    labels=dict([LABEL]) if number else None,
                    include_dashboard=takes_jobs,
                    dashboard_host=LOOPBACK,
                    dashboard_port=jobs_port or None,  # type: ignore[arg-type]  # Ray says bool, and means a number
                    dashboard_agent_listen_port=_free_port() if takes_jobs else None,
                    min_worker_port=0,
                    max_worker_port=0,
                    node_manager_port=0,
                    ray_client_server_port=client_port or None if number == 0 else None,
                    temp_dir=folder,
                )
                started: Any = node.Node(params, head=number == 0, shutdown_at_exit=False, spawn_reaper=False)
                stack.callback(started.kill_all_processes, check_alive=False, allow_graceful=False)
                address = address or str(started.gcs_address)
        client = f"ray://{LOOPBACK}:{client_port}" if client_port else ""
        jobs = f"http://{LOOPBACK}:{jobs_port}" if jobs_port else ""
        print(json.dumps({"address": address, "client_address": client, "jobs_url": jobs}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
