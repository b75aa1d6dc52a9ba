from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.errors import InternalError
from engine.sampler import SampledToken, SampleRow, sample, uniform
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def row(
    params: SamplingParams = GREEDY,
    position: int = 0,
    banned: tuple[int, ...] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> SampleRow:
    return SampleRow(params=params, position=position, banned_token_ids=banned, prompt=prompt, output=output)


def drawn(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Tokens of rows that all have one."""
    tokens: list[SampledToken] = []
    for token in sample(logits, rows):
        assert isinstance(token, SampledToken), token
        tokens.append(token)
    return tokens


def refusal(logits: torch.Tensor, row: SampleRow) -> str:
    """Why no token can be drawn."""
    (error,) = sample(logits, [row])
    assert isinstance(error, InternalError)
    return str(error)


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(
    logits: list[float],
    params: SamplingParams,
    num_draws: int,
    banned: tuple[int, ...] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Counter[int]:
    """Tokens drawn at positions 0, 1, 2, ..."""
    rows = [row(params, position, banned, prompt, output) for position in range(num_draws)]
    return Counter(token.token_id for token in drawn(torch.tensor([logits] * num_draws), rows))


def chi_square(counts: Counter[int], probabilities: npt.NDArray[np.float64]) -> float:
    """Over the tokens of probability above 0; tokens of probability 0 must not occur."""
    total = sum(counts.values())
    assert all(probabilities[token_id] > 0 for token_id in counts)
    return float(sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities.tolist()) if p > 0))


def softmax(logits: list[float], temperature: float = 1.0) -> npt.NDArray[np.float64]:
    weights = np.exp(np.array(logits) / temperature)
    return np.asarray(weights / weights.sum())


def test_a_uniform_number_is_the_top_53_bits_of_two_words() -> None:
    assert uniform(0, 0) == (0xE169C58D6627E8D5 >> 11) / 2**53
    assert uniform(2**64 - 1, 2**40) != uniform(2**64 - 1, 0) != uniform(2**32 - 1, 0)


def test_uniform_numbers_are_spread_evenly_over_positions_and_seeds() -> None:
    for numbers in ([uniform(7, position) for position in range(20000)], [uniform(seed, 7) for seed in range(20000)]):
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 149  # 99.9th percentile for 99 degrees of freedom
        assert 0 <= min(numbers) < max(numbers) < 1


def test_greedy_takes_the_largest_logit_of_each_row() -> None:
    logits = random_logits(20, 1000)

    tokens = drawn(logits, [row(position=i) for i in range(20)])

    assert tokens == [SampledToken(int(values.argmax()), None) for values in logits]


@pytest.mark.parametrize("equals", [(3, 4), (0, 999), (17, 501, 640)])
def test_greedy_takes_the_lowest_id_among_equals(equals: tuple[int, ...]) -> None:
    logits = random_logits(1, 1000)
    logits[0, list(equals)] = 50.0

    assert drawn(logits, [row()])[0].token_id == equals[0]


def test_probabilities_are_those_of_the_softmax() -> None:
    logits = [1.0, -0.5, 2.0, 0.0, -3.0, 1.0, 0.3, -1.0]

    counts = draw(logits, SamplingParams(temperature=1.0, seed=11), 8000)

    assert chi_square(counts, softmax(logits)) < 24.3  # 99.9th percentile for 7 degrees of freedom


@pytest.mark.parametrize("temperature", [0.3, 2.5])
def test_temperature_divides_the_logits(temperature: float) -> None:
    logits = [1.0, -0.5, 2.0, 0.0, 0.7, 1.0, 0.3, -1.0]

    counts = draw(logits, SamplingParams(temperature=temperature, seed=12), 8000)

    assert chi_square(counts, softmax(logits, temperature)) < 24.3


def test_top_k_keeps_the_k_most_likely_and_their_ratios() -> None:
    logits = [1.0, -0.5, 2.0, 0.0, 0.7, 1.2, 0.3, -1.0]

    counts = draw(logits, SamplingParams(temperature=1.0, top_k=3, seed=13), 4000)

    kept = np.array([softmax(logits)[i] if i in (2, 5, 0) else 0.0 for i in range(8)])
    assert chi_square(counts, kept / kept.sum()) < 13.8  # 2 degrees of freedom


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    counts = draw([1.0, 3.0, 1.0, 1.0, 3.0], SamplingParams(temperature=1.0, top_k=3, seed=1), 300)

    assert set(counts) == {0, 1, 4}


def test_top_p_keeps_the_shortest_head_that_reaches_it() -> None:
    probabilities = [0.05, 0.4, 0.1, 0.3, 0.15]
    logits = [math.log(p) for p in probabilities]

    # 0.4 + 0.3 = 0.7 does not reach 0.75; with 0.15 it does.
    counts = draw(logits, SamplingParams(temperature=1.0, top_p=0.75, seed=14), 4000)

    assert chi_square(counts, np.array([0.0, 0.4, 0.0, 0.3, 0.15]) / 0.85) < 13.8


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]

    # Of the first two, 0.4 / 0.7 = 0.57 reaches 0.5 alone.
    counts = draw(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.5, seed=15), 200)

    assert set(counts) == {0}


@pytest.mark.parametrize("top_p", [1e-300, 0.1, 0.5, 0.9, 0.999, 1.0 - 2**-53])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0])
def test_top_p_over_a_large_vocabulary_is_that_of_a_full_sort(top_p: float, spread: float) -> None:
    logits = random_logits(1, 30000, seed=5) * spread
    values = logits[0].double().numpy()
    order = np.lexsort((np.arange(30000), -values))
    weights = np.exp(values[order] - values.max())
    kept = int(np.searchsorted(np.cumsum(weights), top_p * np.exp(values - values.max()).sum())) + 1
    allowed = order[:kept]
    cumulative = np.cumsum(weights[:kept])
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=21)

    for position in range(20):
        expected = allowed[np.searchsorted(cumulative, uniform(21, position) * cumulative[-1], side="right")]
        assert drawn(logits, [row(params, position)])[0].token_id == expected


def test_min_p_keeps_tokens_by_their_share_of_the_most_likely() -> None:
    logits = [math.log(p) for p in (0.05, 0.4, 0.11, 0.3, 0.14)]

    counts = draw(logits, SamplingParams(min_p=0.25, seed=31), 4000)

    kept = np.array([0.0, 0.4, 0.11, 0.3, 0.14])
    assert chi_square(counts, kept / kept.sum()) < 16.3


def test_min_p_counts_after_temperature_and_before_top_p() -> None:
    probabilities = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
    hotter = probabilities**0.5  # 0.05 has a share of 0.35 now, no more 0.125
    params = SamplingParams(temperature=2.0, min_p=0.4, top_p=0.7, seed=32)

    counts = draw([math.log(p) for p in probabilities], params, 4000)

    kept = np.where(hotter / hotter.max() >= 0.4, hotter, 0.0)
    assert kept[[1, 3]].sum() < 0.7 * kept.sum() <= kept[[1, 3, 4]].sum()
    kept[2] = 0.0
    assert chi_square(counts, kept / kept.sum()) < 13.8


def test_min_p_and_top_k_both_hold() -> None:
    logits = [math.log(p) for p in (0.05, 0.4, 0.1, 0.3, 0.15)]

    assert set(draw(logits, SamplingParams(min_p=0.7, top_k=3, seed=33), 200)) == {1, 3}
    assert set(draw(logits, SamplingParams(min_p=0.2, top_k=2, seed=33), 200)) == {1, 3}


LOGITS = [1.0, -0.5, 2.0, 0.0, 0.7, 1.2, 0.3, -1.0]
PROMPT, OUTPUT = [2, 2, 1], [4, 4, 4, 0]


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        (SamplingParams(repetition_penalty=1.5, seed=41), {2: 2.0 / 1.5, 1: -0.75, 4: 0.7 / 1.5, 0: 1.0 / 1.5}),
        (SamplingParams(repetition_penalty=0.5, seed=42), {2: 4.0, 1: -0.25, 4: 1.4, 0: 2.0}),
        (SamplingParams(presence_penalty=0.8, seed=43), {4: -0.1, 0: 0.2}),
        (SamplingParams(frequency_penalty=0.4, seed=44), {4: -0.5, 0: 0.6}),
        (SamplingParams(frequency_penalty=-0.5, presence_penalty=0.25, seed=45), {4: 1.95, 0: 1.25}),
        (SamplingParams(logit_bias=((7, 2.0), (2, -100.0)), seed=46), {7: 1.0, 2: -98.0}),
        (
            SamplingParams(logit_bias=((7, 2.0), (4, 1.0)), repetition_penalty=2.0, presence_penalty=1.0, seed=47),
            {7: 1.0, 4: -0.15, 0: -0.5, 2: 1.0, 1: -1.0},
        ),
    ],
    ids=lambda value: f"seed {value.seed}" if isinstance(value, SamplingParams) else "",
)
def test_penalties_and_biases_change_the_logits_as_they_are_defined(
    params: SamplingParams, changed: dict[int, float]
) -> None:
    expected = [changed.get(i, value) for i, value in enumerate(LOGITS)]

    counts = draw(LOGITS, params, 3000, prompt=PROMPT, output=OUTPUT)

    probabilities = softmax(expected)
    likely = np.where(probabilities > 1e-9, probabilities, 0.0)
    assert chi_square(counts, likely / likely.sum()) < 24.3


def test_greedy_takes_the_best_of_the_changed_logits() -> None:
    penalized = SamplingParams(temperature=0.0, repetition_penalty=4.0)
    biased = SamplingParams(temperature=0.0, logit_bias=((7, 100.0), (5000, 100.0)))
    outside = SamplingParams(temperature=0.0, logit_bias=((5000, 100.0),))

    assert set(draw(LOGITS, penalized, 1, prompt=PROMPT, output=OUTPUT)) == {5}
    assert set(draw(LOGITS, biased, 1)) == {7}
    assert set(draw(LOGITS, outside, 1)) == {2}


def test_no_bias_brings_a_banned_token_back() -> None:
    params = SamplingParams(logit_bias=((2, 100.0),), repetition_penalty=0.01, seed=1)

    assert 2 not in draw(LOGITS, params, 100, banned=(2,), prompt=PROMPT)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
def test_a_tiny_temperature_is_greedy_in_the_limit(temperature: float) -> None:
    counts = draw([1.0, 0.5, 4.0, 3.5], SamplingParams(temperature=temperature, seed=1), 50)

    assert set(counts) == {2}


def test_a_huge_temperature_is_uniform_in_the_limit() -> None:
    counts = draw([1.0, 0.5, 40.0, 3.5], SamplingParams(temperature=1e308, seed=16), 4000)

    assert chi_square(counts, np.full(4, 0.25)) < 16.3  # 3 degrees of freedom


PARAMS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2**64 - 1, logprobs=3),
    SamplingParams(temperature=1.3, top_k=50, seed=3),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, seed=4, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=0.8, min_p=0.1, repetition_penalty=1.3, seed=5),
    SamplingParams(temperature=1.1, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((9, 4.0),), seed=6),
]


def test_a_token_does_not_depend_on_the_batch() -> None:
    logits = random_logits(40, 5000, seed=2)
    rows = [
        row(PARAMS[i % len(PARAMS)], 10 + i, (5, 7) if i % 3 else (), range(i, 2 * i), [i, i, 3]) for i in range(40)
    ]
    alone = [drawn(logits[i : i + 1], [rows[i]])[0] for i in range(40)]

    assert drawn(logits, rows) == alone
    assert drawn(logits.flip(0), rows[::-1]) == alone[::-1]


def test_the_draw_depends_on_seed_and_position() -> None:
    logits = random_logits(1, 5000).expand(200, 5000)

    def tokens(seed: int, first: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return [token.token_id for token in drawn(logits, [row(params, first + i) for i in range(200)])]

    assert tokens(1, 0) == tokens(1, 0)
    assert tokens(1, 0)[50:] == tokens(1, 50)[:150]
    assert tokens(1, 0) != tokens(2, 0)


def test_logits_are_left_unchanged() -> None:
    logits = random_logits(len(PARAMS), 100)
    before = logits.clone()

    drawn(logits, [row(params, banned=(1, 2)) for params in PARAMS])

    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", PARAMS, ids=repr)
def test_a_banned_token_is_never_drawn(params: SamplingParams) -> None:
    logits = random_logits(1, 50)
    best = logits[0].argsort(descending=True)[:30].tolist()

    for position in range(30):
        assert drawn(logits, [row(params, position, banned=tuple(best))])[0].token_id not in best


def test_bans_come_before_top_k() -> None:
    params = SamplingParams(temperature=1.0, top_k=1, seed=1)

    assert set(draw([5.0, 4.0, 3.0], params, 20, banned=(0,))) == {1}


def test_banned_ids_outside_the_vocabulary_are_ignored() -> None:
    tokens = drawn(torch.tensor([[1.0, 5.0, 2.0]]), [row(banned=(1, 3, 10**12))])

    assert tokens[0].token_id == 2


def test_logprobs_are_those_of_the_model_before_temperature_and_bans() -> None:
    logits = random_logits(1, 1000, seed=4)
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    best = expected.argsort(descending=True)
    params = SamplingParams(temperature=0.0, top_k=1, logprobs=5)

    token = drawn(logits, [row(params, banned=(int(best[0]),))])[0]

    assert token.token_id == best[1]
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[best[1]]), abs=1e-5)
    assert [token_id for token_id, _ in token.logprobs.top] == best[:5].tolist()
    for token_id, logprob in token.logprobs.top:
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-5)


def test_the_most_likely_tokens_come_best_first_and_lowest_id_first_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]])

    token = drawn(logits, [row(SamplingParams(temperature=0.0, logprobs=4))])[0]

    assert token.logprobs is not None
    assert [token_id for token_id, _ in token.logprobs.top] == [1, 3, 2, 4]
    assert token.logprobs.top[0][1] == token.logprobs.logprob


def test_no_more_alternatives_than_the_vocabulary_has() -> None:
    token = drawn(torch.tensor([[0.0, 1.0]]), [row(SamplingParams(temperature=0.0, logprobs=20))])[0]

    assert token.logprobs is not None
    assert len(token.logprobs.top) == 2


@pytest.mark.parametrize("params", PARAMS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 501, 4999])
def test_a_nan_or_infinite_logit_costs_its_row_and_no_other(params: SamplingParams, bad: float, column: int) -> None:
    logits = random_logits(3, 5000)
    rows = [row(params, 7), row(params, 8), row(params, 9)]
    first, _, last = drawn(logits, rows)
    logits[1, column] = bad

    tokens = sample(logits, rows)

    assert (tokens[0], tokens[2]) == (first, last)
    assert isinstance(tokens[1], InternalError)
    assert str(tokens[1]) == f"position 8: the largest logit is {bad}"


def test_a_row_without_any_possible_token_has_an_error() -> None:
    assert refusal(torch.full((1, 5), -math.inf), row()) == "position 0: the largest logit is -inf"
    assert refusal(torch.zeros(1, 3), row(banned=(0, 1, 2))) == "position 0: every token is banned or impossible"


def test_impossible_tokens_are_not_drawn() -> None:
    counts = draw([-math.inf, 0.0, -math.inf, 0.0], SamplingParams(temperature=1.0, seed=3), 200)

    assert set(counts) == {1, 3}


def test_a_random_draw_without_a_seed_is_an_error() -> None:
    assert "without a seed" in refusal(torch.zeros(1, 3), row(SamplingParams(temperature=1.0)))


def test_rows_and_logits_must_agree_in_number() -> None:
    with pytest.raises(InternalError, match="2 rows of logits for 1 rows"):
        sample(torch.zeros(2, 3), [row()])
    assert sample(torch.zeros(0, 3), []) == []
