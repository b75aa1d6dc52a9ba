"""Where things are kept, and the environment: this module alone reads it, and writes what Ray reads from it.

    KVRELAY_HOME     everything below one folder: models in `cache`, running clusters in `state`
    XDG_CACHE_HOME, XDG_STATE_HOME     otherwise, as the XDG base directory specification says

The specification of a cluster itself comes from a file (`cluster.spec_file`) or from defaults, never from here.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cluster.spec import ClusterSpec
from cluster.spec_file import load_spec

CLUSTER_ID_VARIABLE = "KVRELAY_CLUSTER_ID"
"""Marks every process that descends from one `kvrelay up`, so that `down` can tell ours from others."""
MAX_SOCKET_PATH = 107
_RAY_SOCKET_PART = 70
"""What Ray adds to its folder: `/session_<time>_<pid>/sockets/plasma_store`."""

__all__ = [
    "CLUSTER_ID_VARIABLE",
    "ClusterSpec",
    "child_environment",
    "default_model_dir",
    "inherited_cluster_id",
    "load_spec",
    "prepare_ray_environment",
    "ray_dir",
    "state_dir",
]


def default_model_dir() -> Path:
    """Where pulled and converted models are kept."""
    return _base("cache", "XDG_CACHE_HOME", ".cache") / "models"


def state_dir() -> Path:
    """Where running clusters are recorded, with their logs."""
    return _base("state", "XDG_STATE_HOME", ".local/state")


def ray_dir(name: str) -> Path:
    """Folder of the Ray of our own that cluster `name` starts: sockets and logs, removed when it stops.

    Beside the state if the paths of sockets, which the kernel limits, fit there; else below the temporary folder.
    """
    beside = state_dir() / "ray" / name
    if len(str(beside)) + _RAY_SOCKET_PART <= MAX_SOCKET_PATH:
        return beside
    digest = hashlib.sha256(str(beside).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}" / digest


def prepare_ray_environment(*, cluster_id: str, local: bool, auth_token: str) -> None:
    """Set what Ray and its processes read. Before the first `import ray`: Ray reads some of it while it is imported.

    Of a Ray that we join, only the usage report is touched; the rest is between the user and that cluster.
    """
    os.environ[CLUSTER_ID_VARIABLE] = cluster_id
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not local:
        return
    # Ray runs whatever code reaches its ports; a token of our own keeps other users of the machine out, and Ray
    # from leaving one in the home folder.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = auth_token
    # Ray starts workers with a niceness of 15: on a busy machine they would stand still.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # its name is Ray's
    # A note on stderr about a CUDA variable, for every worker.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def child_environment(cluster_id: str) -> Mapping[str, str]:
    """For a detached `up`."""
    return {**os.environ, CLUSTER_ID_VARIABLE: cluster_id}


def inherited_cluster_id() -> str:
    """What `child_environment` gave to this process; empty if nothing did."""
    return os.environ.get(CLUSTER_ID_VARIABLE, "")


def _base(folder: str, variable: str, default: str) -> Path:
    home = os.environ.get("KVRELAY_HOME")
    if home:
        return Path(home).expanduser().absolute() / folder
    xdg = os.environ.get(variable)
    # The XDG specification: a relative path is invalid, and ignored.
    root = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / default
    return root / "kvrelay"
