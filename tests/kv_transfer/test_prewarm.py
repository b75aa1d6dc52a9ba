"""Links that are opened before the first transfer needs them."""

from __future__ import annotations

import pytest
from kv_links import (
    WAIT_S,
    Adopted,
    DecodeSide,
    Done,
    PrefillSide,
    decode_side,
    identity,
    in_time,
    only,
    outgoing,
    prefill_side,
    ticket,
)

from engine.errors import LinkClosed
from kv_transfer import sender
from kv_transfer.identity import LinkTarget


def target(side: DecodeSide, transport: str = "shm", incarnation: str = "1") -> LinkTarget:
    return LinkTarget("decode-0", incarnation, only(side.receiver.endpoint(), transport), None)


def transfer(prefill: PrefillSide, decode: DecodeSide, link: LinkTarget) -> None:
    prefill.sender.open("t", ticket("t", link.endpoint, decode.expect("t", [5])), in_time())
    prefill.sender.send("t", outgoing([0]))
    prefill.sender.finish("t")
    assert isinstance(prefill.listener.next(), Done)


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_the_first_transfer_takes_the_link_that_was_opened_beforehand(transport: str) -> None:
    with decode_side() as decode, prefill_side() as prefill:
        prefill.sender.prewarm(target(decode, transport))
        prefill.sender.prewarm(target(decode, transport))
        assert prefill.sender.stats().links_open == 1

        transfer(prefill, decode, target(decode, transport))

        assert decode.listener.next() == Adopted("t", 0, decode.pool.layout.block_bytes, transport)
        assert prefill.sender.stats().links_connected == {transport: 1}
        assert decode.receiver.stats().links_accepted == {transport: 1}


def test_a_link_that_cannot_be_opened_beforehand_is_no_transfer_s_failure() -> None:
    with decode_side() as decode, prefill_side() as prefill:
        prefill.sender.prewarm(target(decode, incarnation="of yesterday"))
        prefill.sender.prewarm(LinkTarget("decode-0", "1", b"no endpoint", None))

        transfer(prefill, decode, target(decode))

        prefill.sender.close(WAIT_S)
        assert prefill.listener.events.empty()
        assert sum(prefill.sender.stats().links_lost.values()) == 3  # the refusal may come when the sender has closed


def test_only_so_many_links_are_opened_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_PREWARMED", 1)
    with decode_side() as decode, prefill_side() as prefill:
        prefill.sender.prewarm(target(decode, "shm"))
        prefill.sender.prewarm(target(decode, "tcp"))

        assert prefill.sender.stats().links_open == 1
        transfer(prefill, decode, target(decode, "tcp"))
        assert prefill.sender.stats().links_open == 2


def test_a_closed_sender_opens_none() -> None:
    with decode_side() as decode, prefill_side(worker=identity("prefill-0")) as prefill:
        prefill.sender.close(WAIT_S)

        with pytest.raises(LinkClosed, match="the sender is closed"):
            prefill.sender.prewarm(target(decode))
