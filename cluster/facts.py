"""What this machine has that matters to a cluster, as one record. Asks the system; `cluster.doctor` decides.

Linux's files are read where there are any; what cannot be known is None, or empty.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from cluster.spec import ROLES, ClusterSpec
from cluster.state import running_record
from engine.errors import ConfigError, ModelError
from engine.machine import memory_bytes
from engine.model_store import BUILT_IN_NAMES, resolve_model
from router.tenants import load_tenants
from router.tls import load_server_tls

PACKAGES = ("ray", "torch", "grpcio", "protobuf", "uvloop")
COMPILERS = (("cc", "gcc", "clang"), ("c++", "g++", "clang++"))
"""Of C and of C++; one of each is enough."""
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFact:
    """A node of a Ray that the spec joins."""

    address: str
    clock_ahead_s: float
    """Of ours; known as well as `clock_error_s` says."""
    clock_error_s: float
    versions: Mapping[str, str]
    """Of Python and of `PACKAGES`; those that are missing there are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    cpu_flags: frozenset[str]
    """As in /proc/cpuinfo; empty: not known."""
    machine: str
    """x86_64, aarch64 and so on."""
    cores: float
    """That the processes here may use: of the machine, or of the container's quota."""
    load: float
    """Processes that wanted a core, mean of a minute."""
    memory_bytes: int
    available_bytes: int
    shm_bytes: int | None
    """Free in /dev/shm."""
    anonymous_huge_pages: str = ""
    """always, madvise or never; of weights."""
    shared_huge_pages: str = ""
    """The same of shared memory, in which KV pools are; also advise, within_size, deny, force."""
    open_files: int
    """Soft limit."""
    open_files_hard: int
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of `PACKAGES`; those that are missing are left out."""
    compilers: tuple[str, ...] = ()
    """Paths of a C and a C++ compiler, where there are any."""
    cards: tuple[Card, ...] = ()
    nccl: str = ""
    ports: Mapping[str, str] = field(default_factory=dict)
    """Of the router that cannot be listened on, by the field that names them: why."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """The same of addresses."""
    runs: bool = False
    """The cluster of this name runs: its ports are taken by itself."""
    model: str = "ready"
    """ready, make (from a file that is here), fetch (over the network), or the reason why there is none."""
    router_files: str = ""
    """What is wrong with a file of keys or certificates that the spec names."""
    disk_bytes: int
    """Free where models are kept."""
    nodes: tuple[NodeFact, ...] = ()
    nodes_error: str = ""
    """Why the Ray that the spec joins could not be asked."""


def gather(spec: ClusterSpec, models: Path) -> Facts:
    """Of this machine, for this spec; `models` is where models are kept. Starts nothing and fetches nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cards, nccl = _cards()
    return Facts(
        cpu_flags=_cpu_flags(),
        machine=platform.machine(),
        cores=_cores(),
        load=os.getloadavg()[0],
        memory_bytes=memory_bytes(),
        available_bytes=psutil.virtual_memory().available,
        shm_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else None,
        anonymous_huge_pages=_chosen(_THP / "enabled"),
        shared_huge_pages=_chosen(_THP / "shmem_enabled"),
        open_files=soft,
        open_files_hard=hard,
        python=platform.python_version(),
        versions=versions(),
        compilers=tuple(path for names in COMPILERS if (path := next(filter(None, map(shutil.which, names)), None))),
        cards=cards,
        nccl=nccl,
        ports=_ports_taken(spec),
        hosts=_foreign_hosts(spec) if spec.ray.local else {},
        runs=running_record(spec.name) is not None,
        model=_model(spec.model, models),
        router_files=_router_files_fault(spec) if spec.ray.local else "",
        disk_bytes=shutil.disk_usage(_first_existing(models)).free,
    )


def check_router_files(spec: ClusterSpec) -> None:
    """Read the files of keys and certificates of its router. Raises `ConfigError` that names setting and file."""
    config = spec.router.config(model_path="", model_name="any", router_id="any")
    load_server_tls(config)
    load_tenants(config.api_keys)


def _router_files_fault(spec: ClusterSpec) -> str:
    try:
        check_router_files(spec)
    except ConfigError as error:
        return str(error)
    return ""


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        next((line for line in lines if line.startswith(("flags", "Features"))), ":").split(":")[1].split()
    )


def _cores() -> float:
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = _CGROUP_CPU.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _chosen(path: Path) -> str:
    """The word in brackets, as the kernel marks a setting."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _cards() -> tuple[tuple[Card, ...], str]:
    try:
        import torch
    except ImportError:
        return (), ""
    if not torch.cuda.is_available():
        return (), ""
    every = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""  # type: ignore[no-untyped-call]
    return tuple(Card(each.name, each.total_memory) for each in every), nccl


def _ports_taken(spec: ClusterSpec) -> dict[str, str]:
    taken = {}
    for name, port in spec.router.ports.items():
        if error := _cannot_bind(spec.router.host, port):
            taken[f"router.{name}"] = f"{spec.router.host}:{port}: {error}"
    return taken


def _foreign_hosts(spec: ClusterSpec) -> dict[str, str]:
    """Of pools: workers of a Ray of our own run on this machine."""
    hosts = {role: spec.pool(role).host for role in ROLES if spec.pool(role).replicas}
    errors = {f"pools.{role}.host": (host, _cannot_bind(host, 0)) for role, host in hosts.items() if host != "node"}
    return {name: f"{host}: {error}" for name, (host, error) in errors.items() if error}


def _cannot_bind(host: str, port: int) -> str:
    """Why not; empty if it can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _model(name: str, models: Path) -> str:
    if name.lower() in BUILT_IN_NAMES:
        return "ready" if any(models.glob(f"{name.lower()}-*")) else "make"
    path = Path(name)
    if path.is_dir() and any(path.glob("*.safetensors")):
        try:
            resolve_model(name, models)
        except ModelError as error:
            return str(error)
        return "ready"
    if path.exists():
        return "make"
    return "fetch" if name.count("/") == 1 and not name.startswith((".", "/")) else f"there is no file or folder {name}"


def _first_existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())
