"""Triton kernels of attention over block tables: one row tile against the keys of one kv head.

The query heads that share a kv head are rows of one tile, beside the queries of a chunk: so a decode step of a model
with grouped heads feeds the matrix units, and each key is read once for all heads that want it. Decoding cuts a long
context into splits of `SPLIT_KEYS` keys that begin at multiples of it, whatever comes with a sequence in its batch;
`reduce_kernel` puts them together.

Keys and values of 16 bits go into the matrix units as they are, codes of quantized KV as numbers of 16 bits: exactly,
since they have at most eight significant bits. Scores and sums are float32.

Block ids are cast to 64 bits before they are multiplied. Nothing is read of a block id, slot or scale that no query
of the tile sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton_codes import decode_fp8


@triton.jit
def _as_values(codes, ELEMENT: tl.constexpr, KIND: tl.constexpr):
    """Codes of the pool -> what they stand for in units of their scale, exactly, in the type of the products."""
    if KIND == 0:
        values = codes.to(ELEMENT)
    elif KIND == 1:
        values = codes.to(tl.float8e4nv, bitcast=True).to(ELEMENT)
    elif KIND == 2:
        values = decode_fp8(codes).to(ELEMENT)
    else:
        values = (codes.to(tl.float32) + 0.5).to(ELEMENT)
    return values


@triton.jit
def _attend(
    q,  # [ROWS, DIMS]
    position,  # [ROWS]: the last key that a row sees
    peak,  # [ROWS] float32: largest score so far, in powers of two
    total,  # [ROWS] float32: of the weights relative to it
    mixed,  # [ROWS, DIMS] float32: values by these weights
    begin,  # of the keys, a multiple of TILE
    end,
    first_seen,  # keys before it are read by nobody
    context_len,
    window,  # a row sees the `window` keys up to its position
    kv_ptr, scales_ptr,  # of this kv head in block 0
    table_ptr,  # of this sequence
    block_stride, value_stride, scales_block_stride, scales_value_stride,  # values stand behind keys
    score_scale, cap,  # see `engine.kernels.triton_paged.in_powers_of_two`
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    KIND: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIMS)[None, :]
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        readable = (keys >= first_seen) & (keys < context_len)
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        codes_ptr = kv_ptr + (blocks * block_stride + (keys % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims
        mask = readable[:, None] & (dims < HEAD_DIM)
        k = _as_values(tl.load(codes_ptr, mask=mask, other=0), q.dtype, KIND)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if KIND != 0:
            key_scales = tl.load(scales_ptr + blocks * scales_block_stride, mask=readable, other=0.0)
            scores *= key_scales[None, :]
        scores *= score_scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # the hyperbolic tangent
        if MASKED:
            seen = (keys[None, :] <= position[:, None]) & (keys[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        finite_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # a row may see no key of a tile
        weights = tl.exp2(scores - finite_peak[:, None])
        rescale = tl.exp2(peak - finite_peak)
        total = total * rescale + tl.sum(weights, axis=1)
        peak = new_peak
        v = _as_values(tl.load(codes_ptr + value_stride, mask=mask, other=0), q.dtype, KIND)
        if KIND != 0:
            at = scales_ptr + scales_value_stride + blocks * scales_block_stride
            value_scales = tl.load(at, mask=readable, other=0.0)
            v = (v.to(tl.float32) * value_scales[:, None]).to(q.dtype)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return peak, total, mixed


@triton.jit
def decode_kernel(
    q_ptr,  # [T, heads, head_dim], by strides
    kv_ptr,  # one layer of a pool: [blocks, 2, kv_heads, block_size, head_dim], by strides
    scales_ptr,  # of the same layer: [blocks, 2, kv_heads] float32, by strides; anything if KIND is PLAIN
    tables_ptr,  # [S, n] int32, by stride; entries that nobody sees may be anything
    context_lens_ptr,  # [S] int32; 0: a sequence that is none, as the padding of a captured graph
    rows_ptr,  # [S] int32: the row of T of each sequence's one query
    out_ptr,  # as q, by strides: written if there is one split
    partial_ptr,  # [S, heads, splits, head_dim] float32: written otherwise
    partial_lse_ptr,  # [S, heads, splits] float32: logarithms to base 2
    num_splits, window, score_scale, cap,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride, table_stride,
    block_stride, value_stride, head_stride, scales_block_stride, scales_value_stride,
    GROUP: tl.constexpr,  # query heads of a kv head; ROWS: that, rounded up to a power of two, and at least 16
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,  # a multiple of TILE
    KIND: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (S, kv_heads, splits). Reads each key and value that a sequence sees once; nothing else counts.

    Bytes: 2 x context x kv_heads x head_dim x type. Operations: 4 x context x heads x head_dim. Bound by memory:
    GROUP operations for each byte of 16-bit KV, where an H100 has some 300.
    """
    s, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens_ptr + s)
    first_seen = tl.maximum(context_len - window, 0)
    split = first_seen // SPLIT_KEYS + part
    begin = split * SPLIT_KEYS
    if begin >= context_len:
        return
    row = tl.load(rows_ptr + s).to(tl.int64)
    group, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)[None, :]
    heads = head * GROUP + group
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)
    q = tl.load(q_ptr + row * q_row_stride + heads[:, None] * q_head_stride + dims, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    peak, total, mixed = _attend(
        q, tl.full([ROWS], 0, tl.int32) + context_len - 1,
        tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32),
        tl.maximum(begin, first_seen // TILE * TILE), tl.minimum(begin + SPLIT_KEYS, context_len),
        first_seen, context_len, window, kv_ptr + head * head_stride, scales_ptr + head, tables_ptr + s * table_stride,
        block_stride, value_stride, scales_block_stride, scales_value_stride,
        score_scale, cap, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, KIND, CAPPED, True,
    )  # fmt: skip
    mixed = mixed / total[:, None]
    if SPLIT:
        slot = (s * (tl.num_programs(1) * GROUP) + heads) * num_splits + part
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + dims, mixed, mask=mask)
        tl.store(partial_lse_ptr + slot, peak + tl.log2(total), mask=group < GROUP)
    else:
        target = out_ptr + row * out_row_stride + heads[:, None] * out_head_stride + dims
        tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_kernel(
    partial_ptr,  # [S, heads, splits, head_dim] float32
    partial_lse_ptr,  # [S, heads, splits] float32: logarithms to base 2
    context_lens_ptr,  # [S] int32
    rows_ptr,  # [S] int32
    out_ptr,  # [T, heads, head_dim], by strides
    num_splits, window, out_row_stride, out_head_stride,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLIT_KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (S, heads). Reads each split's part once: head_dim x 4 bytes of each, one in SPLIT_KEYS x type / 2 of KV."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context_len = tl.load(context_lens_ptr + s)
    if context_len == 0:
        return
    first_seen = tl.maximum(context_len - window, 0)
    written = (context_len - 1) // SPLIT_KEYS - first_seen // SPLIT_KEYS + 1
    base = (s * tl.num_programs(1) + head) * num_splits
    dims = tl.arange(0, DIMS)
    peak, total = -float("inf"), 0.0
    mixed = tl.zeros([DIMS], tl.float32)
    for start in range(0, written, CHUNK):
        parts = start + tl.arange(0, CHUNK)
        lse = tl.load(partial_lse_ptr + base + parts, mask=parts < written, other=-float("inf"))
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        weights, rescale = tl.exp2(lse - new_peak), tl.exp2(peak - new_peak)
        mask = (parts < written)[:, None] & (dims < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + (base + parts)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        mixed = mixed * rescale + tl.sum(weights[:, None] * partial, axis=0)
        total = total * rescale + tl.sum(weights, axis=0)
        peak = new_peak
    row = tl.load(rows_ptr + s).to(tl.int64)
    target = out_ptr + row * out_row_stride + head * out_head_stride + dims
    tl.store(target, (mixed / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def prefill_kernel(
    q_ptr,  # [T, heads, head_dim], by strides
    kv_ptr,  # one layer of a pool: [blocks, 2, kv_heads, block_size, head_dim], by strides
    scales_ptr,  # of the same layer: [blocks, 2, kv_heads] float32, by strides; anything if KIND is PLAIN
    tables_ptr,  # [S, n] int32, by stride
    context_lens_ptr,  # [S] int32
    query_starts_ptr,  # [S + 1] int32
    tile_seqs_ptr,  # [tiles] int32: of which sequence a tile is
    tile_queries_ptr,  # [tiles] int32: the first of its queries, counted from the sequence's first
    out_ptr,  # as q, by strides
    window, score_scale, cap,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride, table_stride,
    block_stride, value_stride, head_stride, scales_block_stride, scales_value_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr,  # of a tile: ROWS // GROUP queries, all their heads
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    KIND: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv_heads). The queries are the last of their context; what stands before them is a cached prefix.

    Operations: 4 x heads x head_dim for each pair of a query and a key that it sees. Bytes: each key and value once
    for every ROWS // GROUP queries, mostly from L2. Bound by the matrix units from some 300 queries on.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    s = tl.load(tile_seqs_ptr + tile).to(tl.int64)
    first_query = tl.load(tile_queries_ptr + tile)
    query_start = tl.load(query_starts_ptr + s)
    num_queries = tl.load(query_starts_ptr + s + 1) - query_start
    context_len = tl.load(context_lens_ptr + s)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)[None, :]
    query = first_query + rows // GROUP
    heads = head * GROUP + rows % GROUP
    first_position = context_len - num_queries + first_query
    position = first_position + rows // GROUP
    mask = ((rows < ROWS // GROUP * GROUP) & (query < num_queries))[:, None] & (dims < HEAD_DIM)
    at = (query_start + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + at * q_row_stride + heads[:, None] * q_head_stride + dims, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    peak, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    end = tl.minimum(first_position + ROWS // GROUP, context_len)
    first_seen = tl.maximum(first_position - window + 1, 0)
    begin = first_seen // TILE * TILE
    kv_ptr, scales_ptr, tables_ptr = kv_ptr + head * head_stride, scales_ptr + head, tables_ptr + s * table_stride
    if not WINDOWED:
        # Every query of the tile sees these keys, so nothing is masked.
        unmasked_end = (first_position + 1) // TILE * TILE
        peak, total, mixed = _attend(
            q, position, peak, total, mixed, begin, unmasked_end, first_seen, context_len, window,
            kv_ptr, scales_ptr, tables_ptr, block_stride, value_stride, scales_block_stride, scales_value_stride,
            score_scale, cap, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, KIND, CAPPED, False,
        )  # fmt: skip
        begin = unmasked_end
    peak, total, mixed = _attend(
        q, position, peak, total, mixed, begin, end, first_seen, context_len, window,
        kv_ptr, scales_ptr, tables_ptr, block_stride, value_stride, scales_block_stride, scales_value_stride,
        score_scale, cap, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, KIND, CAPPED, True,
    )  # fmt: skip
    target = out_ptr + at * out_row_stride + heads[:, None] * out_head_stride + dims
    tl.store(target, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
