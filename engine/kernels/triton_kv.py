"""Triton kernels that write KV into blocks and move blocks. Grids and bytes stand with each kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton_codes import decode_fp8, encode_fp8, encode_int8, inverse_of, scale_for

_COPY_WORDS = 2048


@triton.jit
def store_kernel(
    kv_ptr,  # keys [T, kv_heads, head_dim], and values `kv_stride` behind them
    pool_ptr,  # one layer of a pool: [blocks, 2, kv_heads, block_size, head_dim], by strides
    slot_blocks_ptr,  # [T] int64; negative: a token that is none, as the padding of a captured graph
    slot_offsets_ptr,  # [T] int64
    kv_stride,
    token_stride,
    head_stride,
    pool_block_stride,
    pool_kv_stride,
    pool_head_stride,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # KV_HEADS, rounded up to a power of two
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
):
    """Grid (T, 2). Reads and writes each value once: 2 x T x kv_heads x head_dim x (type + KV type) bytes."""
    token, part = tl.program_id(0), tl.program_id(1)
    block = tl.load(slot_blocks_ptr + token)
    if block < 0:
        return
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, DIMS)[None, :]
    mask = (heads < KV_HEADS) & (dims < HEAD_DIM)
    source = kv_ptr + part.to(tl.int64) * kv_stride + token.to(tl.int64) * token_stride
    values = tl.load(source + heads * head_stride + dims, mask=mask)
    slot = tl.load(slot_offsets_ptr + token) * HEAD_DIM
    target = pool_ptr + block.to(tl.int64) * pool_block_stride + part * pool_kv_stride + slot
    tl.store(target + heads * pool_head_stride + dims, values.to(pool_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_quantized_kernel(
    kv_ptr,  # keys [T, kv_heads, head_dim], and values `kv_stride` behind them
    pool_ptr,  # one layer of a pool: [blocks, 2, kv_heads, block_size, head_dim] int8, by strides
    scales_ptr,  # of the same layer: [blocks, 2, kv_heads] float32, by strides
    slot_blocks_ptr,  # [T] int64; negative: a token that is none
    slot_offsets_ptr,  # [T] int64
    num_tokens,
    kv_stride,
    token_stride,
    head_stride,
    pool_block_stride,
    pool_kv_stride,
    pool_head_stride,
    scales_block_stride,
    scales_kv_stride,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    INT8_CODES: tl.constexpr,
):
    """Grid (T, 2, kv_heads). The first token of each block's run does the whole run: one scale, all slots.

    A decode step reads and writes its block once: 2 x block_size x head_dim bytes for each head, sequence and part.
    """
    token, part, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.load(slot_blocks_ptr + token)
    before = tl.load(slot_blocks_ptr + token - 1, mask=token > 0, other=-1)
    if block < 0 or block == before:
        return
    block = block.to(tl.int64)
    slots, dims = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, DIMS)[None, :]
    first = tl.load(slot_offsets_ptr + token)
    # The run's tokens stand in the order of their slots, so that of slot n is token + n - first.
    tokens = token + slots - first
    candidate = (slots >= first) & (tokens < num_tokens)
    of_block = tl.load(slot_blocks_ptr + tokens, mask=candidate, other=-1)
    written = candidate & (of_block == block)
    source = kv_ptr + part.to(tl.int64) * kv_stride + tokens.to(tl.int64) * token_stride + head * head_stride
    new_values = tl.load(source + dims, mask=written & (dims < HEAD_DIM), other=0.0).to(tl.float32)
    largest = tl.max(tl.max(new_values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    needed = scale_for(largest, INT8_CODES)

    scale_ptr = scales_ptr + block * scales_block_stride + part * scales_kv_stride + head
    old = tl.load(scale_ptr, mask=first > 0, other=0.0)
    scale = tl.where((old != old) | (needed != needed), float("nan"), tl.maximum(old, needed))
    inverse = inverse_of(scale)
    target = pool_ptr + block * pool_block_stride + part * pool_kv_stride + head * pool_head_stride
    target += slots * HEAD_DIM + dims
    begun = slots * 0 < first  # for all slots: triton 3.9's interpreter makes an integer mask of a scalar condition
    codes = tl.load(target, mask=begun & (dims < HEAD_DIM), other=0)
    if INT8_CODES:
        values = tl.where(written, new_values * inverse, codes.to(tl.float32) * (old * inverse))
        codes = encode_int8(values)
    else:
        values = tl.where(written, new_values * inverse, decode_fp8(codes) * (old * inverse))
        codes = encode_fp8(values)
    tl.store(target, codes, mask=(slots < BLOCK_SIZE) & (dims < HEAD_DIM))
    tl.store(scale_ptr, scale)


@triton.jit
def copy_kernel(
    source_ptr,  # int32 words
    target_ptr,  # int32 words
    source_ids_ptr,  # [n] int64; negative: nothing to copy
    target_ids_ptr,  # [n] int64
    source_block_stride,  # all in words
    target_block_stride,
    source_part_stride,
    target_part_stride,
    part_words,
    WORDS: tl.constexpr,
):
    """Grid (n, parts, ceil(part_words / WORDS)): copies `part_words` from each part of a block to one of another.

    Reads and writes n x parts x part_words x 4 bytes: a plain copy of as many bytes is the limit.
    """
    pair, part, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(source_ids_ptr + pair), tl.load(target_ids_ptr + pair)
    if source < 0:
        return
    words = chunk * WORDS + tl.arange(0, WORDS)
    part = part.to(tl.int64)
    source_start = source_ptr + source * source_block_stride + part * source_part_stride
    target_start = target_ptr + target * target_block_stride + part * target_part_stride
    mask = words < part_words
    tl.store(target_start + words, tl.load(source_start + words, mask=mask), mask=mask)


def store_kv(
    k: torch.Tensor,  # [T, kv_heads, head_dim], float32 or of 16 bits; each head contiguous
    v: torch.Tensor,  # the same, with the same strides
    pool: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, head_dim]
    layer: int,
    slot_blocks: torch.Tensor,  # [T] int64
    slot_offsets: torch.Tensor,  # [T] int64
    kv_scales: torch.Tensor | None = None,  # [blocks, layers, 2, kv_heads] float32, with a quantized pool
) -> None:
    """`reference.store_kv` on the GPU of its arguments, and no wait for it. Tokens of block -1 are left out."""
    num_tokens, num_heads, head_dim = k.shape
    kv = pool[:, layer]
    # Keys and values of one projection are slices of one tensor; two tensors that are not get a copy.
    distance, rest = divmod(v.data_ptr() - k.data_ptr(), k.element_size())
    if rest or k.stride() != v.stride() or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
        k, v = torch.stack((k, v)).unbind()
        distance = k.numel()
    strides = (distance, k.stride(0), k.stride(1), kv.stride(0), kv.stride(1), kv.stride(2))
    dims = triton.next_power_of_2(head_dim)
    if kv_scales is None:
        store_kernel[(num_tokens, 2)](
            k, kv, slot_blocks, slot_offsets, *strides,
            KV_HEADS=num_heads, HEADS=triton.next_power_of_2(num_heads), HEAD_DIM=head_dim, DIMS=dims,
        )  # fmt: skip
        return
    scales = kv_scales[:, layer]
    store_quantized_kernel[(num_tokens, 2, num_heads)](
        k, kv.view(torch.int8), scales, slot_blocks, slot_offsets, num_tokens, *strides,
        scales.stride(0), scales.stride(1),
        HEAD_DIM=head_dim, DIMS=dims, BLOCK_SIZE=kv.shape[3], INT8_CODES=kv.dtype == torch.int8,
    )  # fmt: skip


def copy_blocks(
    source: torch.Tensor,  # [blocks, bytes of a block] uint8, rows a multiple of 4 bytes apart
    target: torch.Tensor,  # the same: another tensor or the same one
    source_ids: torch.Tensor,  # [n] int64; negative ones are left out
    target_ids: torch.Tensor,  # [n] int64, none twice, none of the sources if `source` is `target`
) -> None:
    """Copy whole blocks: within a pool, out of it into staging (gather) and back (scatter)."""
    copy_parts(source, target, source_ids, target_ids, (0, 0, source.shape[1], 1), (0, 0))


def copy_parts(
    source: torch.Tensor,  # [blocks, bytes of a block] uint8
    target: torch.Tensor,  # [blocks, bytes of a block] uint8
    source_ids: torch.Tensor,  # [n] int64
    target_ids: torch.Tensor,  # [n] int64
    source_parts: tuple[int, int, int, int],  # bytes to the first part, between parts, of each part; number of parts
    target_parts: tuple[int, int],  # bytes to the first part, between parts
) -> None:
    """Copy the same parts of each block, as a slice of its heads: one piece for each layer, keys and values.

    Every number of bytes is a multiple of 4.
    """
    first, apart, size, count = source_parts
    grid = (len(source_ids), count, triton.cdiv(size // 4, _COPY_WORDS))
    if not len(source_ids):
        return
    copy_kernel[grid](
        _words(source[:, first:]), _words(target[:, target_parts[0] :]), source_ids, target_ids,
        source.stride(0) // 4, target.stride(0) // 4, apart // 4, target_parts[1] // 4, size // 4,
        WORDS=_COPY_WORDS,
    )  # fmt: skip


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)
