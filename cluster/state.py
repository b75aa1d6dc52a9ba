"""The record of running clusters: one JSON file each, so that other commands find them, or find that they are gone.

A file is written by the `up` process that it describes, atomically, readable by its user only. Nobody trusts it
further than the process identity in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.config import state_dir
from cluster.processes import ProcessId
from engine.errors import ConfigError, UnavailableError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """One live member: the router or a worker."""

    member_id: str
    role: str
    address: str
    incarnation: str
    process: ProcessId | None
    """None if it runs on another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """A running cluster as its `up` process describes it."""

    name: str
    cluster_id: str
    """Of this run; every process of it carries it in its environment."""
    process: ProcessId
    """`kvrelay up` itself."""
    router_address: str
    """Where clients connect; empty until the router serves."""
    model: str
    ready: bool
    started_at: float
    """Unix time, seconds."""
    log_path: str
    """Of a detached `up`; empty if it writes to its terminal."""
    ray_address: str
    members: tuple[MemberRecord, ...] = ()
    ray_processes: tuple[ProcessId, ...] = ()
    """Of a Ray of our own; empty if it joined one."""

    @property
    def alive(self) -> bool:
        return self.process.alive


def state_path(name: str) -> Path:
    return state_dir() / f"{name}.json"


@contextmanager
def sole_owner(name: str) -> Iterator[None]:
    """Hold the right to be cluster `name`. The kernel takes it back when this process ends, however it ends.

    Raises `ConfigError` saying who holds it.
    """
    state_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(state_dir() / f"{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise runs_already(name, read_record(name)) from None
        yield


def runs_already(name: str, record: ClusterRecord | None) -> ConfigError:
    """Says where; `record` is what is known of it."""
    where = "is starting" if record is None or not record.router_address else f"serves {record.router_address}"
    who = "" if record is None else f" (process {record.process.pid})"
    return ConfigError(f"cluster {name!r} runs already{who} and {where}; `kvrelay down {name}` stops it")


def log_path(name: str) -> Path:
    """Where a detached `up` writes."""
    return state_dir() / f"{name}.log"


def write_record(record: ClusterRecord) -> None:
    """Replace the file of `record.name`: readers see the old or the new one, never a part."""
    path = state_path(record.name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{record.name}.")  # mode 0600
    with ExitStack() as failed:
        failed.callback(os.unlink, temporary)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"version": VERSION, **asdict(record)}, file, indent=1)
        os.replace(temporary, path)
        failed.pop_all()


def read_record(name: str) -> ClusterRecord | None:
    """What the file of `name` says, alive or not; None if there is none, or none that can be read."""
    try:
        data = json.loads(state_path(name).read_text())
        return _record_from(data) if data.get("version") == VERSION else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # damaged, or of another version: not a cluster that we could talk about


def remove_record(name: str, cluster_id: str) -> None:
    """Remove the file of `name` if it still is that of `cluster_id`: a later `up` may have replaced it."""
    record = read_record(name)
    if record is None or record.cluster_id == cluster_id:
        state_path(name).unlink(missing_ok=True)


def running() -> list[ClusterRecord]:
    """Every running cluster of this user, by name. Records of dead ones are removed on the way."""
    return [record for name in names() if (record := running_record(name)) is not None]


def names() -> list[str]:
    """Clusters of which there is a record, running or not."""
    return sorted(path.stem for path in state_dir().glob("*.json"))


def running_record(name: str) -> ClusterRecord | None:
    """The running cluster `name`, which may still be starting. A record whose process is gone is removed."""
    record = read_record(name)
    if record is not None and not record.alive:
        remove_record(name, record.cluster_id)
        return None
    return record


def find_running(name: str | None = None) -> ClusterRecord:
    """The cluster `name`, or the only one that runs, ready to be asked at its `router_address`.

    Raises `ConfigError` if there is none, or if several run and `name` is None; `UnavailableError` while it starts.
    """
    found = running() if name is None else list(filter(None, [running_record(name)]))
    if not found:
        which = "no cluster" if name is None else f"no cluster {name!r}"
        raise ConfigError(f"{which} runs here; start one with `kvrelay up`")
    if len(found) > 1:
        raise ConfigError(f"several clusters run here: {', '.join(record.name for record in found)}; say which")
    if not found[0].router_address:
        raise UnavailableError(f"cluster {found[0].name!r} is still starting")
    return found[0]


def _record_from(data: dict[str, Any]) -> ClusterRecord:
    fields = {key: value for key, value in data.items() if key != "version"}
    fields["process"] = ProcessId(**fields["process"])
    fields["members"] = tuple(
        MemberRecord(**{**member, "process": member["process"] and ProcessId(**member["process"])})
        for member in fields["members"]
    )
    fields["ray_processes"] = tuple(ProcessId(**process) for process in fields["ray_processes"])
    return ClusterRecord(**fields)
