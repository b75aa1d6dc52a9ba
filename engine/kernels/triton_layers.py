"""Triton kernels for what stands between a decoder's products: norms with the residual, rotation, gate.

Each reads and writes its tensors once and does little else: bytes over memory bandwidth is its floor. At a decode
step's few rows the launch costs more than the bytes, so they are fused, and captured in a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GATE_BLOCK = 1024


@triton.jit
def _weighted(normed, weight_ptr, mask, ELEMENT: tl.constexpr, OFFSET: tl.constexpr):
    """float32 times weight and offset, rounded as `layers.rms_norm` rounds: to ELEMENT, and back to float32."""
    weight = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
    normed = normed * (weight + OFFSET) if OFFSET != 0.0 else normed.to(ELEMENT).to(tl.float32) * weight
    return normed.to(ELEMENT).to(tl.float32)


@triton.jit
def _normed(x, weight_ptr, mask, size, eps, ELEMENT: tl.constexpr, OFFSET: tl.constexpr):
    """x float32, zero outside of `mask`: float32."""
    return _weighted(x / tl.sqrt(tl.sum(x * x, axis=0) / size + eps), weight_ptr, mask, ELEMENT, OFFSET)


@triton.jit
def add_norm_kernel(
    residual_ptr,  # [T, hidden] float32, contiguous
    delta_ptr,  # [T, hidden], contiguous: added to it, if ADD
    delta_weight_ptr,  # [hidden]: if NORM_DELTA, the delta is normed first
    weight_ptr,  # [hidden]
    out_ptr,  # [T, hidden], contiguous
    hidden, eps,
    BLOCK: tl.constexpr,  # hidden, rounded up to a power of two
    ADD: tl.constexpr, NORM_DELTA: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (T). Bytes for each row: hidden x (4 read + 4 written + types of delta and out)."""
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    mask = at < hidden
    x = tl.load(residual_ptr + row + at, mask=mask, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
        if NORM_DELTA:
            delta = _normed(delta, delta_weight_ptr + at, mask, hidden, eps, delta_ptr.dtype.element_ty, OFFSET)
        x += delta
        tl.store(residual_ptr + row + at, x, mask=mask)
    normed = _normed(x, weight_ptr + at, mask, hidden, eps, out_ptr.dtype.element_ty, OFFSET)
    tl.store(out_ptr + row + at, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotate_kernel(
    qk_ptr,  # [T, heads, head_dim], by stride: queries, then keys; written in place
    positions_ptr,  # [T] int64; negative: a row that is none
    rotations_ptr,  # [positions, 2, head_dim / 2] float32: cosines, sines
    q_weight_ptr, k_weight_ptr,  # [head_dim]: norm of each head before it is rotated, if NORM
    num_q_heads, row_stride, eps,
    HALF: tl.constexpr,  # head_dim / 2
    BLOCK: tl.constexpr,  # that, rounded up to a power of two
    NORM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (T, heads). Bytes: T x heads x head_dim x 2 x type; the rotations come from L2."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if position < 0:
        return
    at = tl.arange(0, BLOCK)
    mask = at < HALF
    first_ptr = qk_ptr + row.to(tl.int64) * row_stride + head * (2 * HALF) + at
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    element: tl.constexpr = qk_ptr.dtype.element_ty
    if NORM:
        size = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)
        norm = 1.0 / tl.sqrt(size / (2 * HALF) + eps)
        weight_ptr = tl.where(head < num_q_heads, q_weight_ptr, k_weight_ptr) + at
        first = _weighted(first * norm, weight_ptr, mask, element, OFFSET)
        second = _weighted(second * norm, weight_ptr + HALF, mask, element, OFFSET)
    rotation_ptr = rotations_ptr + position * (2 * HALF) + at
    cos = tl.load(rotation_ptr, mask=mask, other=0.0)
    sin = tl.load(rotation_ptr + HALF, mask=mask, other=0.0)
    tl.store(first_ptr, (first * cos - second * sin).to(element), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(element), mask=mask)


@triton.jit
def gate_kernel(
    gate_up_ptr,  # [T, 2 * size], contiguous: gates, then what they gate
    out_ptr,  # [T, size], contiguous
    size,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,  # by its tangent approximation, as Gemma has it; else silu
):
    """Grid (T, ceil(size / BLOCK)). Bytes: T x size x 3 x type."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    element: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * size + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + at, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # x / 2 * (1 + tanh(y)) is x * sigmoid(2 y)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * size + at, (gate.to(element).to(tl.float32) * up).to(element), mask=mask)


def add_norm(
    residual: torch.Tensor,  # [T, hidden] float32, contiguous
    delta: torch.Tensor | None,  # [T, hidden], contiguous: added in place
    weight: torch.Tensor,  # [hidden]
    eps: float,
    out: torch.Tensor,  # [T, hidden], type of weight, written
    delta_weight: torch.Tensor | None = None,  # [hidden]: norm of the delta, before it is added
    offset: float = 0.0,  # of all norms' weights
) -> None:
    """`residual += delta`, and `out` is `layers.rms_norm` of the sum."""
    num_rows, hidden = residual.shape
    block = triton.next_power_of_2(hidden)
    add_norm_kernel[(num_rows,)](
        residual, residual if delta is None else delta, weight if delta_weight is None else delta_weight, weight, out,
        hidden, eps, BLOCK=block, ADD=delta is not None, NORM_DELTA=delta_weight is not None,
        OFFSET=offset, num_warps=norm_warps(block),
    )  # fmt: skip


def norm_warps(block: int) -> int:
    """So that a thread holds at most 32 values of a row of `block`."""
    return min(16, max(1, block // 1024))


def rotate_in_place(
    qk: torch.Tensor,  # [T, heads, head_dim], a row's heads contiguous: queries, then keys
    positions: torch.Tensor,  # [T] int64; negative rows are left alone
    rotations: torch.Tensor,  # [positions, 2, head_dim / 2] float32
    num_q_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,  # [head_dim] each: of queries and keys
    eps: float = 0.0,
    offset: float = 0.0,
) -> None:
    """`layers.rotate`, rounded to the type of `qk`; with `norms`, each head is normed first."""
    num_rows, num_heads, head_dim = qk.shape
    q_norm, k_norm = (rotations, rotations) if norms is None else norms
    rotate_kernel[(num_rows, num_heads)](
        qk, positions, rotations, q_norm, k_norm, num_q_heads, qk.stride(0), eps,
        HALF=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2), NORM=norms is not None,
        OFFSET=offset, num_warps=1,
    )  # fmt: skip


def gate(
    gate_up: torch.Tensor,  # [T, 2 * size], contiguous
    out: torch.Tensor,  # [T, size], contiguous, written
    gelu: bool = False,
) -> None:
    """`layers.silu_and_mul`, or the same with a GELU."""
    num_rows, size = out.shape
    grid = (num_rows, triton.cdiv(size, _GATE_BLOCK))
    gate_kernel[grid](gate_up, out, size, BLOCK=_GATE_BLOCK, GELU=gelu)
