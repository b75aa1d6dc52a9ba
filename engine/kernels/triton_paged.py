"""Attention over block tables on a GPU: launches the kernels of `engine.kernels.triton_attention`.

`PagedAttention` is what a model holds: everything a step needs is in tensors that stay where they are, so its decode
part can be captured in a CUDA graph. `paged_attention` has the signature of the reference, for all who compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import triton

from engine.kernels import attention_plan as plan
from engine.kernels import triton_codes as codes
from engine.kernels.scoring import Scoring
from engine.kernels.triton_attention import decode_kernel, prefill_kernel, reduce_kernel

_REDUCE_CHUNK = 16


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The sequences of a step that have one query. All tensors are on the GPU of the pool."""

    block_tables: torch.Tensor  # [S, n] int32; entries that no query sees may be anything
    context_lens: torch.Tensor  # [S] int32; 0: no sequence, nothing is read or written
    rows: torch.Tensor  # [S] int32: the row of q and out of each
    max_context_len: int
    """At least that of each sequence: decides how many splits are launched."""


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The sequences of a step that have more queries. Tensors hold all sequences; tiles name those that count."""

    block_tables: torch.Tensor  # [S, n] int32
    context_lens: torch.Tensor  # [S] int32
    query_starts: torch.Tensor  # [S + 1] int32
    tile_seqs: torch.Tensor  # [tiles] int32
    tile_queries: torch.Tensor  # [tiles] int32


class PartialResults:
    """Memory for the splits of a decode step; all layers and steps use it in turn, as they run in one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values = torch.empty(0, device=device)
        self._lse = torch.empty(0, device=device)

    def reserve(self, num_seqs: int, num_heads: int, num_splits: int, head_dim: int) -> None:
        """Room for a step of this size. Not while a graph is captured, nor after one that uses smaller memory."""
        needed = num_seqs * num_heads * num_splits
        if needed > self._lse.numel():
            self._lse = torch.empty(needed, device=self._device)
        if needed * head_dim > self._values.numel():
            self._values = torch.empty(needed * head_dim, device=self._device)

    @property
    def values(self) -> torch.Tensor:
        return self._values

    @property
    def lse(self) -> torch.Tensor:
        return self._lse


def in_powers_of_two(scoring: Scoring) -> tuple[float, float]:
    """The kernels' `score_scale` and `cap`: exp2(score x score_scale) for exp(score x scale), and with a soft cap
    c x log2(e) x tanh(x) for cap and the exponent 2 x log2(e) that makes a hyperbolic tangent of exp2."""
    if scoring.soft_cap is None:
        return scoring.scale * math.log2(math.e), 0.0
    return 2 * scoring.scale / scoring.soft_cap * math.log2(math.e), scoring.soft_cap * math.log2(math.e)


