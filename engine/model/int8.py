"""Products with int8 weights, in plain PyTorch: what `linear_int8.h` does, and its oracle.

Each row, of a weight (an output) or of activations (a token), is whole numbers from -127 to 127 times a scale. So a
product is one exact sum of whole numbers and two multiplications, the same on every machine.
"""

from __future__ import annotations

import torch

LARGEST = 127.0
SMALLEST_SCALED = 1e-30
"""Rows of nothing larger are zeros."""
_STEP_ELEMENTS = 4 * 1024 * 1024
"""Of a weight that are in float64 at a time, whose sums of whole numbers are exact."""
_KEPT_BITS = ~0xFF
"""Of a factor: what is left multiplies a bfloat16 number without rounding."""


def quantize(
    rows: torch.Tensor,  # [n, columns]; rounded to bfloat16 first
) -> tuple[torch.Tensor, torch.Tensor]:  # [n, columns] int8, [n] float32
    """Whole numbers, nearest and ties to even, and the scale of each row: NaN, and zeros, where one is not finite."""
    rows = rows.bfloat16().float()
    finite = rows.isfinite().all(-1)
    most = torch.where(finite, rows.abs().amax(-1), 0.0)
    scaled = most > SMALLEST_SCALED
    factors = torch.full_like(most, LARGEST) / most  # a number over a tensor is rounded twice
    factors = (factors.view(torch.int32) & _KEPT_BITS).view(torch.float32)
    whole = torch.where(scaled[:, None], rows * factors[:, None], 0.0).round().to(torch.int8)
    scales = torch.where(scaled, most / LARGEST, 0.0)
    return whole, torch.where(finite, scales, torch.nan)


class Int8Linear:
    """A product with one weight. Keeps whole numbers and scales, not the weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._whole, self._scales = quantize(weight)  # [out, in], [out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out], type of x."""
        return self.float_product(x).to(x.dtype)

    def float_product(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out] float32."""
        whole, scales = quantize(x)
        sums = x.new_empty(len(x), len(self._whole), dtype=torch.float32)
        step = max(1, _STEP_ELEMENTS // self._whole.shape[1])
        for start in range(0, len(self._whole), step):
            part = self._whole[start : start + step]
            sums[:, start : start + step] = whole.double() @ part.double().T
        return sums * scales[:, None] * self._scales

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, in] float32."""
        return self._whole[indices].float() * self._scales[indices, None]
