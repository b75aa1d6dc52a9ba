"""The encodings of quantized KV as Triton functions: bit for bit those of `engine.kernels.quantized`, on every GPU.

FP8 is put together from the bits of a float32, so that it needs no conversion of the hardware (which begins with
sm_89), rounds alike everywhere, and can be tried in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = 0
"""`KIND` of a kernel: the pool holds what is computed with."""
FP8_NATIVE = 1
"""e4m3, read by the hardware's conversion: sm_89 and later."""
FP8_BITS = 2
"""e4m3, read bit by bit."""
INT8 = 3

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which multiplies bit patterns of bfloat16: those are upcast first."""


@triton.jit
def decode_fp8(codes):
    """int8 -> float32. Right for every code that `encode_fp8` makes: those are normal numbers and zero."""
    bits = codes.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120: e4m3's bias is 7


@triton.jit
def encode_fp8(x):
    """float32 in units of its scale, below 2^8 -> int8: four significant bits, ties to even; NaN becomes 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    code = ((rounded >> 20) - 960) | ((bits >> 24) & 0x80)  # 960: a difference of 120 in the bias
    return tl.where(tl.abs(x) >= 0.01513671875, code, 0).to(tl.int8)  # 2^-6 - 2^-11


@triton.jit
def encode_int8(x):
    """float32 in units of its scale, in [-128, 128) -> int8, rounded down; NaN becomes 0."""
    return tl.where(x == x, tl.floor(x), 0.0).to(tl.int8)


@triton.jit
def scale_for(largest, INT8_CODES: tl.constexpr):
    """For values whose largest absolute value has these bits (int32): a power of two, NaN if that is not finite."""
    factor: tl.constexpr = 0.015625 if INT8_CODES else 0.0078125
    power = (largest & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.maximum(power * factor, 1.1754943508222875e-38)
    return tl.where(largest >= 0x7F800000, float("nan"), scale)


@triton.jit
def inverse_of(scale):
    """Of a power of two, exactly. NaN stays NaN, zero is no power of two."""
    bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
    return tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
