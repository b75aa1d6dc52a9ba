from __future__ import annotations

import struct

import pytest
from factories import make_request

from engine.errors import InternalError
from engine.parallel_sampling import common_prefix, further_samples, sample_seed
from engine.philox import philox4x32
from engine.request import RequestKind
from engine.sampler import uniform
from engine.sampling_params import MAX_SEED, SamplingParams


def second_implementation(seed: int, number: int) -> int:
    """From the rule in the docstring of `engine.parallel_sampling`."""
    if number == 0:
        return seed
    words = philox4x32((number, 0, 0, 1), struct.unpack("<II", struct.pack("<Q", seed)))
    return int.from_bytes(struct.pack("<4I", *words)[:8], "little")


@pytest.mark.parametrize("seed", [0, 1, 2**32, MAX_SEED])
def test_seeds_follow_the_documented_rule(seed: int) -> None:
    seeds = [sample_seed(seed, number) for number in range(200)]
    assert seeds == [second_implementation(seed, number) for number in range(200)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 200
    assert all(0 <= derived <= MAX_SEED for derived in seeds)


def test_seeds_of_samples_are_published() -> None:
    assert [sample_seed(0, number) for number in (1, 2)] == [5840119000542174179, 15774594930704726895]


def test_no_seed_is_made_of_bits_that_decide_a_token() -> None:
    draws = {uniform(7, position) for position in range(1000)}
    assert draws.isdisjoint((sample_seed(7, number) >> 11) * 2.0**-53 for number in range(1, 1000))


def test_samples_differ_from_their_request_in_seed_and_name_only() -> None:
    request = make_request([1, 2, 3], output=[4], params=SamplingParams(seed=5, top_k=3))
    request.priority, request.num_public_tokens = 2, 3
    samples = further_samples(request, 3)
    assert [sample.request_id for sample in samples] == [f"{request.request_id}/1", f"{request.request_id}/2"]
    assert [sample.params.seed for sample in samples] == [sample_seed(5, 1), sample_seed(5, 2)]
    for sample in samples:
        assert (sample.token_ids, sample.num_prompt_tokens, sample.scope) == ([1, 2, 3, 4], 3, request.scope)
        assert sample.token_ids is not request.token_ids
        assert (sample.params.top_k, sample.priority, sample.num_public_tokens) == (3, 2, 3)


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (RequestKind.LOCAL, RequestKind.LOCAL),
        (RequestKind.DECODE, RequestKind.LOCAL),
        (RequestKind.PREFILL, RequestKind.PREFILL),
    ],
)
def test_no_link_brings_or_takes_the_kv_of_a_sample(of: RequestKind, kind: RequestKind) -> None:
    (sample,) = further_samples(make_request([1], kind=of), 2)
    assert sample.kind is kind
    assert sample.transfer_over


def test_greedy_samples_need_no_seed_and_random_ones_do() -> None:
    assert further_samples(make_request([1], params=SamplingParams(temperature=0.0)), 2)[0].params.seed is None
    with pytest.raises(InternalError, match="needs a seed"):
        further_samples(make_request([1], params=SamplingParams()), 2)


@pytest.mark.parametrize(
    ("first", "second", "limit", "common"),
    [
        ([1, 2, 3], [1, 2, 3], 9, 3),
        ([1, 2, 3], [1, 2, 3], 2, 2),
        ([1, 2, 3], [1, 5], 9, 1),
        ([1], [2], 9, 0),
        ([], [1], 9, 0),
    ],
)
def test_common_prefix(first: list[int], second: list[int], limit: int, common: int) -> None:
    assert common_prefix(first, second, limit) == common
