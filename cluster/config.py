"""Where things are kept, and the environment: this module alone reads it, and writes what Ray reads from it.

    KVRELAY_HOME     everything below one folder: models in `cache`, running clusters in `state`
    KVRELAY_API_KEY  goes with every call of a command to a router
    XDG_CACHE_HOME, XDG_STATE_HOME     otherwise, as the XDG base directory specification says
    KVRELAY_CLUSTER_KEY        64 hexadecimal digits that routers and workers know each other by; by default `up` makes
                               new ones each time
    KVRELAY_CLUSTER_KEY_FILE   a file that holds them

The specification of a cluster itself comes from a file (`cluster.spec_file`) or from defaults, never from here.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cluster.spec import ClusterSpec, check_name
from cluster.spec_file import load_spec
from engine.cluster_key import ClusterKey
from engine.errors import ConfigError

CLUSTER_ID_VARIABLE = "KVRELAY_CLUSTER_ID"
"""Marks every process that descends from one `kvrelay up`, so that `down` can tell ours from others."""
HOME_REMEDY = "set KVRELAY_HOME to a folder that you can write"
_KEY_VARIABLE = "KVRELAY_CLUSTER_KEY"
_KEY_FILE_VARIABLE = "KVRELAY_CLUSTER_KEY_FILE"
MAX_SOCKET_PATH = 107
_RAY_SOCKET_PART = 70
"""What Ray adds to its folder: `/session_<time>_<pid>/sockets/plasma_store`."""

__all__ = [
    "CLUSTER_ID_VARIABLE",
    "ClusterSpec",
    "api_key",
    "child_environment",
    "control_path",
    "default_model_dir",
    "folder_error",
    "inherited_cluster_id",
    "load_spec",
    "make_folder",
    "make_private",
    "native_dir",
    "prepare_ray_environment",
    "ray_dir",
    "state_dir",
    "take_cluster_key",
]


def default_model_dir() -> Path:
    """Where pulled and converted models are kept."""
    return _base("cache", "XDG_CACHE_HOME", ".cache") / "models"


def native_dir() -> Path:
    """Where workers keep the native libraries that they compile."""
    return _base("cache", "XDG_CACHE_HOME", ".cache") / "native"


def api_key() -> str | None:
    """Of whoever runs the command; None if there is none."""
    return os.environ.get("KVRELAY_API_KEY") or None


def state_dir() -> Path:
    """Where running clusters are recorded, with their logs."""
    return _base("state", "XDG_STATE_HOME", ".local/state")


def ray_dir(name: str) -> Path:
    """Folder of the Ray of our own that cluster `name` starts: sockets and logs, removed when it stops.

    Beside the state if the paths of sockets, which the kernel limits, fit there; else below the temporary folder.
    """
    check_name(name)
    beside = state_dir() / "ray" / name
    if len(str(beside)) + _RAY_SOCKET_PART <= MAX_SOCKET_PATH:
        return beside
    digest = hashlib.sha256(str(beside).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}" / digest


def control_path(name: str) -> Path:
    """Socket at which the `up` of cluster `name` takes orders."""
    folder = ray_dir(name)  # where paths of sockets fit
    return folder.with_name(f"{folder.name}.sock")


def make_private(folder: Path) -> None:
    """Whoever owns the folder of the sockets owns the cluster, and it may lie in a temporary folder that all share.

    Raises `ConfigError` if it belongs to somebody else.
    """
    make_folder(folder)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to somebody else; set KVRELAY_HOME to a short path of your own")


def make_folder(path: Path, *, private: bool = True, remedy: str = HOME_REMEDY) -> Path:
    """`path`, made if it is not there; `private` ones for their user alone. Every folder of ours is made here.

    Raises `ConfigError` naming it, with the `remedy`, if it cannot be made, written, or is no folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
    except OSError as error:
        raise folder_error(path, error, remedy) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise folder_error(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)), remedy)
    return path


def folder_error(path: Path, error: OSError, remedy: str = HOME_REMEDY) -> ConfigError:
    """What to say when a file or folder of ours cannot be used."""
    problem = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or str(error)
    return ConfigError(f"cannot use {path}: {problem}; {remedy}")


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
    # torch's default for NCCL ends the process when a communicator fails. Links have deadlines of their own, and abort.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # A note on stderr about a CUDA variable, for every worker.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def take_cluster_key() -> ClusterKey | None:
    """The key that the environment names, if it does. It is taken out of the environment: no child inherits it.

    Raises `ConfigError` naming the variable.
    """
    text = os.environ.pop(_KEY_VARIABLE, None)
    path = os.environ.get(_KEY_FILE_VARIABLE)
    if text and path:
        raise ConfigError(f"{_KEY_VARIABLE} and {_KEY_FILE_VARIABLE} are both set")
    try:
        if path:
            return ClusterKey.read(Path(path))
        return ClusterKey.parse(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{_KEY_FILE_VARIABLE if path else _KEY_VARIABLE}: {error}") from error


def child_environment(cluster_id: str) -> Mapping[str, str]:
    """For a detached `up`."""
    return {**os.environ, CLUSTER_ID_VARIABLE: cluster_id}


def inherited_cluster_id() -> str:
    """What `child_environment` gave to this process; empty if nothing did."""
    return os.environ.get(CLUSTER_ID_VARIABLE, "")


def _base(folder: str, variable: str, default: str) -> Path:
    home = os.environ.get("KVRELAY_HOME")
    try:
        if home:
            return Path(home).expanduser().absolute() / folder
        xdg = os.environ.get(variable)
        # The XDG specification: a relative path is invalid, and ignored.
        root = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / default
    except RuntimeError as error:  # no home folder is known, of this user or of ~somebody
        raise ConfigError(f"{error}; {HOME_REMEDY}") from error
    return root / "kvrelay"
