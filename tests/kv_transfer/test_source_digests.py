"""Whose digest is known is not read again, and whose bytes may have changed is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from kv_links import DecodeSide, Done, Failed, PrefillSide, decode_side, in_time, only, outgoing, prefill_side, ticket

from engine.errors import DigestMismatch


class Pair:
    """One link over shared memory, where nothing but the digest reads a source block."""

    def __init__(self, prefill: PrefillSide, decode: DecodeSide) -> None:
        self.prefill, self._decode = prefill, decode
        self._hand_overs = 0
        self.read: list[int] = []
        """Source blocks that the sender has read, in order."""
        prefill.pool.before_block = self.read.append

    def hand_over(self, generations: list[int | None]) -> Done | Failed:
        """Blocks 0, 1, ... of the prefill worker's pool, of these generations."""
        self._hand_overs += 1
        name = f"t{self._hand_overs}"
        slots = self._decode.expect(name, list(range(len(generations))), generation=self._hand_overs)
        endpoint = only(self._decode.receiver.endpoint(), "shm")
        self.prefill.sender.open(name, ticket(name, endpoint, slots, generation=self._hand_overs), in_time())
        blocks = [
            replace(block, generation=generation)
            for block, generation in zip(outgoing(range(len(generations))), generations, strict=True)
        ]
        self.prefill.sender.send(name, blocks)
        self.prefill.sender.finish(name)
        ended = self.prefill.listener.next()
        self._decode.table.close(name)
        return ended

    def damage(self, block: int) -> None:
        before, self.prefill.pool.before_block = self.prefill.pool.before_block, lambda block: None
        self.prefill.pool.block(block)[100] ^= 1
        self.prefill.pool.before_block = before


@pytest.fixture
def pair() -> Iterator[Pair]:
    with decode_side() as decode, prefill_side() as prefill:
        yield Pair(prefill, decode)


def test_a_full_block_is_read_once_however_often_it_is_sent(pair: Pair) -> None:
    assert all(isinstance(pair.hand_over([1, 1]), Done) for _ in range(3))
    assert pair.read == [0, 1]


def test_a_block_whose_slot_was_handed_out_again_is_read_again(pair: Pair) -> None:
    pair.hand_over([1, 1])
    pair.damage(1)

    assert isinstance(pair.hand_over([1, 2]), Done)
    assert pair.read[2:].count(1) == 1


def test_a_block_that_may_still_change_is_read_each_time(pair: Pair) -> None:
    assert all(isinstance(pair.hand_over([None]), Done) for _ in range(2))
    assert pair.read == [0, 0]


def test_a_block_that_was_digested_when_it_was_filled_is_not_read_to_be_sent(pair: Pair) -> None:
    pair.prefill.sender.digest([(0, 1), (1, 1)])
    assert isinstance(pair.hand_over([1, 1]), Done)
    assert pair.read == [0, 1]


def test_damage_between_filling_and_sending_is_refused(pair: Pair) -> None:
    pair.prefill.sender.digest([(0, 1)])
    pair.damage(0)

    assert pair.hand_over([1]) == Failed("t1", DigestMismatch)


def test_a_damaged_block_is_never_sent_with_the_digest_of_its_damage(pair: Pair) -> None:
    pair.hand_over([1])
    pair.damage(0)
    assert pair.hand_over([1]) == Failed("t2", DigestMismatch)

    pair.prefill.sender.digest([(0, 1)])

    assert pair.hand_over([1]) == Failed("t3", DigestMismatch)


def test_a_refused_block_is_named_and_can_be_told_from_a_bad_way(pair: Pair) -> None:
    sender = pair.prefill.sender
    pair.hand_over([1, 1])
    pair.damage(0)
    pair.hand_over([1, 1])

    doubted = pair.prefill.listener.doubted.get(timeout=20.0)

    assert (doubted.source_block, doubted.generation) == (0, 1)
    assert [sender.is_damaged(block, 1) for block in (0, 1, 2)] == [True, False, None]
    assert sender.is_damaged(0, 2) is None
