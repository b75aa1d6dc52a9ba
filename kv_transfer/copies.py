"""A `Copies` frame, block by block: for what happens to one of them alone."""

from __future__ import annotations

import numpy as np

from kv_transfer.block_records import COPY
from kv_transfer.frames import BlockEntry, Blocks, Copies

_FIELDS = ["ordinal", "slot", "generation", "digest", "source", "hash"]


def blocks_of(frame: Copies) -> Blocks:
    """The frame that says the same of each."""
    records = np.frombuffer(frame.records, COPY)
    entries = tuple(
        BlockEntry(ordinal, slot, generation, content_hash, digest, source * frame.length)
        for ordinal, slot, generation, digest, source, content_hash in records[_FIELDS].tolist()
    )
    return Blocks(ticket_id=frame.ticket_id, incarnation=frame.incarnation, entries=entries, length=frame.length)
