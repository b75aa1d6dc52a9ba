"""Runs clusters on Ray. `connect` is the handle to one that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.connection import BatchHandle, ClusterConnection, connect

__all__ = ["BatchHandle", "ClusterConnection", "connect"]


def __getattr__(name: str) -> object:
    """Loaded when it is asked for: the commands, which live here too, do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cluster import connection

    return getattr(connection, name)
