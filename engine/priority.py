"""How urgent a request is: one number from client to scheduler; the smaller goes first. Its range stands here."""

from __future__ import annotations

from engine.errors import RequestError

MAX_PRIORITY = 8


def check_priority(priority: int) -> None:
    """Raises `RequestError` (field `priority`) unless it is in [-MAX_PRIORITY, MAX_PRIORITY]."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError("priority", f"must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {priority}")
