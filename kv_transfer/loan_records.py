"""What a `Lend` frame says of each block: columns of fixed size, as a prompt has hundreds of blocks, and they are
handed over at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.block_hash import HASH_BYTES

RECORD = np.dtype(
    [
        ("ordinal", "<u4"),
        ("slot", "<u4"),  # that D had kept for it
        ("generation", "<u8"),  # of that slot: by the two D knows what is meant
        ("source_generation", "<u8"),  # of the slot in P's pool, while it holds this block
        ("source", "<u4"),  # block id in P's pool
        ("hash", f"V{HASH_BYTES}"),
    ]
)
"""One block that is not sent, but can be read where it is. Without gaps."""
LOAN_BYTES = RECORD.itemsize

Records = npt.NDArray[Any]  # [blocks] of RECORD


def unpack_loans(records: bytes) -> Records:
    """A view, read-only."""
    return np.frombuffer(records, dtype=RECORD)
