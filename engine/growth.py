"""Whether one more request is worth its blocks, given how far those that run are going to grow. Plain arithmetic.

A request gets blocks for its known tokens and one more. Further growth is not reserved block by block, which would keep
most of the pool empty. What is looked at is whether all together will grow beyond the pool before enough of them have
ended, and when: then the latest is preempted, and has to compute its KV again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.output_lengths import OutputLengths
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Stream:
    """A request that gets a token a step until it ends."""

    num_tokens: int
    """Known, those in shared blocks aside."""
    num_blocks: int
    """Of its own: they come free when it ends. Those of a shared prefix stay with the others."""
    num_to_come: int
    """Tokens until its expected end, at least 1."""


class GrowthPolicy(Protocol):
    def tokens_to_come(self, request: Request) -> int:
        """Expected until its end, at least 1."""

    def allows(self, running: Sequence[Stream], added: Stream, num_free: int, tokens_per_step: float) -> bool:
        """Whether to run one more request, if `num_free` blocks are left then. `running`: not empty."""

    def observe(self, num_tokens: int) -> None:
        """An output ended with `num_tokens` tokens."""


class LearntGrowth:
    """Expects of each output what outputs were like of late; lets a request run if that pays."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lengths = OutputLengths()

    def tokens_to_come(self, request: Request) -> int:
        num_output = request.num_output_tokens
        return max(1, min(self._lengths.forecast(num_output), request.params.max_tokens) - num_output)

    def allows(self, running: Sequence[Stream], added: Stream, num_free: int, tokens_per_step: float) -> bool:
        num_steps = steps_until_full([*running, added], num_free, self._block_size)
        return preemption_pays(num_steps, added.num_tokens, len(running), tokens_per_step)

    def observe(self, num_tokens: int) -> None:
        self._lengths.observe(num_tokens)


def steps_until_full(streams: Sequence[Stream], num_free: int, block_size: int) -> float:
    """Steps until the streams need more than their own and the free blocks; infinite if enough of them end before.

    All grow by a token a step, so need is greatest right before one of them ends. A stream's last block is taken to be
    half full.
    """
    by_end = sorted(streams, key=lambda stream: stream.num_to_come)
    capacity = (num_free + sum(stream.num_blocks for stream in by_end)) * block_size
    num_tokens = sum(stream.num_tokens for stream in by_end)
    num_alive = len(by_end)
    for stream in by_end:
        num_unused = num_alive * (block_size - 1) / 2
        if num_tokens + num_alive * (stream.num_to_come - 1) + num_unused > capacity:
            return max(0.0, (capacity - num_unused - num_tokens) / num_alive)
        num_tokens -= stream.num_tokens
        num_alive -= 1
    return math.inf


def preemption_pays(num_steps: float, num_tokens: int, num_running: int, tokens_per_step: float) -> bool:
    """Whether to run one more request for `num_steps` steps if it is preempted then.

    `num_tokens`: that it would have to compute again, beside those of its steps. `num_running`: requests beside it.
    `tokens_per_step`: tokens that prefill computes in the time that a step takes beside its tokens.

    Let c be `tokens_per_step` and n `num_running`. A step takes 1 + n / c and gives n tokens, so tokens come at a rate
    of n / (1 + n / c), and one more request raises it by 1 / (1 + n / c)^2: num_steps / (1 + n / c) tokens in all its
    steps. Computing num_tokens + num_steps tokens again takes as many / c, in which all others together would have
    got that time's rate. What is left of comparing the two: next to few it nearly always pays, next to many never.
    """
    if math.isinf(num_steps):
        return True
    return num_steps > num_running / tokens_per_step * (num_tokens + num_steps)
