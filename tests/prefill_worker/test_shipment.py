from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from prefill_worker.shipment import Shipment

CHAIN = [bytes([i]) * 32 for i in range(4)]
TABLE = [10, 11, 12, 13]
GENERATIONS = {10: 5, 11: 6, 12: 7, 13: 8}


def shipment(ordinals: list[int], num_tokens: int = 14) -> Shipment:
    """Of a prompt of 3 full blocks of 4 tokens and one with the rest."""
    return Shipment(ordinals, CHAIN, num_tokens, block_size=4, source_block_size=4)


def taken(shipment: Shipment, num_computed_tokens: int) -> list[tuple[int, int]]:
    return [
        (b.ordinal, b.source_block) for b in shipment.take_complete(num_computed_tokens, TABLE, GENERATIONS.__getitem__)
    ]


def test_a_block_is_handed_out_once_all_its_tokens_are_computed() -> None:
    s = shipment([0, 1, 2, 3])

    assert taken(s, 3) == []
    assert taken(s, 4) == [(0, 10)]
    assert taken(s, 11) == [(1, 11)]


def test_the_last_partial_block_follows_the_last_token() -> None:
    s = shipment([2, 3])

    assert taken(s, 13) == [(2, 12)]
    assert taken(s, 14) == [(3, 13)]


def test_blocks_that_the_ticket_does_not_ask_for_are_left_out() -> None:
    assert taken(shipment([1, 3]), 14) == [(1, 11), (3, 13)]


def test_each_block_is_handed_out_once_and_with_its_hash() -> None:
    s = shipment([0, 1])
    first = s.take_complete(8, TABLE, GENERATIONS.__getitem__)

    assert [block.hash for block in first] == CHAIN[:2]
    assert taken(s, 14) == []
    assert s.handed_out == [10, 11]


def test_only_blocks_that_stay_as_they_are_have_a_generation() -> None:
    full_and_partial = shipment([0, 1, 2, 3]).take_complete(14, TABLE, GENERATIONS.__getitem__)
    of_several = converted([0], num_tokens=14, block_size=8, ours=4).take_complete(14, TABLE, GENERATIONS.__getitem__)

    assert [block.generation for block in full_and_partial] == [5, 6, 7, None]
    assert [block.generation for block in of_several] == [None]


def converted(ordinals: list[int], num_tokens: int, block_size: int, ours: int) -> Shipment:
    return Shipment(ordinals, [bytes(32)] * -(-num_tokens // block_size), num_tokens, block_size, ours)


def taken_whole(shipment: Shipment, num_computed_tokens: int) -> list[tuple[int, ...]]:
    blocks = shipment.take_complete(num_computed_tokens, TABLE, GENERATIONS.__getitem__)
    return [(block.ordinal, block.source_block, *block.more_blocks) for block in blocks]


def test_larger_blocks_are_made_of_all_of_ours_that_they_cover() -> None:
    s = converted([0, 1], num_tokens=14, block_size=8, ours=4)

    assert taken_whole(s, 7) == []
    assert taken_whole(s, 8) == [(0, 10, 11)]
    assert taken_whole(s, 13) == []
    assert taken_whole(s, 14) == [(1, 12, 13)]
    assert s.handed_out == [10, 11, 12, 13]


def test_a_larger_block_at_the_end_is_made_of_what_there_is() -> None:
    assert taken_whole(converted([1], num_tokens=10, block_size=8, ours=4), 10) == [(1, 12)]


def test_smaller_blocks_wait_until_ours_is_full_and_cannot_be_replaced_any_more() -> None:
    s = converted([0, 1, 2, 3], num_tokens=14, block_size=4, ours=8)

    assert taken_whole(s, 7) == []
    assert taken_whole(s, 8) == [(0, 10), (1, 10)]
    assert taken_whole(s, 14) == [(2, 11), (3, 11)]
    assert s.handed_out == [10, 11]


@given(st.sampled_from([8, 16, 32]), st.sampled_from([8, 16, 32]), st.integers(1, 100), st.data())
def test_each_wanted_block_is_handed_out_once_with_all_its_tokens_when_none_of_ours_can_change(
    theirs: int, ours: int, num_tokens: int, data: st.DataObject
) -> None:
    num_blocks, num_sources = -(-num_tokens // theirs), -(-num_tokens // ours)
    wanted = sorted(data.draw(st.sets(st.integers(0, num_blocks - 1))))
    steps = [*sorted(data.draw(st.sets(st.integers(0, num_tokens - 1)))), num_tokens]
    s = Shipment(wanted, [bytes(32)] * num_blocks, num_tokens, theirs, ours)
    handed_out = []

    for computed in steps:
        for block in s.take_complete(
            computed, range(num_sources), lambda block: 1
        ):  # our block n is the n-th of the sequence
            sources = (block.source_block, *block.more_blocks)
            tokens = range(block.ordinal * theirs, min((block.ordinal + 1) * theirs, num_tokens))
            assert sources == tuple(range(tokens.start // ours, tokens[-1] // ours + 1))
            assert all((n + 1) * ours <= computed or computed == num_tokens for n in sources)
            handed_out.append(block.ordinal)

    assert handed_out == wanted
    assert sorted(set(s.handed_out)) == s.handed_out


@pytest.mark.parametrize("ordinals", [[4], [1, 1], [2, 1], [0, 1, 2, 3, 4]])
def test_ordinals_that_are_no_ascending_positions_of_the_prompt_are_refused(ordinals: list[int]) -> None:
    with pytest.raises(RequestError, match="ticket: ordinals must ascend within the 4 blocks"):
        shipment(ordinals)
