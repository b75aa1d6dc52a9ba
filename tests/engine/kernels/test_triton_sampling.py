"""Triton's sampler in its interpreter: the bits of Philox, and the tokens of `engine.sampler`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from engine.errors import InternalError
from engine.kernels import triton_sampling
from engine.sampler import SampleRow, sample, uniform
from engine.sampling_params import SamplingParams

VOCAB = 50


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def drawn(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    params = [row.params for row in rows]
    return triton_sampling.sample(
        logits,
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([signed(p.seed or 0) for p in params]),
        torch.tensor([row.position for row in rows]),
    ).tolist()


def expected(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return [-1 if isinstance(t, InternalError) else t.token_id for t in sample(logits, rows)]


def row(seed: int, **params: float) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=1, seed=seed, **params), seed % 1000)  # type: ignore[arg-type]


def test_random_numbers_are_those_of_the_engine_to_the_last_bit() -> None:
    rng = random.Random(0)
    seeds = [0, 1, 2**63, 2**64 - 1, *(rng.getrandbits(64) for _ in range(20))]
    positions = [0, 2**32, 2**63 - 1, 5, *(rng.getrandbits(40) for _ in range(20))]
    out = torch.empty(len(seeds), dtype=torch.float64)

    triton_sampling.uniform_kernel[(len(seeds),)](
        torch.tensor([signed(seed) for seed in seeds]), torch.tensor(positions), out
    )

    assert out.tolist() == [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_the_most_likely_token_is_the_first_of_equals() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [20, 40]] = 3.0
    logits[2] = -torch.inf
    logits[2, 30] = -1e30
    assert drawn(logits, [row(1, temperature=0.0)] * 3) == [0, 20, 30]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_meaning_has_no_token(value: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 33] = value
    logits[1] = -torch.inf
    rows = [row(1, temperature=1.0), row(1, temperature=1.0), row(1, temperature=0.0)]
    assert drawn(logits, rows) == [-1, -1, 0]


def test_draws_from_all_tokens() -> None:
    logits = 2 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, ::7] = -torch.inf
    rows = [row(seed, temperature=temperature) for seed, temperature in enumerate([0.3, 1.0, 1.0, 2.0, 2.0, 9.0])]
    assert drawn(logits, rows) == expected(logits, rows)


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}])
def test_draws_from_the_most_likely_tokens_with_ties(params: dict[str, float]) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)).mul_(2).round_()
    rows = [row(seed, temperature=1.5, **params) for seed in range(2)]
    assert drawn(logits, rows) == expected(logits, rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_draws_by_every_kind_of_parameter(seed: int) -> None:
    rng = random.Random(seed)
    logits = 2 * torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[::2] = (2 * logits[::2]).round() / 2
    rows = [
        row(
            rng.getrandbits(64),
            temperature=rng.choice([0.5, 1.0, 3.0]),
            top_k=rng.choice([0, 1, 3, 10, VOCAB, 60]),
            top_p=rng.choice([1.0, 0.05, 0.3, 0.9, 0.999]),
        )
        for _ in range(20)
    ]
    assert drawn(logits, rows) == expected(logits, rows)
