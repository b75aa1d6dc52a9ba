"""Triton's norms, rotation and gates in its interpreter, against the decoder's own arithmetic."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import triton_layers
from engine.model import layers

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 4e-2}
"""Of bfloat16: the interpreter rounds to it by up to a unit in the last place more, each time."""
each_type = pytest.mark.parametrize("dtype", TOLERANCES)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(7)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@each_type
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_residual_takes_the_delta_and_the_sum_is_normed(dtype: torch.dtype, offset: float) -> None:
    residual, delta, weight = torch.randn(3, 72), torch.randn(3, 72).to(dtype), torch.randn(72).to(dtype)
    out, expected = torch.full((3, 72), torch.nan, dtype=dtype), residual + delta.float()

    triton_layers.add_norm(residual, delta, weight, 1e-5, out, offset=offset)

    assert torch.equal(residual, expected)
    assert_near(out, layers.rms_norm(expected, weight, 1e-5, offset), dtype)


@each_type
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_delta_may_be_normed_before_it_is_added(dtype: torch.dtype, offset: float) -> None:
    residual, delta = torch.randn(2, 40), torch.randn(2, 40).to(dtype)
    weights = torch.randn(2, 40).to(dtype)
    out = torch.full((2, 40), torch.nan, dtype=dtype)
    expected = residual + layers.rms_norm(delta.float(), weights[0], 1e-6, offset).float()

    triton_layers.add_norm(residual, delta, weights[1], 1e-6, out, weights[0], offset)

    assert_near(residual, expected, dtype)
    assert_near(out, layers.rms_norm(residual, weights[1], 1e-6, offset), dtype)


def test_without_a_delta_the_residual_is_left_alone() -> None:
    residual, weight, out = torch.randn(2, 33), torch.randn(33), torch.full((2, 33), torch.nan)
    before = residual.clone()
    triton_layers.add_norm(residual, None, weight, 1e-5, out)
    assert torch.equal(residual, before)
    assert_near(out, layers.rms_norm(before, weight, 1e-5), torch.float32)


@each_type
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_queries_and_keys_are_rotated_in_place_and_values_are_not(
    dtype: torch.dtype, normed: bool, head_dim: int
) -> None:
    frequencies = 1e4 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(40).unsqueeze(-1) * frequencies
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    positions = torch.tensor([0, 39, -1, 7])
    qkv = torch.randn(4, 7, head_dim).to(dtype)
    before, weights = qkv.clone(), torch.randn(2, head_dim).to(dtype)
    expected = before.clone()
    if normed:
        expected[:, :3] = layers.rms_norm(before[:, :3].float(), weights[0], 1e-6)
        expected[:, 3:5] = layers.rms_norm(before[:, 3:5].float(), weights[1], 1e-6)
    expected[:, :5] = layers.rotate(expected[:, :5], *layers.rotation(positions, frequencies)).to(dtype)
    expected[2], expected[:, 5:] = before[2], before[:, 5:]

    triton_layers.rotate_in_place(qkv[:, :5], positions, table, 3, (weights[0], weights[1]) if normed else None, 1e-6)

    assert torch.equal(qkv[:, 5:], before[:, 5:])
    assert torch.equal(qkv[2], before[2])
    assert_near(qkv, expected, dtype)


@each_type
@pytest.mark.parametrize(("gelu", "reference"), [(False, layers.silu_and_mul), (True, layers.gelu_tanh_and_mul)])
def test_gates(dtype: torch.dtype, gelu: bool, reference: object) -> None:
    assert callable(reference)
    gate_up = (4 * torch.randn(3, 2 * 1100)).to(dtype)
    out = torch.full((3, 1100), torch.nan, dtype=dtype)
    triton_layers.gate(gate_up, out, gelu)
    assert_near(out, reference(gate_up), dtype)


@pytest.mark.parametrize(("block", "warps"), [(64, 1), (1024, 1), (4096, 4), (65536, 16)])
def test_a_long_row_is_shared_by_more_warps(block: int, warps: int) -> None:
    assert triton_layers.norm_warps(block) == warps
