"""What callers of a sender or receiver cannot have meant is refused where they call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kv_links import (
    NUM_BLOCKS,
    WAIT_S,
    DecodeSide,
    Done,
    decode_side,
    identity,
    in_time,
    outgoing,
    prefill_side,
    ticket,
)

from engine.errors import ConfigError, InternalError, LinkClosed
from kv_transfer.link import LinkSettings
from kv_transfer.receiver import KvReceiver


@pytest.fixture
def decode() -> Iterator[DecodeSide]:
    with decode_side() as side:
        yield side


def test_calls_that_cannot_be_meant_are_refused_at_the_caller(decode: DecodeSide) -> None:
    with prefill_side() as prefill:
        expected = decode.expect("t", [5])
        info = ticket("t", decode.receiver.endpoint(), expected)
        prefill.sender.open("t", info, in_time())

        with pytest.raises(InternalError, match="open transfer already"):
            prefill.sender.open("t", info, in_time())
        with pytest.raises(InternalError, match="no block of this pool"):
            prefill.sender.send("t", outgoing([0], first_source=NUM_BLOCKS))

        prefill.sender.send("t", outgoing([0]))
        prefill.sender.finish("t")
        assert isinstance(prefill.listener.next(), Done)
        prefill.sender.finish("t")
        prefill.sender.abort("unknown")


def test_settings_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="progress_timeout_s must be positive"):
        LinkSettings(progress_timeout_s=0)


def test_an_endpoint_is_known_only_after_start() -> None:
    with decode_side() as decode:
        other = KvReceiver(identity("decode-1"), decode.pool, decode.table, decode.listener)
        with pytest.raises(LinkClosed, match="not started"):
            other.endpoint()
        other.close(WAIT_S)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_an_address_that_nobody_can_connect_to_is_refused(decode: DecodeSide, host: str) -> None:
    with pytest.raises(ConfigError, match="host must be the address"):
        KvReceiver(identity("decode-1"), decode.pool, decode.table, decode.listener, host)
