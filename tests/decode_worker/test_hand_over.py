from __future__ import annotations

from decode_worker.hand_over import HandOver
from engine.engine import MissingBlock, Reservation
from kv_transfer.stats import TransferStats


def hand_over() -> HandOver:
    """Of 14 tokens in blocks of 4: block 0 is resident, 1 to 3 are missing."""
    missing = tuple(MissingBlock(i, i, 1, bytes(32)) for i in (1, 2, 3))
    return HandOver(Reservation("a", 4, missing, 0.0), num_tokens=14, block_size=4)


def test_it_is_complete_when_the_set_of_missing_blocks_is_empty_not_after_a_number_of_arrivals() -> None:
    h = hand_over()
    for ordinal in (2, 2, 2, 0, 7, 1):
        h.adopt([ordinal])

    assert not h.complete
    h.adopt([3])
    assert h.complete


def test_a_complete_hand_over_recomputes_nothing() -> None:
    h = hand_over()
    for ordinal in (1, 2, 3):
        h.adopt([ordinal])
    message = h.message("a", TransferStats(blocks=3, bytes=300, transport="shm", seconds=0.5))

    assert (message.blocks_adopted, message.blocks_cached, message.recomputed_tokens) == (3, 1, 0)
    assert (message.bytes_received, message.transport, message.transfer_us) == (300, "shm", 500_000)
    assert message.error == ""


def test_everything_from_the_first_gap_on_is_recomputed() -> None:
    h = hand_over()
    h.adopt([1, 3])

    assert h.message("a", None, "LinkClosed: gone").recomputed_tokens == 14 - 8


def test_without_any_arrival_only_the_cached_prefix_is_not_recomputed() -> None:
    message = hand_over().message("a", None, "LinkClosed: gone")

    assert (message.recomputed_tokens, message.blocks_adopted, message.error) == (10, 0, "LinkClosed: gone")


def test_a_refused_block_was_received_but_not_adopted() -> None:
    h = hand_over()
    h.adopt([1])
    h.refuse(100)
    message = h.message("a", TransferStats(blocks=1, bytes=100, transport="shm", seconds=0.5), "DigestMismatch: bad")

    assert (message.blocks_received, message.blocks_adopted, message.bytes_received) == (2, 1, 200)
    assert message.recomputed_tokens == 14 - 8


def test_what_came_too_late_was_received_but_not_adopted() -> None:
    h = hand_over()
    h.adopt([1])
    message = h.message("a", TransferStats(blocks=3, bytes=300, transport="adopt", seconds=0.5), "LinkClosed: gone")

    assert (message.blocks_received, message.blocks_adopted) == (3, 1)
