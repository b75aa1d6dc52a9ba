from __future__ import annotations

import pytest
import torch

from engine.model import layers
from engine.model.layers import linear, rms_norm, rotate, rotation


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (97, 48), (3, 40)], ids=str)
def test_a_float32_row_gives_the_same_bits_whatever_rows_come_with_it(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(600, shape[1], generator=generator)
    all_at_once = linear(x, weight)

    for start, end in [(0, 1), (5, 6), (0, 2), (1, 4), (0, 5), (2, 9), (3, 11), (0, 16), (7, 40), (1, 257), (88, 600)]:
        assert torch.equal(linear(x[start:end], weight), all_at_once[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 50])
@pytest.mark.parametrize("upcast", [False, True])
def test_linear_is_the_product_with_the_transposed_weight(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int, upcast: bool
) -> None:
    monkeypatch.setattr(layers, "_UPCAST", upcast)  # both kinds of CPU
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 64, generator=generator).to(dtype)
    x = torch.randn(num_rows, 64, generator=generator).to(dtype)

    product = linear(x, weight)

    assert product.dtype == dtype
    expected = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(product, expected)


def test_linear_works_through_a_weight_larger_than_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_UPCAST", True)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4500, 1024, generator=generator).bfloat16()
    x = torch.randn(5, 1024, generator=generator).bfloat16()

    torch.testing.assert_close(linear(x, weight), (x.float() @ weight.float().T).bfloat16())


def test_norm_keeps_a_zero_row_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_rotation_keeps_position_zero_and_all_lengths() -> None:
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))

    rotated = rotate(x, *rotation(torch.tensor([0, 1, 100_000]), frequencies))

    assert torch.equal(rotated[0], x[0])
    assert not torch.allclose(rotated[1], x[1])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_the_distance_of_positions_alone() -> None:
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(q_position: int, k_position: int) -> torch.Tensor:
        return (
            rotate(q, *rotation(torch.tensor([q_position]), frequencies))
            * rotate(k, *rotation(torch.tensor([k_position]), frequencies))
        ).sum()

    torch.testing.assert_close(score(17, 5), score(1012, 1000))
