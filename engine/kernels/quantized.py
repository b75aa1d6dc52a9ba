"""FP8 (e4m3) and INT8 KV: in each block and layer, one scale for the keys and one for the values of each kv head.

A scale is a power of two, the smallest that fits what the block holds. When a later token needs a larger one, what is
there already is encoded again. A block's bytes depend only on its tokens' keys and values, not on the chunks in which
they came, because encoding twice, first under a smaller scale, gives the same codes as encoding once:

  INT8 rounds down, and floor(floor(x) / 2) = floor(x / 2). Code n means something in [n, n + 1) and is read as the
  middle, half a scale off at most. There is no exact zero.

  FP8 rounds to nearest with four significant bits, which a factor of two leaves alone, as far down as e4m3 has four.
  Smaller values become zero: less than 1/8192 of the largest one in the block.

(All this while float32 can hold value / scale: values below 2^-100 of the largest one may differ.)

Writing a block's first slot means that the block begins anew: scale and codes of its former owner count no more.
Whoever writes another slot owns the block, and the slots before it hold its tokens; a shared block is never written.

No error is raised here. A key or value that is not finite turns its scale into NaN, so all that is read from that head
of the block is NaN until the block begins anew: the logits say NaN, as they do with the other types, and the sampler
refuses those.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn

_MIN_SCALE = 2.0**-126  # the smallest whose inverse float32 has, too
_EXPONENT_BITS = 0x7F800000  # of a float32
_INT8_SCALE = 2.0**-6  # of the largest power of two in the block: its codes reach 127
_FP8_SCALE = 2.0**-7  # they reach 256, of the 448 that e4m3 has
_FP8_LEAST = 2.0**-6 - 2.0**-11  # what is smaller is nearer to a value that e4m3 has not with four bits


def store(
    kv: torch.Tensor,  # [T, 2 (K, V), kv_heads, head_dim] float32
    pool: torch.Tensor,  # [blocks, 2, kv_heads, block_size, head_dim] e4m3 or int8: one layer of a pool
    scales: torch.Tensor,  # [blocks, 2, kv_heads] float32: of the same layer
    slot_blocks: torch.Tensor,  # [T] int64: the tokens of one block come one after the other, in the order of offsets
    slot_offsets: torch.Tensor,  # [T] int64
) -> None:
    """Write each token's key and value into its slot. Slots behind it in a block that begins anew become zero codes."""
    codes = pool.view(torch.int8)
    blocks, block_of_token, counts = torch.unique_consecutive(slot_blocks, return_inverse=True, return_counts=True)
    begins = slot_offsets[counts.cumsum(0) - counts] == 0
    old = scales[blocks].masked_fill_(begins[:, None, None], 0.0)  # [touched, 2, kv_heads]
    needed = _scale(kv.abs().amax(dim=-1), pool.dtype)  # [T, 2, kv_heads]
    new = old.scatter_reduce(0, block_of_token[:, None, None].expand_as(needed), needed, "amax")
    values = _decode(codes[blocks], pool.dtype) * (old / new)[..., None, None]  # in units of the new scales
    values[block_of_token, :, :, slot_offsets] = kv / new[block_of_token][..., None]
    codes[blocks] = _encode(values, pool.dtype)
    scales[blocks] = new


def load(
    pool: torch.Tensor,  # [blocks, 2, kv_heads, block_size, head_dim] e4m3 or int8: one layer of a pool
    scales: torch.Tensor,  # [blocks, 2, kv_heads] float32: of the same layer
    table: torch.Tensor,  # [n] int64
    out: torch.Tensor,  # [2, kv_heads, n, block_size, head_dim] float32, written
) -> None:
    """Read whole blocks."""
    codes = pool.view(torch.int8).index_select(0, table)
    out.copy_(_decode(codes, pool.dtype).permute(1, 2, 0, 3, 4))
    if pool.dtype == torch.int8:
        out += 0.5
    out *= scales[table].permute(1, 2, 0)[..., None, None]


def _scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For values up to `largest`, float32. NaN where that is not finite."""
    power = largest.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)  # the largest one in it
    scale = (power * (_INT8_SCALE if dtype == torch.int8 else _FP8_SCALE)).clamp_(min=_MIN_SCALE)
    return scale.masked_fill_(~largest.isfinite(), torch.nan)


def _encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32, in units of its scale -> codes, int8. NaN becomes 0."""
    if dtype == torch.int8:
        return x.floor().nan_to_num_(0.0).to(torch.int8)
    return x.where(x.abs() >= _FP8_LEAST, 0.0).to(FP8).view(torch.int8)


def _decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes, int8 -> what `_encode` made them of, rounded as it rounds: float32, or for INT8 the codes as they are."""
    if dtype == torch.int8:
        return codes
    # A tenth of the time of torch's conversion: sign, exponent and mantissa to their places in a float16, whose
    # exponent counts from 8 less.
    bits = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float().mul_(256.0)
