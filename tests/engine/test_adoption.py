from __future__ import annotations

import itertools

import pytest

from engine.adoption import Adoption


def expecting(first: int, last: int, num_tokens: int) -> Adoption:
    adoption = Adoption(num_tokens=num_tokens)
    adoption.expect(range(first, last + 1))
    return adoption


@pytest.mark.parametrize("order", list(itertools.permutations([2, 3, 4])))
def test_tokens_are_resident_up_to_the_first_gap(order: tuple[int, ...]) -> None:
    adoption = expecting(2, 4, num_tokens=18)
    for i, ordinal in enumerate(order):
        adoption.adopt(ordinal)
        gaps = set(order[i + 1 :])
        assert adoption.resident_tokens(block_size=4) == (4 * min(gaps) if gaps else 18)


def test_the_grant_alone_makes_only_the_cached_prefix_resident() -> None:
    assert expecting(2, 4, num_tokens=18).resident_tokens(block_size=4) == 8


def test_an_arrival_counts_once() -> None:
    adoption = expecting(0, 1, num_tokens=8)
    adoption.adopt(1)
    with pytest.raises(KeyError):
        adoption.adopt(1)
    assert adoption.missing == {0}


@pytest.mark.parametrize(
    ("started", "given_up", "complete", "settled"),
    [
        (True, False, True, True),
        (True, True, False, True),
        (True, False, False, False),
        (False, True, True, False),
    ],
)
def test_settled_means_started_and_all_kv_here_or_given_up(
    started: bool, given_up: bool, complete: bool, settled: bool
) -> None:
    adoption = expecting(0, 0, num_tokens=4)
    adoption.started, adoption.given_up = started, given_up
    if complete:
        adoption.adopt(0)
    assert adoption.settled is settled
