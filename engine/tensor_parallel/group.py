"""The sums of what the ranks compute, over Gloo on this host."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from engine.gloo import gloo_backend
from engine.tensor_parallel.meeting import MeetingStore

_HOST = "127.0.0.1"
TIMEOUT_S = 20.0
"""For a meeting, and for each sum: the ranks get there at nearly the same time, or one of them is gone or frozen."""


class RankGroup:
    """One rank's end. After an error the group is over."""

    def __init__(self, backend: Any, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self._backend = backend
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)

    @classmethod
    def join(cls, store: MeetingStore, rank: int, size: int) -> RankGroup:
        """Meet the others. Raises `RuntimeError` if they do not come, and what the store raises."""
        try:
            return cls(gloo_backend(store, rank, size, _HOST, TIMEOUT_S), size)
        finally:
            store.seal()

    def sum(
        self,
        partial: torch.Tensor,  # [T, hidden]
    ) -> torch.Tensor:  # [T, hidden] float32, the same on all ranks
        """Added up in the order of the ranks: a row's sum does not depend on the rows that come with it, as that of a
        ring would, which cuts the rows into parts that begin at different ranks.

        Raises `RuntimeError` if a rank is gone, or does not come in time.
        """
        num_rows = len(partial)
        parts = torch.empty(self._size * num_rows, partial.shape[1], dtype=partial.dtype)
        self._backend._allgather_base(parts, partial.contiguous()).wait(self._timeout)
        total = parts[:num_rows].float()
        for rank in range(1, self._size):
            total += parts[rank * num_rows : (rank + 1) * num_rows]
        return total
