"""Which descriptors a test leaves open. Others of the process may close at any moment, with whoever forgot them."""

from __future__ import annotations

import os
from contextlib import suppress


def open_descriptors() -> frozenset[tuple[str, str]]:
    """Number and target of each."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that this listing used
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


def opened_since(before: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    return open_descriptors() - before
