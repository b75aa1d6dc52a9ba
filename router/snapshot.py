"""What a decision knows of a worker. Pure values."""

from __future__ import annotations

from typing import NamedTuple

PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)


class WorkerSnapshot(NamedTuple):
    """A ready worker as its last report and the router's own live requests describe it. By name only.

    A tuple, because one is made for every decision.
    """

    worker_id: str
    role: str
    block_size: int
    num_blocks: int
    max_model_len: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens still to be computed."""
    blocks_available: int = 0
    """Free, or cached and nobody's."""
    prefill_tokens_per_s: float = 0.0
    """0: not known."""
    decode_step_ms: float = 0.0
    """0: not known."""
    in_flight: int = 0
    """Live requests of this router there."""
    in_flight_tokens: int = 0
    """Tokens of those that were sent there to be computed and are not known to be."""
    slot: int | None = None
    """In the prefix index; None if the worker does not tell what it holds."""

    @property
    def fixed(self) -> tuple[object, ...]:
        """What never changes in the life of a worker: id, role, block size, blocks, longest request."""
        return self[:5]

    @property
    def queued_tokens(self) -> int:
        """The worker's report is up to a heartbeat old, this router's own requests are not."""
        return max(self.waiting_tokens, self.in_flight_tokens)

    @property
    def streams(self) -> int:
        return max(self.running + self.waiting, self.in_flight)

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the largest request that fits. The last token needs no KV."""
        return min(self.max_model_len, self.pool_tokens + 1)

    @property
    def pool_is_the_limit(self) -> bool:
        return self.pool_tokens + 1 < self.max_model_len
