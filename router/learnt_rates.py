"""How fast each worker computes prompts and takes in KV, learnt from what requests met there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9
"""What an observation counts for after the next one."""
FORGET_LINK = 1.02
"""A link is believed to be as fast as it was once, but a little less with each transfer that is slower: most transfers
wait for the prompt to be computed, and only say that the link is not slower than that."""
MAX_WORKERS = 1024


@dataclass(slots=True)
class _Rates:
    prefill_ms: float = 0.0
    prefill_tokens: float = 0.0
    """Both: decayed sums. Of sums, so that a few tokens with a fixed cost do not look like many slow ones."""
    link_ms_per_token: float = 0.0


class LearntRates:
    """By worker id: a restarted worker is as fast as it was before."""

    def __init__(self) -> None:
        self._rates: dict[str, _Rates] = {}

    def prefilled(self, worker_id: str, num_tokens: int, compute_ms: float) -> None:
        """The worker computed `num_tokens` of a prompt."""
        if num_tokens > 0 and compute_ms > 0:
            rates = self._of(worker_id)
            rates.prefill_ms = rates.prefill_ms * DECAY + compute_ms
            rates.prefill_tokens = rates.prefill_tokens * DECAY + num_tokens

    def received(self, worker_id: str, num_tokens: int, transfer_ms: float) -> None:
        """The decode worker got the KV of `num_tokens` over a link."""
        if num_tokens > 0 and transfer_ms > 0:
            rates, sample = self._of(worker_id), transfer_ms / num_tokens
            known = rates.link_ms_per_token * FORGET_LINK
            rates.link_ms_per_token = min(sample, known) if known else sample

    def prefill_ms_per_token(self, worker_id: str) -> float:
        """0: not known."""
        rates = self._rates.get(worker_id)
        return rates.prefill_ms / rates.prefill_tokens if rates is not None and rates.prefill_tokens else 0.0

    def link_ms_per_token(self, worker_id: str) -> float:
        """0: not known."""
        rates = self._rates.get(worker_id)
        return rates.link_ms_per_token if rates is not None else 0.0

    def _of(self, worker_id: str) -> _Rates:
        rates = self._rates.setdefault(worker_id, _Rates())
        if len(self._rates) > MAX_WORKERS:
            del self._rates[next(iter(self._rates))]
        return rates
