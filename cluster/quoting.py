"""Quotes what came from elsewhere, a file or a user, in an error: enough to recognize it, never all of it."""

from __future__ import annotations

MAX_CHARS = 80


def shortened(text: str) -> str:
    """At most `MAX_CHARS` of `text`, on one line."""
    line = " ".join(text[: 4 * MAX_CHARS].split())
    return line if len(text) <= MAX_CHARS else line[: MAX_CHARS - 1] + "…"


def quoted(text: str) -> str:
    """In quotes, with anything that is not printable escaped; at most `MAX_CHARS` of it."""
    return repr(text) if len(text) <= MAX_CHARS else repr(text[: MAX_CHARS - 1] + "…")
