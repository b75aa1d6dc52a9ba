"""What an engine tells of itself, to load reports and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_stats import BlockStats
from engine.host_tier import HostStats
from engine.step_rates import StepRates


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

    @classmethod
    def of(
        cls, blocks: BlockStats, queues: QueueStats, rates: StepRates, host: HostStats, unknown_ids: int
    ) -> EngineStats:
        return cls(
            blocks=blocks,
            running=queues.running,
            waiting=queues.waiting,
            waiting_tokens=queues.waiting_tokens,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_step_ms=rates.decode_step_ms,
            awaiting_kv=queues.awaiting_kv,
            held=queues.held,
            preemptions=queues.preemptions,
            swaps=queues.swaps,
            host=host,
            unknown_ids=unknown_ids,
        )
