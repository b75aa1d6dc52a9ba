"""What an engine tells of itself, to load reports and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_stats import BlockStats
from engine.host_tier import HostStats


@dataclass(frozen=True, slots=True)
class QueueStats:
    running: int
    waiting: int
    awaiting_kv: int
    held: int
    waiting_tokens: int
    """To be computed here before all that wait or run can decode."""
    preemptions: int
    """Since the start."""
    swaps: int
    """Preemptions that kept the KV in host memory, since the start."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    blocks: BlockStats
    running: int
    waiting: int
    waiting_tokens: int
    """Still to be computed here before all running and waiting requests can decode."""
    prefill_tokens_per_s: float
    """Measured; 0 while unknown."""
    decode_step_ms: float
    """Measured; 0 while unknown."""
    awaiting_kv: int
    held: int
    preemptions: int
    """Since the start."""
    swaps: int
    """Preemptions that kept the KV in host memory, since the start."""
    host: HostStats
    unknown_ids: int
    """Calls that named a request that is not live, since the start. Late messages do; many mean a fault."""
