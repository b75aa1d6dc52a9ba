from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.int8 import Int8Linear, quantize


@settings(max_examples=50, deadline=None)
@given(columns=st.integers(1, 70), scale=st.floats(1e-20, 1e20), seed=st.integers(0, 99))
def test_a_rows_numbers_times_its_scale_are_within_half_a_step_of_it(columns: int, scale: float, seed: int) -> None:
    rows = (torch.randn(3, columns, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()

    whole, scales = quantize(rows)

    assert whole.abs().amax(-1).tolist() == [127, 127, 127]
    error = (whole.double() * scales.double()[:, None] - rows.double()).abs()
    assert (error <= 0.501 * scales.double()[:, None]).all()


def test_a_row_of_nothing_is_zeros_and_one_that_is_not_finite_has_no_scale() -> None:
    whole, scales = quantize(torch.tensor([[0.0, 0.0], [1.0, torch.inf], [torch.nan, 2.0], [2.0, -1.0]]))

    assert whole.tolist() == [[0, 0], [0, 0], [0, 0], [127, -64]]
    assert scales[0] == 0.0
    assert scales[1:3].isnan().all()


def test_a_product_is_near_the_exact_one_and_gives_back_rows() -> None:
    dice = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 256, generator=dice) for n in (5, 40))
    product = Int8Linear(weight)

    assert (product(x) - x @ weight.T).abs().max() < 0.05 * 16
    torch.testing.assert_close(product.rows(torch.tensor([7, 0])), weight[[7, 0]], rtol=0.0, atol=0.03)
