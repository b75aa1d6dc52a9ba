"""Several outputs of one prompt: the seed of each, and the requests that draw along. Knows no queues and no blocks.

The rule for seeds, complete enough to write a second implementation from:

    seed of sample 0     = the request's seed
    seed of sample i > 0 = the first 8 bytes, as u64 LE, of Philox4x32-10(counter = (i, 0, 0, 1), key = the seed as two
                           u32, low word first), each output word LE

A draw uses counters that end in (0, 0), so no seed is made of bits that also decide a token. Each sample is then a
request like any other: it resumes anywhere from its own seed and tokens.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import InternalError
from engine.philox import philox4x32
from engine.request import Request, RequestKind

_SEED_STREAM = 1
"""Last counter word; that of token draws is 0."""


def sample_seed(seed: int, number: int) -> int:
    """Seed of sample `number` of a request with `seed`: below 2^64, as `seed` is; `number` is below 2^32."""
    if number == 0:
        return seed
    low, high, _, _ = philox4x32((number, 0, 0, _SEED_STREAM), (seed & 0xFFFFFFFF, seed >> 32))
    return high << 32 | low


def further_samples(request: Request, n: int) -> list[Request]:
    """Samples 1 to `n - 1` of a request that is sample 0, to go with it into `Engine.fork`.

    Sample i is named `<request_id>/<i>`, and equal to `request` but for its seed, and for what concerns links: none
    brings its KV, and none takes it. Raises `InternalError` if the request draws at random without a seed.
    """
    if request.params.seed is None and not request.params.greedy:
        raise InternalError(f"request {request.request_id} needs a seed to derive those of its samples from")
    seed = request.params.seed
    samples: list[Request] = []
    for number in range(1, n):
        sample = Request(
            request_id=f"{request.request_id}/{number}",
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            params=replace(request.params, seed=None if seed is None else sample_seed(seed, number)),
            scope=request.scope,
            arrival=request.arrival,
            priority=request.priority,
            num_public_tokens=request.num_public_tokens,
            kind=RequestKind.PREFILL if request.kind is RequestKind.PREFILL else RequestKind.LOCAL,
        )
        sample.transfer_over = True
        samples.append(sample)
    return samples


def common_prefix(first: list[int], second: list[int], limit: int) -> int:
    """How many tokens, at most `limit`, both begin with."""
    limit = min(limit, len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(i for i in range(limit) if first[i] != second[i])
