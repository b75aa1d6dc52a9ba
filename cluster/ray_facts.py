"""What the nodes of a Ray that is joined have: one short task on each."""

from __future__ import annotations

import logging
import platform
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.facts import NodeFact, versions
from engine.errors import UnavailableError

TASK_TIMEOUT_S = 30.0


def node_facts(address: str) -> tuple[NodeFact, ...]:
    """Join the Ray at `address`, ask every node, leave. Raises `UnavailableError` with the reason."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UnavailableError(" ".join(str(error).split())) from error
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return tuple(_ask(node["NodeID"], node["NodeManagerAddress"]) for node in alive)
    except RayError as error:
        raise UnavailableError(" ".join(str(error).split())) from error
    finally:
        ray.shutdown()


def _ask(node_id: str, address: str) -> NodeFact:
    task: Any = ray.remote(_tell).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )
    ray.get(task.remote(), timeout=TASK_TIMEOUT_S)  # its process is there now: the next answer is quick
    asked = time.time()
    clock, found = ray.get(task.remote(), timeout=TASK_TIMEOUT_S)
    answered = time.time()
    return NodeFact(address, clock - (asked + answered) / 2, (answered - asked) / 2, found)


def _tell() -> tuple[float, dict[str, str]]:
    return time.time(), {"python": platform.python_version(), **versions()}
