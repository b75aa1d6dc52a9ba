"""Drawing on a GPU with Triton in its interpreter: the bits of Philox, and the tokens of `engine.sampler`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from gpu_stand_in import StandIn

from engine.cuda.sampling import CardSampler, changes_of
from engine.errors import InternalError
from engine.kernels import triton_sampling
from engine.sampler import SampledToken, SampleRow, _adjusted, sample, uniform
from engine.sampling_params import SamplingParams

VOCAB = 50


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def ids(tokens: Sequence[SampledToken | InternalError]) -> list[int]:
    return [-1 if isinstance(token, InternalError) else token.token_id for token in tokens]


def drawn(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return ids(CardSampler(StandIn()).sample(logits.clone(), rows))


def expected(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return ids(sample(logits, rows))


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


def test_what_min_p_leaves_out_is_not_drawn() -> None:
    logits = 2 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = [row(seed, temperature=2.0, min_p=min_p) for seed, min_p in enumerate([0.1, 0.9, 1.0, 0.3])]
    assert drawn(logits, rows) == expected(logits, rows)


def history(params: SamplingParams, banned: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(params, 9, banned, prompt=[3, 7, 3, 11], output=[7, 20, 20, 20, 49])


def test_penalties_biases_and_bans_make_the_same_bits_of_the_logits() -> None:
    logits = 5 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[:, 20] = -torch.inf
    rows = [
        history(SamplingParams(repetition_penalty=1.37)),
        history(SamplingParams(presence_penalty=0.3, frequency_penalty=-1.7, repetition_penalty=0.9)),
        history(SamplingParams(logit_bias=((7, 12.3), (49, -100.0), (VOCAB + 5, 1.0)), frequency_penalty=0.11)),
        history(SamplingParams(logit_bias=((2, 3.0),)), banned=(2, 7, VOCAB + 1)),
        history(SamplingParams()),
    ]
    changed = logits.clone()
    changes = changes_of(rows, VOCAB)
    assert changes is not None
    triton_sampling.adjust(changed, *changes.on(logits.device))
    for n, each in enumerate(rows):
        assert changed[n].numpy().tobytes() == _adjusted(logits[n].numpy(), each).tobytes(), n


def test_rows_without_changes_change_nothing() -> None:
    assert changes_of([history(SamplingParams(temperature=0.5, min_p=0.1))], VOCAB) is None


def test_a_ban_hides_no_row_without_meaning_and_a_row_of_bans_has_no_token() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 5] = torch.nan
    rows = [history(SamplingParams(temperature=0.0), banned=(5,))]
    rows += [history(SamplingParams(temperature=0.0), banned=tuple(range(VOCAB)))]
    rows += [SampleRow(SamplingParams(temperature=1.0), 0)]
    told = [str(token) for token in CardSampler(StandIn()).sample(logits, rows)]
    assert [part in text for part, text in zip(("not finite", "banned", "without a seed"), told, strict=True)] == [
        True
    ] * 3


def test_logprobs_are_those_of_the_model_as_on_the_host() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    rows = [
        history(SamplingParams(temperature=0.0, logprobs=4, repetition_penalty=2.0)),
        history(SamplingParams(temperature=1.0, seed=5)),
        history(SamplingParams(temperature=1.0, seed=6, logprobs=0)),
    ]
    assert CardSampler(StandIn()).sample(logits.clone(), rows) == sample(logits, rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_draws_by_every_kind_of_parameter(seed: int) -> None:
    rng = random.Random(seed)
    logits = 2 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[::2] = (2 * logits[::2]).round() / 2
    rows = [
        row(
            rng.getrandbits(64),
            temperature=rng.choice([0.5, 1.0, 3.0]),
            top_k=rng.choice([0, 1, 3, 10, VOCAB, 60]),
            top_p=rng.choice([1.0, 0.05, 0.3, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.02, 0.5]),
        )
        for _ in range(8)
    ]
    assert drawn(logits, rows) == expected(logits, rows)
