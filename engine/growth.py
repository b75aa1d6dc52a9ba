"""Whether one more request is worth its blocks, given how far those that run are going to grow. Plain arithmetic.

A request gets blocks for its known tokens and one more. Its further growth is not reserved block by block: that would
keep most of the pool empty. What is looked at is whether all will grow beyond the pool before enough of them have
ended, and when: then the latest is preempted and computes its KV again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stream:
    """A request that gets one token a step until it ends."""

    num_tokens: int
    """With KV in blocks of its own."""
    num_blocks: int
    """Of its own: they come free when it ends. Those of a shared prefix stay with the others."""
    num_to_come: int
    """Tokens until its forecast end, at least 1."""


def steps_until_full(streams: Iterable[Stream], num_free_blocks: int, block_size: int) -> float:
    """Steps until the streams need more than their own and the free blocks; infinite if enough of them end before.

    All grow by a token a step, so need is greatest right before one of them ends. A stream's last block is taken to be
    half full.
    """
    by_end = sorted(streams, key=lambda stream: stream.num_to_come)
    capacity = (num_free_blocks + sum(stream.num_blocks for stream in by_end)) * block_size
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

    `num_tokens`: that it has now. `num_running`: requests beside it. `tokens_per_step`: tokens that prefill computes
    in the time in which a step computes a single token of a single request.

    Let c be `tokens_per_step` and n `num_running`. A step takes 1 + n / c and gives n tokens, so tokens come at a rate
    of n / (1 + n / c), and one more request raises it by 1 / (1 + n / c)^2: num_steps / (1 + n / c) tokens in all its
    steps. Computing num_tokens + num_steps tokens again takes as many / c, in which all others together would have
    got that time's rate. What is left of comparing the two: next to few it nearly always pays, next to many never.
    """
    if math.isinf(num_steps) or num_running == 0:
        return True
    return num_steps > num_running / tokens_per_step * (num_tokens + num_steps)
