"""How fast steps are, for load reports: smoothed measurements. Takes durations, reads no clock."""

from __future__ import annotations

from engine.batch import ScheduledBatch

_WEIGHT = 0.1
"""Of the newest step; about the last twenty count."""


class StepRates:
    """A step that computes prompt chunks tells the prefill rate, one of decode tokens only the decode time."""

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._decode_tokens = 0.0

    def record(self, batch: ScheduledBatch, seconds: float) -> None:
        if all(sequence.num_tokens == 1 for sequence in batch.sequences):
            self._decode_seconds = _smooth(self._decode_seconds, seconds)
            self._decode_tokens = _smooth(self._decode_tokens, len(batch.sequences))
            return
        # Smoothing both parts of the quotient lets long steps count by their length: a short last chunk is no measure.
        self._prefill_tokens = _smooth(self._prefill_tokens, batch.num_tokens)
        self._prefill_seconds = _smooth(self._prefill_seconds, seconds)

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 while unknown."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds > 0.0 else 0.0

    @property
    def decode_step_ms(self) -> float:
        """0 while unknown."""
        return self._decode_seconds * 1000.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a prompt that are computed in the time that a decode step takes beside its tokens. At least 1; 0
        while unknown."""
        if self._decode_seconds == 0.0 or self._prefill_seconds == 0.0:
            return 0.0
        return max(1.0, self.prefill_tokens_per_s * self._decode_seconds - self._decode_tokens)


def _smooth(average: float, value: float) -> float:
    return value if average == 0.0 else (1.0 - _WEIGHT) * average + _WEIGHT * value
