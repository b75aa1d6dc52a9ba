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


@pytest.fixture
def pair() -> Iterator[Pair]:
    with decode_side() as decode, prefill_side() as prefill:
        yield Pair(prefill, decode)


def test_a_full_block_is_read_once_however_often_it_is_sent(pair: Pair) -> None:
    assert all(isinstance(pair.hand_over([1, 1]), Done) for _ in range(3))
    assert pair.read == [0, 1]


def test_a_block_whose_slot_was_handed_out_again_is_read_again(pair: Pair) -> None:
    pair.hand_over([1, 1])
    pair.prefill.pool.before_block = lambda block: None
    pair.prefill.pool.block(1)[:4] = b"else"
    pair.prefill.pool.before_block = pair.read.append

    assert isinstance(pair.hand_over([1, 2]), Done)
    assert pair.read[2:].count(1) == 1


def test_a_block_that_may_still_change_is_read_each_time(pair: Pair) -> None:
    assert all(isinstance(pair.hand_over([None]), Done) for _ in range(2))
    assert pair.read == [0, 0]


def test_a_block_that_was_damaged_since_it_was_first_sent_is_refused_and_then_read_again(pair: Pair) -> None:
    pair.hand_over([1])
    pair.prefill.pool.block(0)[:4] = b"else"

    assert pair.hand_over([1]) == Failed("t2", DigestMismatch)
    assert isinstance(pair.hand_over([1]), Done)
