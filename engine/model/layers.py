"""The arithmetic of a decoder layer outside attention: products with weights, norm, rotary embedding, gate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from engine.config import LinearRopeScaling, ModelConfig, RopeScaling

_MIN_ROWS = 8
"""Fewer rows take other code in the BLAS, which sums in another order."""
_UPCAST_ROWS = 4
_UPCAST_ELEMENTS = 4 * 1024 * 1024
_UPCAST = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
"""Whether this CPU multiplies float32 matrices faster than 16-bit ones (8 times, measured on AVX2)."""


def linear(
    x: torch.Tensor,  # [rows, in]
    weight: torch.Tensor,  # [out, in], type of x
) -> torch.Tensor:  # [rows, out], type of x
    """x @ weight.T.

    In float32, on one thread, a row's result does not depend on the rows that come with it, to the last bit: so a
    request's tokens do not depend on how it was batched or which worker it ran on.
    """
    num_rows = x.shape[0]
    if x.dtype == torch.float32:
        missing = max(0, _MIN_ROWS - num_rows)
        return F.linear(F.pad(x, (0, 0, 0, missing)), weight)[:num_rows] if missing else F.linear(x, weight)
    if not _UPCAST or num_rows < _UPCAST_ROWS:
        return F.linear(x, weight)
    out = x.new_empty(num_rows, weight.shape[0])
    x = x.float()
    step = max(1, _UPCAST_ELEMENTS // weight.shape[1])  # a part of the weight at a time: it stays in cache
    for start in range(0, weight.shape[0], step):
        out[:, start : start + step] = F.linear(x, weight[start : start + step].float())
    return out


class Linear:
    """`linear` with one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # [out, in]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, in] float32."""
        return F.embedding(indices, self._weight).float()


def rms_norm(
    x: torch.Tensor,  # [T, hidden] float32
    weight: torch.Tensor,  # [hidden]
    eps: float,
    offset: float = 0.0,
) -> torch.Tensor:  # [T, hidden], type of weight
    """Scale each row to a root mean square of 1, then by `weight + offset`. Rows may have more dimensions."""
    # F.rms_norm takes half as long again for one row.
    normed = x * x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    if offset:  # rounded once, at the end: in a short type the sum would lose what distinguishes small weights
        return (normed * (weight.float() + offset)).to(weight.dtype)
    return normed.to(weight.dtype) * weight


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:  # [T, 2 * intermediate] -> [T, intermediate]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:  # [T, 2 * intermediate] -> [T, intermediate]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:  # [head_dim / 2] float64
    """Radians per position of each rotated pair, in layers without a window."""
    frequencies = _unscaled(config.head_dim, config.rope_theta)
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor=factor):
            return frequencies / factor
        case scaling:
            return _scale_llama3(frequencies, scaling)


def local_frequencies(config: ModelConfig) -> torch.Tensor:  # [head_dim / 2] float64
    """The same, in layers with a window."""
    if config.local is None or config.local.rope_theta is None:
        return inverse_frequencies(config)
    return _unscaled(config.head_dim, config.local.rope_theta)


def _unscaled(head_dim: int, theta: float) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return theta**-exponents


def _scale_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow pairs are slowed by `factor`, fast ones kept, those between blended by how often they turn in training."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rotation(
    positions: torch.Tensor,  # [T] int64
    frequencies: torch.Tensor,  # [head_dim / 2] float64
) -> tuple[torch.Tensor, torch.Tensor]:  # each [T, 1, head_dim] float32
    """Cosines, and sines signed for `rotate`. From float64, so that every machine rounds to the same numbers."""
    angles = positions.unsqueeze(-1) * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate(
    x: torch.Tensor,  # [T, heads, head_dim]
    cos: torch.Tensor,  # [T, 1, head_dim] float32
    sin: torch.Tensor,  # the same: the first half negative
) -> torch.Tensor:  # [T, heads, head_dim] float32
    """Rotary embedding in Hugging Face's convention: element i turns with element i + head_dim / 2."""
    x = x.float()
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
