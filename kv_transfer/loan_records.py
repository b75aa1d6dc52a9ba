"""What a `Lend` frame says of each block: of fixed size, as a prompt has hundreds, and they are handed over at once."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from engine.block_hash import HASH_BYTES
from engine.errors import ProtocolError

_RECORD = struct.Struct(f"<IIQQI{HASH_BYTES}s")
LOAN_BYTES = _RECORD.size


class LoanEntry(NamedTuple):
    """One block that is not sent, but can be read where it is."""

    ordinal: int
    slot: int
    """That D had kept for it, and its generation: by them D knows what is meant."""
    generation: int
    source_generation: int
    """Of the slot in P's pool, while it holds this block."""
    source: int
    """Block id in P's pool."""
    hash: bytes


def pack_loans(entries: Iterable[LoanEntry]) -> bytes:
    """Raises `ProtocolError` if a field is out of range."""
    try:
        return b"".join(_RECORD.pack(*entry) for entry in entries)
    except struct.error as error:
        raise ProtocolError(f"Lend.records: {error}") from None


def unpack_loans(records: bytes) -> list[LoanEntry]:
    return [LoanEntry._make(fields) for fields in _RECORD.iter_unpack(records)]
