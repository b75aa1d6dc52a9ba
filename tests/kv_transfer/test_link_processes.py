"""A sender in a process of its own is killed, or stopped and woken up again, in the middle of a transfer."""

from __future__ import annotations

import signal

import pytest
from kv_links import TRANSPORTS, Adopted, Lost, MemoryPool, decode_side, same_bytes
from kv_sender_process import FILL_SEED
from link_process import sender_process

from engine.errors import LinkClosed

pytestmark = pytest.mark.processes
BLOCK_BYTES = 32 * 1024


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_sender_is_noticed_at_once_and_nothing_of_it_is_left(transport: str) -> None:
    with decode_side() as decode, sender_process("small", transport) as sender:
        sender.begin(decode, transport, "t", [3, 4, 5], generation=1)
        sender.tell("send", ticket_id="t", ordinals=[0, 1])
        adopted = [decode.listener.next() for _ in range(2)]
        assert adopted == [Adopted("t", ordinal, BLOCK_BYTES, transport) for ordinal in (0, 1)]

        sender.process.send_signal(signal.SIGKILL)

        assert decode.listener.next() == Lost(frozenset(["t"]), LinkClosed)
        assert decode.table.missing("t") == (2,)
        assert decode.table.close("t") == frozenset()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_sender_loses_its_lease_and_cannot_touch_the_slots_when_it_wakes_up(transport: str) -> None:
    with decode_side() as decode, sender_process("small", transport) as sender:
        sender.begin(decode, transport, "old", [3, 4], generation=1)
        sender.tell("send", ticket_id="old", ordinals=[0])
        assert decode.listener.next() == Adopted("old", 0, BLOCK_BYTES, transport)

        sender.stop()
        sender.tell("send", ticket_id="old", ordinals=[1])
        expiry = decode.table.next_expiry()
        assert expiry is not None
        assert decode.table.expire(expiry + decode.table.lease_s) == ["old"]
        assert decode.table.close("old") == frozenset()
        decode.expect("new", [3, 4], generation=2)
        for slot in (3, 4):
            decode.pool.block(slot)[:] = bytes(BLOCK_BYTES)

        sender.process.send_signal(signal.SIGCONT)

        assert sender.says() == "failed old StaleTicket ticket old is unknown or over"
        assert decode.table.missing("new") == (0, 1)
        assert not any(decode.pool.block(3))
        assert not any(decode.pool.block(4))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_of_another_process_arrive_byte_for_byte(transport: str) -> None:
    with decode_side() as decode, sender_process("small", transport) as sender:
        sender.begin(decode, transport, "t", [9, 2, 30], generation=4)
        sender.tell("send", ticket_id="t", ordinals=[0, 1, 2])
        sender.tell("finish", ticket_id="t")

        assert sender.says() == "done t"
        source = MemoryPool()
        source.fill(FILL_SEED)
        assert all(same_bytes(source, ordinal, decode.pool, slot) for ordinal, slot in enumerate([9, 2, 30]))
        source.close()
