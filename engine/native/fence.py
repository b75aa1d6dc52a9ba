"""A full memory barrier, for memory that another process reads while we write. Python has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.native import build


def load_fence(cache: Path) -> Callable[[], None]:
    """Built if `cache` lacks it. Raises `NativeUnavailable`."""
    fence: Callable[[], None] = build.load("fence.c", cache).kvrelay_fence
    return fence
