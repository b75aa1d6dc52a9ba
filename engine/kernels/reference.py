"""The kernels in plain PyTorch: the oracle that every other implementation is tested against, and the CPU's fallback.

Arithmetic is float32 whatever the pool holds. On one thread, a query's result does not depend on the queries that come
with it nor on where a chunk of its prompt began, to the last bit. A BLAS chooses its order of summation by shape, so
no shape here that matters to it depends on either: products have at least `_MIN_ROWS` rows, and a context is padded to
whole tiles of `_KEY_TILE` keys and summed tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from engine.kernels import quantized
from engine.kernels.scoring import Scoring

_MIN_ROWS = 8
_KEY_TILE = 128
_QUERY_TILE = 64
"""Queries that share one score matrix, so that it stays in cache."""


def store_kv(
    k: torch.Tensor,  # [T, kv_heads, head_dim]
    v: torch.Tensor,  # [T, kv_heads, head_dim]
    pool: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, head_dim]
    layer: int,
    slot_blocks: torch.Tensor,  # [T] int64: block of each token
    slot_offsets: torch.Tensor,  # [T] int64: its place in the block
    kv_scales: torch.Tensor | None = None,  # [blocks, layers, 2, kv_heads] float32, with a quantized pool
) -> None:
    """Write each token's key and value into its slot, in the type of the pool."""
    kv = pool[:, layer]
    if kv_scales is not None:
        quantized.store(torch.stack((k.float(), v.float()), dim=1), kv, kv_scales[:, layer], slot_blocks, slot_offsets)
        return
    kv[slot_blocks, 0, :, slot_offsets] = k.to(pool.dtype)
    kv[slot_blocks, 1, :, slot_offsets] = v.to(pool.dtype)


def paged_attention(
    q: torch.Tensor,  # [T, heads, head_dim]
    pool: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, head_dim]
    layer: int,
    block_tables: Sequence[torch.Tensor],  # S of [ceil(context_len / block_size)] int64
    query_starts: Sequence[int],  # S + 1: sequence s has the queries query_starts[s]:query_starts[s + 1]
    context_lens: Sequence[int],  # S: tokens with KV; the queries are the last of them
    scoring: Scoring,
    kv_scales: torch.Tensor | None = None,  # [blocks, layers, 2, kv_heads] float32, with a quantized pool
) -> torch.Tensor:  # [T, heads, head_dim], as q
    """Causal attention of each sequence's queries over its context.

    Reads no slot beyond a context's end, and no block of which no query's window holds a token: a table may have any
    number in its place.
    """
    out = torch.empty_like(q)
    scales = None if kv_scales is None else kv_scales[:, layer]
    for s, table in enumerate(block_tables):
        queries = slice(query_starts[s], query_starts[s + 1])
        first = context_lens[s] - (query_starts[s + 1] - query_starts[s])
        first_seen = 0 if scoring.window is None else max(0, first + 1 - scoring.window)
        keys, values, begin = _gather(pool[:, layer], scales, table, context_lens[s], first_seen)
        _attend(q[queries], keys, values, first - begin, scoring, out[queries])
    return out


