"""Stops a cluster from outside its own process, and clears up after one that could not do it itself."""

from __future__ import annotations

import asyncio
import shutil
import signal

from cluster import state
from cluster.config import CLUSTER_ID_VARIABLE, control_path, ray_dir
from cluster.processes import ProcessId, end, marked
from engine.errors import ConfigError, UnavailableError

STOP_TIMEOUT_S = 30.0
"""For `kvrelay up` to take its cluster down in order."""
KILL_TIMEOUT_S = 5.0


def take_down(name: str | None) -> list[str]:
    """Stop cluster `name`, or the only one, or else clear up after all that died; returns which, most often one.

    Asks first; kills what does not end within `STOP_TIMEOUT_S`, and only processes that are still those of the record.
    Raises `ConfigError` if several run and `name` is None, `UnavailableError` if something survived.
    """
    return [each for each in _choose(name) if asyncio.run(_take_down(each))]


def _choose(name: str | None) -> list[str]:
    if name is not None:
        return [name]  # a dead one too: it may have left something
    alive = [record.name for record in state.running()]
    if len(alive) > 1:
        raise ConfigError(f"several clusters run here: {', '.join(alive)}; say which")
    return alive or state.names()


async def _take_down(name: str) -> bool:
    """Whether there was anything of it."""
    record = state.read_record(name)
    if record is not None:
        await end([record.process], signal.SIGTERM, STOP_TIMEOUT_S)
        left = await end(_processes(record), signal.SIGKILL, KILL_TIMEOUT_S)
        if left:
            raise UnavailableError(f"processes {', '.join(str(process.pid) for process in left)} do not end")
    leftovers = (state.state_path(name), state.lock_path(name), ray_dir(name), control_path(name))
    if not any(path.exists() for path in leftovers):
        return record is not None
    try:
        with state.sole_owner(name):
            shutil.rmtree(ray_dir(name), ignore_errors=True)
            control_path(name).unlink(missing_ok=True)
            state.state_path(name).unlink(missing_ok=True)
    except ConfigError:
        if record is None:
            raise
        # else another `up` has taken the name, and what was left with it
    return True


def _processes(record: state.ClusterRecord) -> list[ProcessId]:
    """Whatever is left of the cluster."""
    recorded = [record.process, *record.ray_processes]
    recorded += [member.process for member in record.members if member.process is not None]
    by_mark = marked(CLUSTER_ID_VARIABLE, record.cluster_id)
    return [process for process in dict.fromkeys((*recorded, *by_mark)) if process.alive]
