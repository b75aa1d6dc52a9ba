"""How long outputs get, learnt from those that ended: a forecast for one that is under way. Reads no clock."""

from __future__ import annotations

from bisect import bisect_left

UNBOUNDED = 1 << 30
"""Longer than any output: the forecast where nothing is known. Whoever asks clamps it to `max_tokens`."""

_GROWTH = 1.15
"""Ratio of the bounds of neighbouring classes of length."""
_LONGEST = 1 << 20
_MEMORY = 256.0
"""Outputs that count: an older one has lost most of its weight."""
_QUANTILE = 0.4
"""Share of outputs that end before their forecast. Less than half: those that end early leave room for the others,
which a forecast of one length for all does not see."""
_DOUBTS = 4.0
"""Outputs of unbounded length that are assumed to have been seen. They do not fade."""


class OutputLengths:
    """A histogram with classes of geometric width, in which older outputs fade. Memory and time are bounded.

    A forecast is the mean of the class that the quantile is in.

    Starts pessimistic: with nothing seen, an output is `UNBOUNDED`; so is one that is longer than all seen.
    """

    def __init__(self) -> None:
        self._bounds = _class_bounds()
        """Longest output of each class, the last, unbounded class aside."""
        self._weights = [0.0] * len(self._bounds) + [_DOUBTS]
        self._totals = [0.0] * len(self._bounds) + [_DOUBTS * UNBOUNDED]
        """Weighted sum of the lengths in each class."""
        self._quantiles: list[int] | None = None
        """For each class: the quantile of outputs in it and in the longer ones. None: to be worked out again."""

    def observe(self, num_tokens: int) -> None:
        """An output ended with `num_tokens` tokens."""
        keep = 1.0 - 1.0 / _MEMORY
        self._weights[:-1] = [weight * keep for weight in self._weights[:-1]]
        self._totals[:-1] = [total * keep for total in self._totals[:-1]]
        i = bisect_left(self._bounds, num_tokens)
        self._weights[i] += 1.0
        self._totals[i] += num_tokens
        self._quantiles = None

    def forecast(self, num_tokens: int) -> int:
        """Length, more than `num_tokens`, of an output that has got to `num_tokens` without an end."""
        if self._quantiles is None:
            self._quantiles = self._work_out_quantiles()
        return max(num_tokens + 1, self._quantiles[bisect_left(self._bounds, num_tokens + 1)])

    def _work_out_quantiles(self) -> list[int]:
        quantiles = [UNBOUNDED] * len(self._weights)
        total = above = 0.0
        """Weight of the classes from `first` on, and of those above `middle`."""
        middle = len(quantiles) - 1
        for first in reversed(range(len(quantiles))):
            total += self._weights[first]
            while middle > first and above + self._weights[middle] <= total * (1.0 - _QUANTILE):
                above += self._weights[middle]
                middle -= 1
            if self._weights[middle] > 0.0:
                quantiles[first] = round(self._totals[middle] / self._weights[middle])
        return quantiles


def _class_bounds() -> list[int]:
    bounds = [1]
    while bounds[-1] < _LONGEST:
        bounds.append(max(bounds[-1] + 1, int(bounds[-1] * _GROWTH)))
    return bounds
