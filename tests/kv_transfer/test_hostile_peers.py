"""Strangers at the sockets of a receiver: closed, counted, and without effect on those who are none."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import kv_wire
import pytest
from descriptors import open_descriptors, opened_since
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kv_links import (
    LAYOUT,
    NUM_BLOCKS,
    SETTINGS,
    WAIT_S,
    DecodeSide,
    Done,
    decode_side,
    in_time,
    only,
    outgoing,
    prefill_side,
    ticket,
)

from engine.cluster_key import ClusterKey
from engine.errors import ConfigError, EngineError
from engine.kv_layout import KvLayout
from kv_transfer.frames import Block, Challenge, Meet, Proof, encode
from kv_transfer.identity import LinkEndpoint

CROWD = 300
HELLO = replace(kv_wire.HELLO, capabilities=("hmac-sha256",))
KEYED = replace(SETTINGS, key=ClusterKey(bytes(range(32))), max_links=16)
SAYINGS: list[Callable[[random.Random], bytes]] = [
    lambda rng: b"",
    lambda rng: rng.randbytes(rng.randint(1, 5000)),
    lambda rng: b"\xff\xff\xff\x7f" + rng.randbytes(100),  # claims 2 GiB
    lambda rng: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda rng: encode(HELLO),
    lambda rng: encode(HELLO) + encode(Proof(nonce=rng.randbytes(32), mac=rng.randbytes(32))),
    lambda rng: encode(HELLO) + encode(Meet(key="k", value=b"v")),
    lambda rng: encode(replace(HELLO, layout={"num_layers": 2**63})),
    lambda rng: encode(replace(HELLO, num_blocks=2**64 - 1, transport="shm")),
    lambda rng: encode(HELLO)[: rng.randint(1, 40)],
    lambda rng: encode(Challenge(protocol=1, nonce=bytes(32))),
]


def addresses(side: DecodeSide) -> tuple[tuple[int, object], tuple[int, object]]:
    endpoint = LinkEndpoint.decode(side.receiver.endpoint())
    return (socket.AF_INET, (endpoint.host, endpoint.port)), (socket.AF_UNIX, endpoint.unix_name)


def dial(side: DecodeSide, number: int) -> socket.socket:
    """Over TCP and the Unix socket in turn."""
    family, address = addresses(side)[number % 2]
    sock = socket.socket(family)
    sock.connect(address)  # type: ignore[arg-type]  # without a time-out: with one, a full backlog is an error
    sock.settimeout(WAIT_S)
    return sock


def transfer_one_block(side: DecodeSide, transport: str) -> None:
    with prefill_side(replace(SETTINGS, key=side.receiver.settings.key)) as prefill:
        expected = side.expect("t", [5])
        endpoint = only(side.receiver.endpoint(), transport)
        prefill.sender.open("t", ticket("t", endpoint, expected), in_time())
        prefill.sender.send("t", outgoing([0]))
        prefill.sender.finish("t")
        assert isinstance(prefill.listener.next(), Done)
    side.table.close("t")


def eventually(fact: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < until, what


@pytest.fixture(scope="module")
def shared() -> Iterator[DecodeSide]:
    with decode_side(KEYED) as side:
        yield side


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_crowd_that_holds_its_connections_open_keeps_no_peer_out(transport: str) -> None:
    with decode_side(replace(KEYED, handshake_timeout_s=3600.0)) as side, ExitStack() as crowd:
        rng = random.Random(1)
        for number in range(CROWD):
            sock = crowd.enter_context(dial(side, number))
            with suppress(OSError):  # it is closed already
                sock.sendall(SAYINGS[number % len(SAYINGS)](rng))

        transfer_one_block(side, transport)

        assert side.receiver.stats().links_open <= KEYED.max_links


def test_every_stranger_is_counted_and_leaves_no_thread_and_no_descriptor() -> None:
    def crowd(side: DecodeSide, size: int) -> None:
        rng = random.Random(2)
        for number in range(size):
            with dial(side, number) as sock, suppress(OSError):
                sock.sendall(rng.choice(SAYINGS)(rng))

    def counted(side: DecodeSide) -> int:
        return sum(side.receiver.stats().links_refused.values())

    with decode_side(KEYED) as side:
        crowd(side, 1)
        eventually(lambda: counted(side) == 1, "the first stranger was not counted")
        threads, descriptors = len(os.listdir("/proc/self/task")), open_descriptors()
        crowd(side, CROWD)
        eventually(lambda: counted(side) == 1 + CROWD, "not every stranger was counted")
        eventually(lambda: side.receiver.stats().links_open == 0, "a connection is open")
        eventually(lambda: len(os.listdir("/proc/self/task")) <= threads, "a thread is left")
        eventually(lambda: not opened_since(descriptors), "a descriptor is left")
        assert side.receiver.stats().links_accepted == {}
        assert side.listener.events.empty()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from(SAYINGS).map(lambda saying: saying(random.Random(3))),
            st.builds(bytes.__add__, st.binary(min_size=4, max_size=4), st.binary(max_size=40)),
        ),
        max_size=4,
    ),
    number=st.integers(0, 1),
)
def test_nothing_that_a_stranger_says_opens_a_link_or_touches_the_pool(
    shared: DecodeSide, said: list[bytes], number: int
) -> None:
    with dial(shared, number) as sock, suppress(OSError):
        sock.sendall(b"".join(said))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass

    assert shared.receiver.stats().links_accepted == {}
    assert not any(any(shared.pool.block(block)) for block in range(NUM_BLOCKS))


def test_a_stranger_with_a_ticket_but_no_key_writes_nothing(shared: DecodeSide) -> None:
    shared.expect("guessed", [5])
    block = Block(
        ticket_id="guessed",
        incarnation="1",
        ordinal=0,
        slot=5,
        generation=1,
        hash=bytes(32),
        digest=bytes(16),
        offset=None,
        length=LAYOUT.block_bytes,
    )
    with dial(shared, 0) as sock, suppress(OSError):
        sock.sendall(encode(HELLO) + encode(block) + bytes(range(256)) * (LAYOUT.block_bytes // 256))
        while sock.recv(4096):
            pass

    assert shared.table.missing("guessed") == (0,)
    assert not any(shared.pool.block(5))
    shared.table.close("guessed")


@given(
    st.dictionaries(
        st.sampled_from([*LAYOUT.to_wire(), "heads_before", "heads_after"]) | st.text(max_size=8),
        st.one_of(st.integers(-(2**63), 2**64), st.text(max_size=8), st.sampled_from(["float32", "int8"])),
        max_size=10,
    )
)
@example(LAYOUT.to_wire())
@example(LAYOUT.to_wire() | {"num_layers": 2**63})
@example(LAYOUT.to_wire() | {"dtype": "complex"})
def test_whatever_a_peer_calls_its_layout_is_one_or_a_typed_error(fields: dict[str, int | str]) -> None:
    try:
        layout = KvLayout.from_wire(fields)
    except ConfigError:
        return
    assert KvLayout.from_wire(layout.to_wire()) == layout


@given(st.binary(max_size=400), st.data())
def test_a_damaged_endpoint_is_a_valid_one_or_a_typed_error(damage: bytes, data: st.DataObject) -> None:
    sound = LinkEndpoint(host_id=bytes(16), unix_name=b"\0x", host="127.0.0.1", port=1, transports=("shm",)).encode()
    at = data.draw(st.integers(0, len(sound)))
    try:
        endpoint = LinkEndpoint.decode(sound[:at] + damage + sound[at + data.draw(st.integers(0, 3)) :])
    except EngineError:
        return
    assert LinkEndpoint.decode(endpoint.encode()) == endpoint
