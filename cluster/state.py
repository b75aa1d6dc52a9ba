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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from cluster.config import folder_error, make_folder, state_dir
from cluster.processes import ProcessId
from cluster.spec import check_name, is_name
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
    http_address: str = ""
    """Where HTTP clients connect; empty until the router serves."""
    http_url: str = ""
    """The same, with its scheme."""
    ray_processes: tuple[ProcessId, ...] = ()
    """Of a Ray of our own; empty if it joined one."""

    @property
    def alive(self) -> bool:
        return self.process.alive


def state_path(name: str) -> Path:
    """Raises `ConfigError` if no cluster can have this name, as everything here does that takes one."""
    check_name(name)
    return state_dir() / f"{name}.json"


def lock_path(name: str) -> Path:
    return state_path(name).with_suffix(".lock")


@contextmanager
def sole_owner(name: str) -> Iterator[None]:
    """Hold the right to be cluster `name`. The kernel takes it back when this process ends, however it ends.

    Raises `ConfigError` saying who holds it.
    """
    path = lock_path(name)
    make_folder(path.parent)
    with _locked(name, path) as lock:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is still held: see `_locked`


def _locked(name: str, path: Path) -> TextIO:
    while True:
        try:
            lock = open(path, "a+")  # noqa: SIM115  # not "w": the holder's process id is in it
        except OSError as error:
            raise folder_error(path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                pid = lock.read()
                raise runs_already(name, int(pid) if pid.isdecimal() else 0) from None
        # The holder before may have removed the file after we opened it: then the lock on it keeps nobody out.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        lock.close()


def runs_already(name: str, pid: int) -> ConfigError:
    """Says where. `pid` is that of its `up`; 0: not known yet."""
    record = read_record(name)
    serves = record is not None and record.process.pid == pid and record.router_address
    where = f"serves {record.router_address}" if record is not None and serves else "is starting"
    who = f" (process {pid})" if pid else ""
    return ConfigError(f"cluster {name!r} runs already{who} and {where}; `kvrelay down {name}` stops it")


def nothing_runs(name: str | None) -> str:
    """`name` is what was looked for; None: any cluster."""
    return "no cluster runs here" if name is None else f"no cluster {name!r} runs here"


def log_path(name: str) -> Path:
    """Where a detached `up` writes."""
    return state_path(name).with_suffix(".log")


def write_record(record: ClusterRecord) -> None:
    """Replace the file of `record.name`: readers see the old or the new one, never a part.

    Raises `ConfigError` if it cannot be written; the old one stays.
    """
    path = state_path(record.name)
    make_folder(path.parent)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{record.name}.")  # mode 0600
        with ExitStack() as failed:
            failed.callback(os.unlink, temporary)
            with os.fdopen(descriptor, "w") as file:
                json.dump({"version": VERSION, **asdict(record)}, file, indent=1)
            os.replace(temporary, path)
            failed.pop_all()
    except OSError as error:
        raise folder_error(path, error) from error


def read_record(name: str) -> ClusterRecord | None:
    """What the file of `name` says, alive or not; None if there is none, or none that makes sense.

    Raises `ConfigError` if it cannot be read.
    """
    path = state_path(name)
    try:
        data = json.loads(path.read_text())
        return _record_from(data) if data.get("version") == VERSION else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise folder_error(path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # damaged, or of another version: not a cluster that we could talk about


def remove_record(name: str, cluster_id: str) -> None:
    """Remove the file of `name` if it still is that of `cluster_id`: a later `up` may have replaced it."""
    record = read_record(name)
    if record is None or record.cluster_id == cluster_id:
        state_path(name).unlink(missing_ok=True)


def running() -> list[ClusterRecord]:
    """Every running cluster of this user, by name."""
    return [record for name in names() if (record := running_record(name)) is not None]


def names() -> list[str]:
    """Clusters of which there is a record, running or not."""
    try:
        entries = os.listdir(state_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise folder_error(state_dir(), error) from error
    stems = (Path(entry).stem for entry in entries if entry.endswith(".json"))
    return sorted(stem for stem in stems if is_name(stem))


def running_record(name: str) -> ClusterRecord | None:
    """The running cluster `name`, which may still be starting.

    The record of a dead one stays: by it `kvrelay down` finds what that cluster left.
    """
    record = read_record(name)
    return record if record is not None and record.alive else None


def find_running(name: str | None = None) -> ClusterRecord:
    """The cluster `name`, or the only one that runs, ready to be asked at its `router_address`.

    Raises `ConfigError` if there is none, or if several run and `name` is None; `UnavailableError` while it starts.
    """
    found = running() if name is None else list(filter(None, [running_record(name)]))
    if not found:
        raise ConfigError(f"{nothing_runs(name)}; start one with `kvrelay up`")
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
