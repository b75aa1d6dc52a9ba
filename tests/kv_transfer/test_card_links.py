"""Links whose pools are on GPUs, with stand-ins for the cards: what goes where, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from card_pools import CARDS, calls_of, card_pool, linked
from kv_links import LAYOUT, Adopted, Done, Failed, Lost, MemoryPool, block_hash, in_time, only, outgoing, ticket

from engine.errors import HandshakeRefused, LinkClosed
from kv_transfer.digest import PythonBlockCopier
from kv_transfer.reservation import ExpectedBlock

SLOTS = [9, 3, 17]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("from_card", "to_card"), [(True, True), (True, False), (False, True)])
def test_blocks_of_a_card_come_through_host_memory(transport: str, from_card: bool, to_card: bool) -> None:
    source = card_pool(1) if from_card else MemoryPool()
    target = card_pool(0) if to_card else MemoryPool()
    if isinstance(source, MemoryPool):
        source.number()
    with linked(source, target) as pair:
        done = pair.send(transport, SLOTS)

        assert isinstance(done, Done)
        assert done.stats.transport == transport
        assert pair.received.next() == Adopted("t", 0, LAYOUT.block_bytes, transport)
        assert pair.arrived(SLOTS)


def test_copies_come_after_the_compute_that_the_blocks_need_and_are_waited_for_before_anything_is_said() -> None:
    source, target = card_pool(1), card_pool(0)
    with linked(source, target) as pair:
        assert isinstance(pair.send("tcp", SLOTS), Done)

    assert calls_of(source)[1:] == [f"pin {CARDS.max_unacked_bytes}", "copy 3 after mark 1", "wait", "unpin"]
    landing = max(1, (16 << 20) // LAYOUT.block_bytes) * LAYOUT.block_bytes
    assert calls_of(target)[1:] == [f"pin {landing}", "copy 3 after mark 1", "wait", "unpin"]


def test_a_block_that_changed_on_its_way_is_refused() -> None:
    class Damaging(PythonBlockCopier):
        def digests(self, blocks: Sequence[memoryview]) -> list[bytes]:
            return [b"another digest.."]

    with linked(card_pool(1), card_pool(0)) as pair:
        pair.sender._digests._copier = Damaging()
        failed = pair.send("tcp", SLOTS[:1])

        assert isinstance(failed, Failed)
        assert "not what was sent" in failed.message


def test_pinned_memory_is_used_round_and_round_and_no_block_is_lost() -> None:
    """Four places, and as many bytes in flight, for 24 blocks: a peer on this host copies them out of those."""
    few = replace(CARDS, max_unacked_bytes=4 * LAYOUT.block_bytes)
    slots = list(range(24))
    with linked(card_pool(1), card_pool(0), few) as pair:
        assert isinstance(pair.send("shm", slots), Done)
        assert pair.arrived(slots)


def test_blocks_of_another_size_are_made_of_those_of_the_card() -> None:
    target, source = card_pool(0), card_pool(1, replace(LAYOUT, block_size=16))
    with linked(source, target) as pair:
        expected = [ExpectedBlock(ordinal=n, slot=n, generation=1, hash=block_hash(n)) for n in range(2)]
        pair.table.open("t", expected, lease_until=in_time())
        info = ticket("t", only(pair.receiver.endpoint(), "tcp"), {0: 0, 1: 1})
        pair.sender.open("t", replace(info, layout=LAYOUT), in_time())
        # Both of theirs are in block 0 of ours.
        blocks = [replace(block, source_block=0) for block in outgoing(range(2))]
        pair.sender.send("t", blocks)
        pair.sender.finish("t")
        assert isinstance(pair.sent.next(), Done)

    words = [pool.pool.view(torch.int32) for pool in (source, target)]
    assert torch.equal(words[1][0], words[0][0, :, :, :, :8])
    assert torch.equal(words[1][1], words[0][0, :, :, :, 8:])


def test_nccl_between_two_ends_on_one_card_is_refused_with_the_reason() -> None:
    with linked(card_pool(0, card="GPU-7"), card_pool(0, card="GPU-7"), replace(CARDS, transports=("nccl",))) as pair:
        failed = pair.send("nccl", SLOTS)

        assert isinstance(failed, Failed)
        assert failed.error is HandshakeRefused
        assert "both pools are on GPU-7: NCCL connects no two ends on one card" in failed.message


def test_a_card_and_host_memory_without_a_transport_in_common_say_why() -> None:
    with linked(card_pool(1), MemoryPool(), replace(CARDS, transports=("nccl", "tcp"))) as pair:
        failed = pair.send("gloo", SLOTS)

        assert isinstance(failed, Failed)
        assert "our pool is on cuda:1, which leaves nccl, tcp; the peer offers gloo" in failed.message


def test_without_pinned_memory_the_link_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    source = card_pool(1)

    def full(memory: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(source.gpu, "pin", full)
    with linked(source, card_pool(0)) as pair:
        failed = pair.send("tcp", SLOTS)
        assert isinstance(failed, Failed)
        assert failed.error is LinkClosed
        assert "no pinned host memory" in failed.message
        assert pair.received.next() == Lost(frozenset({"t"}), LinkClosed)