@lru_cache
def arch_of(device: torch.device) -> int:
    """Compute capability x 10. Of what is no GPU, that of the GPUs that we tune for: the interpreter has none."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def kind_of(dtype: torch.dtype, arch: int) -> int:
    """How the kernels read a pool of this type."""
    if dtype == torch.int8:
        return codes.INT8
    if dtype != torch.float8_e4m3fn:
        return codes.PLAIN
    return codes.FP8_NATIVE if arch >= 89 else codes.FP8_BITS


def attend_decode(
    q: torch.Tensor,  # [T, heads, head_dim], each head contiguous
    kv: torch.Tensor,  # one layer of a pool: [blocks, 2, kv_heads, block_size, head_dim]
    scales: torch.Tensor | None,  # of the same layer: [blocks, 2, kv_heads] float32
    part: DecodePart,
    scoring: Scoring,
    split_keys: int,
    partial: PartialResults,  # with room for the step, if it has more than one split
    out: torch.Tensor,  # [T, heads, head_dim]: the rows of the part are written
    arch: int,
) -> None:
    """One query of each sequence over its context."""
    num_seqs, num_heads = len(part.context_lens), q.shape[1]
    _, _, kv_heads, block_size, head_dim = kv.shape
    config = plan.decode_config(head_dim, num_heads // kv_heads)
    num_splits = plan.num_splits_for(part.max_context_len, scoring.window, split_keys)
    dims = triton.next_power_of_2(head_dim)
    window = plan.NO_WINDOW if scoring.window is None else scoring.window
    decode_kernel[(num_seqs, kv_heads, num_splits)](
        q, _as_stored(kv), _or_any(scales, part.context_lens), part.block_tables, part.context_lens, part.rows, out,
        partial.values, partial.lse, num_splits, window, *in_powers_of_two(scoring),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), part.block_tables.stride(0),
        *kv.stride()[:3], *_scale_strides(scales),
        GROUP=num_heads // kv_heads, ROWS=config.rows, HEAD_DIM=head_dim, DIMS=dims, BLOCK_SIZE=block_size,
        TILE=config.tile, SPLIT_KEYS=split_keys, KIND=kind_of(kv.dtype, arch), CAPPED=scoring.soft_cap is not None,
        SPLIT=num_splits > 1, UPCAST=codes.INTERPRETED, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        reduce_kernel[(num_seqs, num_heads)](
            partial.values, partial.lse, part.context_lens, part.rows, out, num_splits, window,
            out.stride(0), out.stride(1), HEAD_DIM=head_dim, DIMS=dims, SPLIT_KEYS=split_keys, CHUNK=_REDUCE_CHUNK,
        )  # fmt: skip


def attend_prefill(
    q: torch.Tensor,  # [T, heads, head_dim], each head contiguous
    kv: torch.Tensor,  # one layer of a pool: [blocks, 2, kv_heads, block_size, head_dim]
    scales: torch.Tensor | None,  # of the same layer: [blocks, 2, kv_heads] float32
    part: PrefillPart,
    scoring: Scoring,
    out: torch.Tensor,  # [T, heads, head_dim]: the rows of the part's tiles are written
    arch: int,
) -> None:
    """The queries of each tile, which are the last of their context."""
    num_heads = q.shape[1]
    _, _, kv_heads, block_size, head_dim = kv.shape
    config = plan.prefill_config(head_dim, num_heads // kv_heads, scales is not None, arch)
    window = plan.NO_WINDOW if scoring.window is None else scoring.window
    prefill_kernel[(len(part.tile_seqs), kv_heads)](
        q, _as_stored(kv), _or_any(scales, part.context_lens), part.block_tables, part.context_lens,
        part.query_starts, part.tile_seqs, part.tile_queries, out, window, *in_powers_of_two(scoring),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), part.block_tables.stride(0),
        *kv.stride()[:3], *_scale_strides(scales),
        GROUP=num_heads // kv_heads, ROWS=config.rows, HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, TILE=config.tile, KIND=kind_of(kv.dtype, arch), CAPPED=scoring.soft_cap is not None,
        WINDOWED=scoring.window is not None, UPCAST=codes.INTERPRETED,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,  # [T, heads, head_dim]
    pool: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, head_dim]
    layer: int,
    block_tables: Sequence[torch.Tensor],  # S of [ceil(context_len / block_size)] int64
    query_starts: Sequence[int],  # S + 1
    context_lens: Sequence[int],  # S
    scoring: Scoring,
    kv_scales: torch.Tensor | None = None,  # [blocks, layers, 2, kv_heads] float32, with a quantized pool
) -> torch.Tensor:  # [T, heads, head_dim], as q
    """As `reference.paged_attention`. Builds what a model keeps, so it is for tests and measurements."""
    out = torch.full_like(q, torch.nan)  # a row that no kernel writes must show
    kv = pool[:, layer]
    scales = None if kv_scales is None else kv_scales[:, layer]
    arch, group = arch_of(q.device), q.shape[1] // kv.shape[2]
    queries_per_tile = plan.prefill_config(q.shape[2], group, scales is not None, arch).rows // group
    decode, prefill = step_parts(block_tables, query_starts, context_lens, queries_per_tile, q.device)
    if decode is not None:
        split_keys = plan.split_keys_for(decode.max_context_len)
        partial = PartialResults(q.device)
        num_splits = plan.num_splits_for(decode.max_context_len, scoring.window, split_keys)
        partial.reserve(len(decode.rows), q.shape[1], num_splits, q.shape[2])
        attend_decode(q, kv, scales, decode, scoring, split_keys, partial, out, arch)
    if prefill is not None:
        attend_prefill(q, kv, scales, prefill, scoring, out, arch)
    return out


def step_parts(
    block_tables: Sequence[torch.Tensor],  # S of [n] int
    query_starts: Sequence[int],  # S + 1
    context_lens: Sequence[int],  # S
    queries_per_tile: int,
    device: torch.device,
) -> tuple[DecodePart | None, PrefillPart | None]:
    """What the kernels need of a step, on `device`. None for a part that no sequence belongs to."""
    query_lens = [end - start for start, end in pairwise(query_starts)]
    longest = max(len(table) for table in block_tables)
    tables = torch.zeros(len(block_tables), longest, dtype=torch.int32)
    for s, table in enumerate(block_tables):
        tables[s, : len(table)] = table
    decoding = [s for s, query_len in enumerate(query_lens) if query_len == 1]
    decode = prefill = None
    if decoding:
        lens = [context_lens[s] for s in decoding]
        decode = DecodePart(
            tables[decoding].to(device),
            _int32(lens, device),
            _int32([query_starts[s] for s in decoding], device),
            max(lens),
        )
    tile_seqs, tile_queries = plan.prefill_tiles(query_lens, context_lens, queries_per_tile)
    if tile_seqs:
        prefill = PrefillPart(
            tables.to(device),
            _int32(context_lens, device),
            _int32(query_starts, device),
            _int32(tile_seqs, device),
            _int32(tile_queries, device),
        )
    return decode, prefill


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _as_stored(kv: torch.Tensor) -> torch.Tensor:
    """Codes as int8, for both quantized types."""
    return kv.view(torch.int8) if kv.dtype == torch.float8_e4m3fn else kv


def _or_any(scales: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if scales is None else scales


def _scale_strides(scales: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if scales is None else (scales.stride(0), scales.stride(1))
