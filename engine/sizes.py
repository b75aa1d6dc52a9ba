"""Amounts of memory as people write them: `120GB` is decimal, `512MiB` is binary. Knows no setting."""

from __future__ import annotations

import re
from decimal import Decimal

from engine.errors import ConfigError

MAX_BYTES = 1 << 60

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")
_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {"": 1, "KB": 10**3, **_DECIMAL, **_BINARY}


def parse_size(text: str) -> int:
    """Bytes of `text`: a number, or a number and a unit. Raises `ConfigError` that says what is understood.

    A part of a byte is dropped. `120G` is refused, because people mean either unit by it.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join((*_DECIMAL, *_BINARY))
        raise ConfigError(f"expected bytes, as in 512MiB, 120GB or 1048576 (units: {units}), got {text!r}")
    num_bytes = int(Decimal(match[1]) * _UNITS[match[2]])
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"expected at most {MAX_BYTES} bytes, got {text!r}")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """Three digits and a decimal unit: `5.24 MB`."""
    return _format(num_bytes, _DECIMAL)


def format_binary_size(num_bytes: int) -> str:
    """Three digits and a binary unit: `512 MiB`."""
    return _format(num_bytes, _BINARY)


def format_round_size(num_bytes: int) -> str:
    """In the unit in which it is a round number: `120 GB`, `512 MiB`."""
    return format_size(num_bytes) if num_bytes % _BINARY["MiB"] else format_binary_size(num_bytes)


def _format(num_bytes: int, units: dict[str, int]) -> str:
    fitting = [(name, size) for name, size in units.items() if 1 < size <= num_bytes]
    if not fitting:
        return f"{num_bytes} B"
    name, size = fitting[-1]
    value = num_bytes / size
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:,.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {name}"
