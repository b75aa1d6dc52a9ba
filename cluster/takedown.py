"""Stops a cluster from outside its own process, and clears up after one that could not do it itself."""

from __future__ import annotations

import asyncio
import shutil
import signal

from cluster import state
from cluster.config import CLUSTER_ID_VARIABLE, ray_dir
from cluster.processes import ProcessId, end, marked
from engine.errors import ConfigError, UnavailableError

STOP_TIMEOUT_S = 30.0
"""For `kvrelay up` to take its cluster down in order."""
KILL_TIMEOUT_S = 5.0


def take_down(name: str | None) -> str:
    """Stop cluster `name`, or the only one; returns its name, empty if there was none.

    Asks first; kills what does not end within `STOP_TIMEOUT_S`, and only processes that are still those of the record.
    Raises `ConfigError` if several run and `name` is None, `UnavailableError` if something survived.
    """
    record = _choose(name)
    if record is None:
        return ""
    asyncio.run(_take_down(record))
    return record.name


def _choose(name: str | None) -> state.ClusterRecord | None:
    if name is not None:
        return state.read_record(name)  # a dead one too: it may have left something
    records = [record for name in state.names() if (record := state.read_record(name)) is not None]
    alive = [record for record in records if record.alive] or records
    if len(alive) > 1:
        raise ConfigError(f"several clusters run here: {', '.join(record.name for record in alive)}; say which")
    return alive[0] if alive else None


async def _take_down(record: state.ClusterRecord) -> None:
    await end([record.process], signal.SIGTERM, STOP_TIMEOUT_S)
    left = await end(_processes(record), signal.SIGKILL, KILL_TIMEOUT_S)
    if left:
        raise UnavailableError(f"processes {', '.join(str(process.pid) for process in left)} do not end")
    state.remove_record(record.name, record.cluster_id)
    shutil.rmtree(ray_dir(record.name), ignore_errors=True)


def _processes(record: state.ClusterRecord) -> list[ProcessId]:
    """Whatever is left of the cluster."""
    recorded = [record.process, *record.ray_processes]
    recorded += [member.process for member in record.members if member.process is not None]
    by_mark = marked(CLUSTER_ID_VARIABLE, record.cluster_id)
    return [process for process in dict.fromkeys((*recorded, *by_mark)) if process.alive]
