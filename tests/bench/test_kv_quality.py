from __future__ import annotations

import random

import pytest
from tiny_llama import TINY, model_of, random_tensors

from bench.kv_quality import BASE, Outcome, compare, measure, tokens_equal
from bench.report import Report
from engine.kv_layout import KV_DTYPE_BYTES

TEXTS = [[random.Random(seed).randrange(3, TINY.vocab_size) for _ in range(40 + seed)] for seed in range(3)]


def test_answers_are_equal_up_to_the_first_token_that_differs() -> None:
    assert tokens_equal([1, 2, 3], [1, 2, 4]) == 2
    assert tokens_equal([9], [1, 2]) == 0
    assert tokens_equal([1, 2], [1, 2, 3]) == 2


def test_each_type_is_measured_against_the_base() -> None:
    base = Outcome(perplexity=8.0, best=[1, 2, 3, 4], answers=[[1, 2, 3], [4]], seconds=1.0)
    other = Outcome(perplexity=9.0, best=[1, 2, 3, 5], answers=[[1, 7, 3], [4]], seconds=1.0)
    report = Report("kv_quality")

    compare(report, "short", {BASE: base, "int8": other})

    assert report.figures == {
        "perplexity_short_bfloat16": 8.0,
        "perplexity_short_int8": 9.0,
        "argmax_equal_short_bfloat16": 1.0,
        "argmax_equal_short_int8": 0.75,
        "tokens_equal_short_bfloat16": 2.0,
        "tokens_equal_short_int8": 1.0,
    }
    assert (report.peers["perplexity_short_int8"], report.peers["tokens_equal_short_int8"]) == (8.0, 2.0)


@pytest.mark.parametrize("dtype", KV_DTYPE_BYTES)
def test_a_run_scores_every_counted_token_and_answers_every_text(dtype: str) -> None:
    model = model_of(TINY, random_tensors(TINY))

    outcome = measure(model, TEXTS, dtype, 10, "test")

    assert len(outcome.best) == 30 + 31 + 32
    assert outcome.perplexity > 1
    for text, answer in zip(TEXTS, outcome.answers, strict=True):
        alone = measure(model, [text], dtype, 10, "test")
        assert alone.answers == [answer]


def test_perplexity_is_that_of_the_texts_alone_weighted_by_their_tokens() -> None:
    model = model_of(TINY, random_tensors(TINY))

    together = measure(model, TEXTS[:2], BASE, 10, "test")
    first, second = (measure(model, [text], BASE, 10, "test") for text in TEXTS[:2])

    weighted = first.perplexity ** (30 / 61) * second.perplexity ** (31 / 61)
    assert together.perplexity == pytest.approx(weighted, rel=1e-6)
