"""How attention is cut into tiles and splits for a GPU: pure decisions about sizes. Knows no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_SPLIT_KEYS = 512
"""Keys of a decode split. Fewer: more parts to put together. More: a short batch leaves multiprocessors idle."""
MAX_SPLITS = 64
"""Of one sequence: bounds the memory for their results."""
MIN_ROWS = 16
"""The fewest rows that the matrix units take."""
NO_WINDOW = 1 << 30
"""Longer than any context."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Of one attention kernel: its tiles, and what Triton is told to make of them."""

    rows: int
    tile: int
    """Keys at a time."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values in flight, one of them in use."""


def decode_config(head_dim: int, group: int) -> TileConfig:
    """Tiles of 8192 keys' or values' numbers: 16 KiB of 16 bits, two of each in flight, so that three blocks of
    threads share a multiprocessor. Of Triton's stages one more is spent on block ids at each end."""
    return TileConfig(max(MIN_ROWS, _power_of_two(group)), _tile(head_dim), num_warps=4, num_stages=5)


def prefill_config(head_dim: int, group: int, quantized: bool, arch: int) -> TileConfig:
    """`arch`: compute capability x 10. The largest tiles that `bench.kernels` finds without a spill: before sm_90 the
    operands of matrix products take registers, and so do codes on their way to numbers."""
    if arch < 90:
        rows = 64 if head_dim > (64 if quantized else 128) else 128
        tile = 64 if head_dim <= 64 and not quantized else 16 if head_dim > 128 and quantized else 32
        num_stages = 3
    else:
        rows = 64 if head_dim > 128 and quantized else 128
        tile = 32 if head_dim <= 64 and quantized else min(64, _tile(head_dim))
        num_stages = 3 if head_dim > 128 else 5
    return TileConfig(max(rows, _power_of_two(group)), tile, num_warps=8, num_stages=num_stages)


def split_keys_for(max_context_len: int) -> int:
    """Keys of a split, a power of two: by the longest context that can come, so that no sum depends on the batch."""
    return max(MIN_SPLIT_KEYS, _power_of_two(-(-max_context_len // MAX_SPLITS)))


def num_splits_for(max_context_len: int, window: int | None, split_keys: int) -> int:
    """Of the longest sequence of a batch. A window that begins within a split touches one more than it fills."""
    if window is None or window >= max_context_len:
        return max(1, -(-max_context_len // split_keys))
    return min(-(-max_context_len // split_keys), -(-window // split_keys) + 1)


def prefill_tiles(
    query_lens: Sequence[int],  # S
    context_lens: Sequence[int],  # S
    queries_per_tile: int,
) -> tuple[list[int], list[int]]:
    """The sequence of each tile, and its first query in that sequence: the tiles with the most keys come first.

    Long tiles that start last would leave most of the GPU waiting for them. Sequences with one query have no tile:
    they are decoded.
    """
    tiles = [
        (context_len - query_len + min(first + queries_per_tile, query_len), s, first)
        for s, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True))
        if query_len > 1
        for first in range(0, query_len, queries_per_tile)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    return [s for _, s, _ in tiles], [first for _, _, first in tiles]


def _tile(head_dim: int) -> int:
    return max(32, min(128, 8192 // _power_of_two(head_dim)))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
