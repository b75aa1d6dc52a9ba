"""What the machine, or the container, has. Knows Linux's files; elsewhere it asks the system."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of cgroup versions 2 and 1, as a container sees them; there is at most one."""


def memory_bytes(container_limits: tuple[Path, ...] = _CONTAINER_LIMITS) -> int:
    """Memory that the processes here can have together: that of the machine, or less if the container is limited.

    A process that takes more is killed by the kernel, whatever it was promised when it asked.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (_limit_in(path) for path in container_limits)
    return min([physical, *(limit for limit in limits if limit is not None)])


def _limit_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file here, or `max`: there is no limit
        return None
