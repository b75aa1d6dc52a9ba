"""What a frame says of each of many blocks, as columns of fixed size: a prompt has hundreds of blocks, and what is done
for each in Python takes longer than to hand them all over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.block_hash import HASH_BYTES
from kv_transfer.digest import DIGEST_BYTES

_HASH = np.dtype(f"V{HASH_BYTES}")
_CLAIM_BYTES = 16 + HASH_BYTES


def _record(**more: tuple[str, int]) -> np.dtype[np.void]:
    """What a ticket and a frame must agree on, also as one field, and behind it `more`: names with type and size."""
    fields = {
        "claim": (f"V{_CLAIM_BYTES}", 0),
        "ordinal": ("<u4", 0),
        "slot": ("<u4", 4),  # that D has kept for it
        "generation": ("<u8", 8),  # of that slot: by the two D knows what is meant
        "hash": (f"V{HASH_BYTES}", 16),
    }
    end = _CLAIM_BYTES
    for name, (kind, size) in more.items():
        fields[name] = kind, end
        end += size
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": end})


LOAN = _record(source=("<u4", 4), source_generation=("<u8", 8))
"""One block that is not sent, but can be read where it is: in this block of P's pool, of this generation."""
COPY = _record(source=("<u4", 4), digest=(f"V{DIGEST_BYTES}", DIGEST_BYTES))
"""One block that is to be copied out of this one of P's pool."""
LOAN_BYTES, COPY_BYTES = LOAN.itemsize, COPY.itemsize

Records = npt.NDArray[Any]  # [blocks], of LOAN or COPY


def hashes_of(hashes: Sequence[bytes] | bytes) -> npt.NDArray[np.void]:  # [blocks]
    """As a column."""
    joined = hashes if isinstance(hashes, bytes) else b"".join(hashes)
    return np.frombuffer(joined, dtype=_HASH)


class Claims:
    """What a ticket says of its blocks, in the order of their ordinals."""

    def __init__(self, blocks: Mapping[int, tuple[int, int]], hashes: Mapping[int, bytes] | None = None) -> None:
        """`blocks`: ordinals with slot and generation. `hashes`: theirs, for who is to compare them."""
        ordinals = sorted(blocks)
        self._records = np.zeros(len(ordinals), dtype=LOAN)
        self._records["ordinal"] = ordinals
        places = np.fromiter(chain.from_iterable(map(blocks.__getitem__, ordinals)), np.uint64, 2 * len(ordinals))
        self._records["slot"], self._records["generation"] = places[0::2], places[1::2]
        if hashes is not None:
            self._records["hash"] = hashes_of([hashes[ordinal] for ordinal in ordinals])
        self._claims = self._records["claim"].copy()
        self._first = ordinals[0] if ordinals else 0
        self._without_gap = bool(ordinals) and ordinals[-1] - self._first == len(ordinals) - 1

    def fill(self, records: Records, ordinals: npt.NDArray[np.int64]) -> None:
        """All of the claim but the hash."""
        at: slice | npt.NDArray[np.int64]
        if self._without_gap and ordinals[-1] - ordinals[0] == len(ordinals) - 1:
            at = slice(int(ordinals[0]) - self._first, int(ordinals[-1]) - self._first + 1)
        else:
            at = np.searchsorted(self._records["ordinal"], ordinals)
        records["claim"] = self._claims[at]

    def match(self, records: Records) -> range | None:
        """Ordinals of `records` if they follow each other and the ticket claims just these; else None, which says
        nothing."""
        first = int(records["ordinal"][0])
        at = first - self._first
        if not self._without_gap or not 0 <= at <= len(self._claims) - len(records):
            return None
        same = self._claims[at : at + len(records)] == records["claim"]
        return range(first, first + len(records)) if same.all() else None
