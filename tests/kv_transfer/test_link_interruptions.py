"""A process is killed or frozen while a large block is under way."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from descriptors import open_descriptors, opened_since
from kv_links import (
    LARGE_LAYOUT,
    NUM_LARGE_BLOCKS,
    SETTINGS,
    TRANSPORTS,
    WAIT_S,
    Adopted,
    DecodeSide,
    Failed,
    Lost,
    MemoryPool,
    PrefillSide,
    Quiet,
    decode_side,
    identity,
    in_time,
    only,
    outgoing,
    prefill_side,
    same_bytes,
    ticket,
)
from link_process import LinkProcess, receiver_process, sender_process

from engine.errors import LinkClosed
from kv_transfer.reservation import MAX_LEASE_S

pytestmark = pytest.mark.processes
SLOTS = [1, 2]
SHORT = replace(SETTINGS, progress_timeout_s=1.0)


@pytest.fixture
def decode() -> Iterator[DecodeSide]:
    with decode_side(SHORT, MemoryPool(LARGE_LAYOUT, NUM_LARGE_BLOCKS)) as side:
        yield side


@pytest.fixture
def prefill() -> Iterator[PrefillSide]:
    worker = identity("prefill-0", layout=LARGE_LAYOUT)
    with prefill_side(SHORT, MemoryPool(LARGE_LAYOUT, NUM_LARGE_BLOCKS), worker) as side:
        yield side


def kill(process: LinkProcess) -> None:
    process.process.send_signal(signal.SIGKILL)


def freeze(process: LinkProcess) -> None:
    process.stop()


def wait_until_touched(slot: memoryview) -> None:
    """Spins, as nobody tells of the first bytes of a block."""
    until = time.monotonic() + WAIT_S
    while not any(slot[:64]):
        assert time.monotonic() < until, "no byte has come"


def interrupt_sender(
    sender: LinkProcess, decode: DecodeSide, transport: str, how: Callable[[LinkProcess], None]
) -> None:
    sender.begin(decode, transport, "t", SLOTS, generation=1)
    sender.tell("send", ticket_id="t", ordinals=[0, 1])
    wait_until_touched(decode.pool.block(SLOTS[0]))
    how(sender)


@pytest.mark.parametrize("how", [kill, freeze])
@pytest.mark.parametrize("transport", ["tcp", "gloo"])  # over shm the sender has no part in the copy
def test_a_receiver_is_free_by_its_deadline_and_keeps_nothing_of_a_sender_that_stopped(
    decode: DecodeSide, transport: str, how: Callable[[LinkProcess], None]
) -> None:
    with sender_process("large", transport) as sender:
        interrupt_sender(sender, decode, transport, how)

        assert decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
        assert decode.table.missing("t") == (0, 1)
        assert decode.table.close("t") == frozenset()
    assert decode.table.expire(time.monotonic() + 2 * MAX_LEASE_S) == []
    assert (decode.table.stats().open, decode.table.stats().ending) == (0, 0)
    decode.receiver.close(WAIT_S)
    assert decode.receiver.stats().links_open == 0


def test_what_was_adopted_of_a_pool_whose_owner_was_killed_in_the_middle_is_right(decode: DecodeSide) -> None:
    slots = [3, 0, 2, 1]
    with sender_process("large", "shm") as sender:
        sender.begin(decode, "shm", "t", slots, generation=1)
        sender.tell("send", ticket_id="t", ordinals=[0, 1, 2, 3])  # 256 MiB
        events = [decode.listener.next()]
        kill(sender)
        while len(events) < 4 and not isinstance(events[-1], Lost):
            events.append(decode.listener.next())

    adopted = [event.ordinal for event in events if isinstance(event, Adopted)]
    assert adopted
    assert sorted((*adopted, *decode.table.missing("t"))) == [0, 1, 2, 3]
    assert decode.table.close("t") == frozenset()
    decode.receiver.close(WAIT_S)
    assert decode.receiver.stats().links_open == 0
    source = MemoryPool(LARGE_LAYOUT, NUM_LARGE_BLOCKS)
    source.number()
    assert all(same_bytes(source, ordinal, decode.pool, slots[ordinal]) for ordinal in adopted)
    source.close()


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_a_ticket_that_ends_meanwhile_keeps_its_slots_until_nobody_writes_them(
    decode: DecodeSide, transport: str
) -> None:
    with sender_process("large", transport) as sender:
        interrupt_sender(sender, decode, transport, freeze)

        assert decode.table.close("t") == frozenset(SLOTS[:1])
        assert decode.listener.next() == Quiet("t", frozenset(SLOTS[:1]))

    assert decode.table.close("t") == frozenset()


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_a_sender_that_wakes_up_writes_nothing_into_slots_that_have_another_ticket(
    decode: DecodeSide, transport: str
) -> None:
    with sender_process("large", transport) as sender:
        interrupt_sender(sender, decode, transport, freeze)
        assert decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
        decode.table.close("t")
        decode.expect("new", SLOTS, generation=2)
        for slot in SLOTS:
            decode.pool.block(slot)[:] = bytes(LARGE_LAYOUT.block_bytes)

        sender.process.send_signal(signal.SIGCONT)

        assert sender.says().startswith("failed t LinkClosed")
        assert decode.table.missing("new") == (0, 1)
        assert not any(any(decode.pool.block(slot)) for slot in SLOTS)


@pytest.mark.parametrize("how", [kill, freeze])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_is_free_by_its_deadline_when_the_receiver_stopped(
    prefill: PrefillSide, transport: str, how: Callable[[LinkProcess], None]
) -> None:
    with receiver_process() as receiver:
        endpoint = only(bytes.fromhex(receiver.first_words.split()[1]), transport)
        receiver.tell("expect", ticket_id="t", slots=SLOTS)
        assert receiver.says() == "expecting"
        prefill.sender.open("t", ticket("t", endpoint, dict(enumerate(SLOTS))), in_time())
        prefill.sender.send("t", outgoing([0, 1]))
        assert receiver.says() == "writing"
        how(receiver)

        assert prefill.listener.next() == Failed("t", LinkClosed)
        prefill.sender.close(WAIT_S)
    stats = prefill.sender.stats()
    assert (stats.links_open, stats.transfers_open) == (0, 0)


def test_an_interrupted_gloo_group_leaves_no_thread_and_no_descriptor() -> None:
    def once() -> None:
        with (
            decode_side(SHORT, MemoryPool(LARGE_LAYOUT, NUM_LARGE_BLOCKS)) as decode,
            sender_process("large", "gloo") as sender,
        ):
            interrupt_sender(sender, decode, "gloo", kill)
            assert decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
            decode.table.close("t")

    once()
    gc.collect()
    threads, descriptors = os.listdir("/proc/self/task"), open_descriptors()
    once()
    gc.collect()
    assert not opened_since(descriptors)
    until = time.monotonic() + WAIT_S
    while len(os.listdir("/proc/self/task")) > len(threads):  # a thread that was joined may still be on its way out
        assert time.monotonic() < until, "a thread is left"
