"""Rules for the fields of frames: each returns a value that keeps it, or raises `Invalid` with the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Invalid(Exception):
    """A field's value breaks its rule; the message is the rule."""


Check = Callable[[Any], Any]


def _utf8(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise Invalid("text without lone surrogates") from None


def number(bits: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not int or not 0 <= value < 1 << bits:
            raise Invalid(f"an integer in [0, 2^{bits})")
        return value

    return check


def text(max_bytes: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not str or len(value) > max_bytes or not (value.isascii() or len(_utf8(value)) <= max_bytes):
            raise Invalid(f"text of at most {max_bytes} bytes")
        return value

    return check


def blob(size: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not bytes or len(value) != size:
            raise Invalid(f"{size} bytes")
        return value

    return check


def bytes_up_to(max_bytes: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not bytes or len(value) > max_bytes:
            raise Invalid(f"at most {max_bytes} bytes")
        return value

    return check


def records(size: int, most: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not bytes or len(value) % size or not 0 < len(value) <= most * size:
            raise Invalid(f"1 to {most} records of {size} bytes")
        return value

    return check


def optional(inner: Check) -> Check:
    def check(value: Any) -> Any:
        return None if value is None else inner(value)

    return check


def tuple_of(inner: Check, max_items: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) not in (tuple, list) or len(value) > max_items:
            raise Invalid(f"a list of at most {max_items} items")
        return tuple(inner(item) for item in value)

    return check


def flat_map(value: Any) -> Any:
    """Keys are text; `KvLayout.from_wire` judges the rest."""
    if type(value) is not dict or len(value) > 16:
        raise Invalid("a map of at most 16 entries")
    for key, item in value.items():
        if type(key) is not str or type(item) not in (int, str):
            raise Invalid("a map from text to integers and texts")
    return value