def _gather(
    kv: torch.Tensor,  # [blocks, 2, kv_heads, block_size, head_dim]
    scales: torch.Tensor | None,  # [blocks, 2, kv_heads] float32
    table: torch.Tensor,  # [n] int64
    context_len: int,
    first_seen: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:  # twice [kv_heads, padded, head_dim] float32
    """Keys and values from the tile on that `first_seen` lies in, and the position of the first of them."""
    _, _, kv_heads, block_size, head_dim = kv.shape
    table = table[first_seen // block_size :]
    first = first_seen // block_size * block_size  # token of the table
    begin = first // _KEY_TILE * _KEY_TILE
    lead, slots = first - begin, len(table) * block_size
    padded = _round_up(lead + slots, _KEY_TILE)
    gathered = torch.empty(2, kv_heads, padded, head_dim)
    in_blocks = gathered[:, :, lead : lead + slots].view(2, kv_heads, len(table), block_size, head_dim)
    if scales is None:
        in_blocks.copy_(kv.index_select(0, table).permute(1, 2, 0, 3, 4))
    else:
        quantized.load(kv, scales, table, in_blocks)
    # What an earlier owner of the last block left may be NaN, which a weight of zero would not remove.
    gathered[:, :, :lead] = 0.0
    gathered[:, :, context_len - begin :] = 0.0
    return gathered[0], gathered[1], begin


def _attend(
    q: torch.Tensor,  # [n, heads, head_dim]
    keys: torch.Tensor,  # [kv_heads, padded, head_dim] float32
    values: torch.Tensor,  # the same
    first_key: int,  # of the keys, the one at the position of the first query
    scoring: Scoring,
    out: torch.Tensor,  # [n, heads, head_dim], written
) -> None:
    kv_heads, _, head_dim = keys.shape
    group = q.shape[1] // kv_heads
    for start in range(0, q.shape[0], _QUERY_TILE):
        tile = q[start : start + _QUERY_TILE]
        num_queries = tile.shape[0]
        # The query heads that share a kv head become rows of one matrix: [kv_heads, n * group, head_dim].
        num_rows = num_queries * group
        rows = torch.zeros(kv_heads, max(num_rows, _MIN_ROWS), head_dim)
        by_query = rows[:, :num_rows].view(kv_heads, num_queries, group, head_dim)
        torch.mul(tile.view(num_queries, kv_heads, group, head_dim).transpose(0, 1), scoring.scale, out=by_query)
        first = first_key + start  # key of the tile's first query, which sees keys up to itself
        begin = 0 if scoring.window is None else max(0, first + 1 - scoring.window) // _KEY_TILE * _KEY_TILE
        stop = _round_up(first + num_queries, _KEY_TILE)
        scores = torch.bmm(rows, keys[:, begin:stop].transpose(1, 2))  # [kv_heads, rows, stop - begin]
        if scoring.soft_cap is not None:
            scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
        by_query = scores[:, :num_rows].view(kv_heads, num_queries, group, -1)
        by_query[..., first - begin :].masked_fill_(_after_query(num_queries, stop - first), -torch.inf)
        if scoring.window is not None:
            first_hidden = first - begin - scoring.window  # the last key that the first query does not see
            by_query.masked_fill_(_before_window(num_queries, first_hidden, stop - begin), -torch.inf)
        mixed = _weighted_sum(scores.softmax(dim=-1), values[:, begin:stop])[:, :num_rows]
        by_head = out[start : start + num_queries].view(num_queries, kv_heads, group, head_dim)
        by_head.copy_(mixed.view(kv_heads, num_queries, group, head_dim).transpose(0, 1))


@lru_cache(maxsize=1024)  # few shapes, asked for again in every layer
def _after_query(num_queries: int, num_keys: int) -> torch.Tensor:  # [n, 1, keys] bool
    """Which keys lie after each query, where key 0 is at the position of query 0."""
    return (torch.arange(num_keys) > torch.arange(num_queries)[:, None]).unsqueeze(1)


@lru_cache(maxsize=1024)
def _before_window(num_queries: int, hidden: int, num_keys: int) -> torch.Tensor:  # [n, 1, keys] bool
    """Which keys lie before each query's window: those up to `hidden` for query 0, one more for each that follows."""
    return (torch.arange(num_keys) <= hidden + torch.arange(num_queries)[:, None]).unsqueeze(1)


def _weighted_sum(
    weights: torch.Tensor,  # [kv_heads, rows, keys] float32
    values: torch.Tensor,  # [kv_heads, keys, head_dim] float32
) -> torch.Tensor:  # [kv_heads, rows, head_dim]
    total = torch.bmm(weights[:, :, :_KEY_TILE], values[:, :_KEY_TILE])
    for start in range(_KEY_TILE, weights.shape[2], _KEY_TILE):
        end = start + _KEY_TILE
        total.baddbmm_(weights[:, :, start:end], values[:, start:end])
    return total


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
