"""Sequences over scattered blocks of a poisoned pool, for kernels that are compared with the reference.

Unused slots hold NaN (or codes and scales that would show), block tables hold ids far outside the pool wherever no
query looks, and results begin as NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels import reference
from engine.kernels.scoring import Scoring
from engine.kv_cache import KvCache
from engine.kv_layout import QUANTIZED_KV_DTYPES, KvLayout

LAYER, NUM_LAYERS = 1, 2
OUTSIDE = 2**31 - 1
"""A block id that nobody may read."""


@dataclass(frozen=True)
class PagedCase:
    kv: KvCache
    q: torch.Tensor  # [T, heads, head_dim]
    tables: list[torch.Tensor]
    poisoned_tables: list[torch.Tensor]
    query_starts: list[int]
    context_lens: list[int]
    scoring: Scoring

    def expected(self) -> torch.Tensor:
        """Of the reference, in float32 from the very numbers in pool and query."""
        return reference.paged_attention(
            self.q.float(), self.kv.pool, LAYER, self.tables, self.query_starts, self.context_lens, self.scoring,
            self.kv.scales,
        )  # fmt: skip


def paged_case(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str | None = None,
    scoring: Scoring | None = None,
    seed: int = 1,
) -> PagedCase:
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    sizes = [-(-length // block_size) for length in context_lens]
    num_blocks = 3 + sum(sizes)
    layout = KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=kv_dtype or str(dtype).removeprefix("torch."),
    )
    kv = KvCache(layout, num_blocks)
    poison(kv)
    free = rng.sample(range(num_blocks), sum(sizes))
    tables = [torch.tensor([free.pop() for _ in range(size)]) for size in sizes]
    for table, length in zip(tables, context_lens, strict=True):
        k, v = torch.randn(2, length, heads[1], head_dim, generator=generator).to(dtype).unbind()
        positions = torch.arange(length)
        reference.store_kv(k, v, kv.pool, LAYER, table[positions // block_size], positions % block_size, kv.scales)
    scoring = scoring or Scoring(head_dim**-0.5)
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    q = torch.randn(starts[-1], heads[0], head_dim, generator=generator).to(dtype)
    poisoned = [
        _poisoned(table, length - query_len, scoring, block_size)
        for table, length, query_len in zip(tables, context_lens, query_lens, strict=True)
    ]
    return PagedCase(kv, q, tables, poisoned, starts, list(context_lens), scoring)


def poison(kv: KvCache) -> None:
    """NaN in every slot; in a quantized pool in every scale, as its codes cannot all be NaN."""
    if kv.layout.dtype in QUANTIZED_KV_DTYPES:
        kv.pool.view(torch.int8).fill_(0x5B)
        assert kv.scales is not None
        kv.scales.fill_(torch.nan)
    else:
        kv.pool.fill_(torch.nan)


def _poisoned(table: torch.Tensor, first: int, scoring: Scoring, block_size: int) -> torch.Tensor:
    """The table with two entries more, and those that left the window of the query at `first`, outside the pool."""
    longer = torch.cat((table, torch.tensor([OUTSIDE, -OUTSIDE])))
    if scoring.window is not None:
        longer[: max(0, first + 1 - scoring.window) // block_size] = OUTSIDE
    return longer
