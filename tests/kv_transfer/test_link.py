"""The handshake: who may link to whom, over what, and what a stranger gets."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace

import kv_wire
import pytest
from descriptors import open_descriptors, opened_since
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_links import (
    LAYOUT,
    NUM_BLOCKS,
    SETTINGS,
    WAIT_S,
    DecodeSide,
    Done,
    Failed,
    MemoryPool,
    PrefillSide,
    block_hash,
    decode_side,
    identity,
    in_time,
    only,
    outgoing,
    prefill_side,
    ticket,
)

from engine.errors import HandshakeRefused, LinkClosed, ProtocolError
from kv_transfer.digest import PythonBlockCopier
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import (
    CONVERTS,
    Abort,
    Ack,
    BlockEntry,
    Blocks,
    Frame,
    Hello,
    Nack,
    Refused,
    Renew,
    Welcome,
    encode,
)
from kv_transfer.identity import LinkEndpoint, PeerIdentity
from kv_transfer.transport_shm import read_only

HELLO = replace(kv_wire.HELLO, capabilities=("from-2031",))


@pytest.fixture
def decode() -> Iterator[DecodeSide]:
    with decode_side() as side:
        yield side


@pytest.fixture(scope="module")
def shared_decode() -> Iterator[DecodeSide]:
    """For the many examples of a property."""
    with decode_side() as side:
        yield side


def dial(side: DecodeSide, transport: str = "tcp") -> socket.socket:
    endpoint = LinkEndpoint.decode(side.receiver.endpoint())
    if transport == "tcp":
        return socket.create_connection((endpoint.host, endpoint.port), timeout=WAIT_S)
    sock = socket.socket(socket.AF_UNIX)
    assert endpoint.unix_name is not None
    sock.connect(endpoint.unix_name)
    return sock


def answer_to(side: DecodeSide, hello: Frame) -> Frame | None:
    with dial(side) as sock:
        connection = FrameSocket(sock, WAIT_S)
        connection.send(encode(hello))
        return connection.receive()


def answer_over_unix(side: DecodeSide, hello: Frame, fd: int) -> Frame | None:
    with dial(side, "shm") as sock:
        connection = FrameSocket(sock, WAIT_S)
        connection.send_with_fd(encode(hello), fd)
        return connection.receive()


def begin(prefill: PrefillSide, decode: DecodeSide, endpoint: bytes, incarnation: str = "1") -> None:
    """A transfer of one block."""
    expected = decode.expect("t", [5])
    prefill.sender.open("t", ticket("t", endpoint, expected, incarnation=incarnation), in_time())
    prefill.sender.send("t", outgoing([0]))
    prefill.sender.finish("t")


@pytest.mark.parametrize(("protocol", "oldest", "spoken"), [(1, 1, 1), (2, 1, 2), (2, 2, 2), (3, 2, 2)])
def test_the_newest_common_version_is_spoken(decode: DecodeSide, protocol: int, oldest: int, spoken: int) -> None:
    answer = answer_to(decode, replace(HELLO, protocol=protocol, oldest_protocol=oldest))

    assert answer == Welcome(protocol=spoken, capabilities=())


@pytest.mark.parametrize(
    ("hello", "code", "reason"),
    [
        (replace(HELLO, protocol=4, oldest_protocol=3), "protocol", "versions 3 to 4"),
        (replace(HELLO, protocol=0, oldest_protocol=0), "protocol", "versions 0 to 0"),
        (replace(HELLO, target_worker_id="decode-1"), "identity", "decode-1/1 is wanted, this is decode-0/1"),
        (replace(HELLO, target_incarnation="0"), "identity", "decode-0/0 is wanted"),
        (replace(HELLO, fingerprint=bytes(32)), "fingerprint", "the models differ"),
        (replace(HELLO, layout=replace(LAYOUT, block_size=16).to_wire()), "layout", "does not convert"),
        (
            replace(HELLO, layout=replace(LAYOUT, block_size=64).to_wire(), capabilities=(CONVERTS,)),
            "layout",
            "block_size is 64 and 8",
        ),
        (replace(HELLO, layout=replace(LAYOUT, num_layers=9).to_wire()), "layout", "num_layers is 9 and 4"),
        (replace(HELLO, layout={"num_layers": 4}), "layout", "KV layout has fields"),
        (replace(HELLO, transport="shm"), "transport", "not possible on this socket"),
        (replace(HELLO, transport="carrier-pigeon"), "transport", "carrier-pigeon"),
    ],
)
def test_a_worker_that_cannot_exchange_blocks_is_told_why(
    decode: DecodeSide, hello: Hello, code: str, reason: str
) -> None:
    answer = answer_to(decode, hello)

    assert isinstance(answer, Refused)
    assert (answer.code, reason in answer.message) == (code, True), answer.message


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (replace(identity("prefill-0"), fingerprint=bytes(32)), r"decode-0 refuses the link \(fingerprint\)"),
        (identity("prefill-0", layout=replace(LAYOUT, dtype="bfloat16")), r"\(layout\).*bfloat16"),
    ],
)
def test_a_refused_link_fails_the_transfer_with_the_reason(
    decode: DecodeSide, worker: PeerIdentity, reason: str
) -> None:
    with prefill_side(pool=MemoryPool(worker.layout), worker=worker) as prefill:
        begin(prefill, decode, decode.receiver.endpoint())

        failed = prefill.listener.next()

        assert failed == Failed("t", HandshakeRefused)
        assert isinstance(failed, Failed)
        assert re.search(reason, failed.message), failed.message
        assert prefill.sender.stats().fallbacks == 0


def test_a_restarted_decode_worker_is_another_peer(decode: DecodeSide) -> None:
    with prefill_side() as prefill:
        begin(prefill, decode, decode.receiver.endpoint(), incarnation="0")

        assert prefill.listener.next() == Failed("t", HandshakeRefused)


@pytest.mark.parametrize("lends", [False, True])
def test_shared_memory_is_preferred_where_both_can(decode: DecodeSide, lends: bool) -> None:
    with prefill_side() as prefill:
        prefill.pool.lends = lends
        begin(prefill, decode, decode.receiver.endpoint())

        done = prefill.listener.next()
        assert isinstance(done, Done)
        assert done.stats.transport == ("adopt" if lends else "shm")
        assert prefill.sender.stats().fallbacks == 0


def test_a_pool_that_its_owner_could_shrink_is_not_mapped_and_the_link_falls_back_to_tcp(decode: DecodeSide) -> None:
    with prefill_side(pool=MemoryPool(sealed=False)) as prefill:
        begin(prefill, decode, decode.receiver.endpoint())

        done = prefill.listener.next()
        assert isinstance(done, Done)
        assert done.stats.transport == "tcp"
        assert prefill.sender.stats().fallbacks == 1
        decode.receiver.close(WAIT_S)
        assert decode.receiver.stats().links_refused == {"transport": 2}
        assert decode.receiver.refusals() == {}


def test_a_unix_socket_that_is_gone_falls_back_to_tcp(decode: DecodeSide) -> None:
    endpoint = replace(LinkEndpoint.decode(decode.receiver.endpoint()), unix_name=b"\0kvrelay-nobody-listens")
    with prefill_side() as prefill:
        begin(prefill, decode, endpoint.encode())

        done = prefill.listener.next()
        assert isinstance(done, Done)
        assert (done.stats.transport, prefill.sender.stats().fallbacks) == ("tcp", 1)


def test_another_host_is_reached_over_tcp_without_trying_shared_memory(decode: DecodeSide) -> None:
    elsewhere = replace(LinkEndpoint.decode(decode.receiver.endpoint()), host_id=b"another host  16")
    with prefill_side() as prefill:
        begin(prefill, decode, elsewhere.encode())

        done = prefill.listener.next()
        assert isinstance(done, Done)
        assert (done.stats.transport, prefill.sender.stats().fallbacks) == ("tcp", 0)


def test_no_common_transport_is_a_refusal_that_names_the_offer(decode: DecodeSide) -> None:
    with prefill_side() as prefill:
        begin(prefill, decode, only(decode.receiver.endpoint(), "infiniband"))

        failed = prefill.listener.next()
        assert failed == Failed("t", HandshakeRefused)
        assert isinstance(failed, Failed)
        assert "infiniband" in failed.message


def test_an_endpoint_that_is_none_fails_the_transfer(decode: DecodeSide) -> None:
    with prefill_side() as prefill:
        begin(prefill, decode, b"garbage")

        assert prefill.listener.next() == Failed("t", ProtocolError)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS + 1, 2**64 - 1, 0])
def test_a_pool_that_is_not_as_large_as_claimed_is_not_mapped(decode: DecodeSide, num_blocks: int) -> None:
    pool = MemoryPool()
    assert pool.fd is not None

    answer = answer_over_unix(decode, replace(HELLO, transport="shm", num_blocks=num_blocks), pool.fd)

    assert isinstance(answer, Refused)
    assert answer.code == "transport"
    pool.close()


def test_a_descriptor_that_is_no_memory_file_is_not_mapped(decode: DecodeSide) -> None:
    with open(os.devnull) as file:
        answer = answer_over_unix(decode, replace(HELLO, transport="shm"), file.fileno())

    assert isinstance(answer, Refused)
    assert "no memory file" in answer.message


def test_links_leave_no_descriptor_behind() -> None:
    before = open_descriptors()
    with decode_side() as decode:
        for sealed in (True, False):
            with prefill_side(pool=MemoryPool(sealed=sealed)) as prefill:
                begin(prefill, decode, decode.receiver.endpoint())
                assert isinstance(prefill.listener.next(), Done)
            decode.table.close("t")

    assert not opened_since(before)


def test_the_receiver_cannot_write_through_what_it_was_given() -> None:
    pool = MemoryPool()
    assert pool.fd is not None
    fd = read_only(pool.fd)

    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)

    os.close(fd)
    pool.close()


def test_another_user_of_this_host_is_turned_away(decode: DecodeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameSocket, "peer_user", lambda self: os.getuid() + 1)
    with prefill_side() as prefill:
        begin(prefill, decode, only(decode.receiver.endpoint(), "shm"))

        assert prefill.listener.next() == Failed("t", HandshakeRefused)
        decode.receiver.close(WAIT_S)
        assert decode.receiver.stats().links_refused == {"identity": 1}
        assert decode.receiver.refusals() == {"identity": 1}


def test_a_refusal_does_not_overtake_what_was_adopted_before_it(decode: DecodeSide) -> None:
    pool = MemoryPool()
    pool.fill(seed=1)
    assert pool.fd is not None
    decode.expect("t", [5, 6])
    (digest,) = PythonBlockCopier().digests([pool.block(0)])
    good = BlockEntry(0, 5, 1, block_hash(0), digest, 0)
    wrong = good._replace(ordinal=1)
    group = Blocks(ticket_id="t", incarnation="1", entries=(good, wrong), length=LAYOUT.block_bytes)
    with dial(decode, "shm") as sock:
        connection = FrameSocket(sock, WAIT_S)
        connection.send_with_fd(encode(replace(HELLO, transport="shm")), pool.fd)
        assert isinstance(connection.receive(), Welcome)
        connection.send(encode(group))

        assert connection.receive() == Ack(ticket_id="t", ordinals=(0,))
        refusal = connection.receive()
        assert isinstance(refusal, Nack)
        assert (refusal.ordinal, refusal.error) == (1, "SlotMismatch")
    pool.close()


def test_a_silent_stranger_is_let_go_after_the_handshake_time_out() -> None:
    with decode_side(replace(SETTINGS, handshake_timeout_s=0.05)) as decode, dial(decode) as stranger:
        assert stranger.recv(1) == b""
        assert decode.receiver.stats().links_refused == {"LinkClosed": 1}


def test_more_links_than_allowed_are_turned_away() -> None:
    with decode_side(replace(SETTINGS, max_links=1)) as decode, dial(decode) as first:
        connection = FrameSocket(first, WAIT_S)
        connection.send(encode(HELLO))
        assert isinstance(connection.receive(), Welcome)
        connection.send(encode(Renew(ticket_ids=("unknown",))))
        assert isinstance(connection.receive(), Nack)  # the handshake is over at the other end too
        with dial(decode) as second:
            assert second.recv(1) == b""
        assert decode.receiver.stats().links_refused == {"busy": 1}


def test_whoever_has_not_introduced_himself_makes_room() -> None:
    with decode_side(replace(SETTINGS, max_links=1)) as decode, dial(decode) as silent:
        assert isinstance(answer_to(decode, HELLO), Welcome)
        assert silent.recv(1) == b""


def test_a_link_begins_with_hello(decode: DecodeSide) -> None:
    with dial(decode) as stranger:
        stranger.sendall(encode(Abort(ticket_id="t")))

        assert stranger.recv(1) == b""
        assert decode.receiver.stats().links_refused == {"ProtocolError": 1}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=4, max_size=300), transport=st.sampled_from(["tcp", "shm"]), greets=st.booleans())
def test_random_bytes_on_a_socket_end_in_a_closed_connection(
    shared_decode: DecodeSide, data: bytes, transport: str, greets: bool
) -> None:
    with dial(shared_decode, transport) as stranger:
        if greets and transport == "tcp":
            stranger.sendall(encode(HELLO))
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(WAIT_S)
        while stranger.recv(4096):
            pass

    with prefill_side() as prefill:
        begin(prefill, shared_decode, only(shared_decode.receiver.endpoint(), transport))
        assert isinstance(prefill.listener.next(), Done)
    shared_decode.table.close("t")


def test_closing_the_sender_ends_a_handshake_that_nobody_answers() -> None:
    with decode_side() as decode, socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = replace(
            LinkEndpoint.decode(decode.receiver.endpoint()), port=mute.getsockname()[1], transports=("tcp",)
        )
        with prefill_side(replace(SETTINGS, handshake_timeout_s=3600.0)) as prefill:
            begin(prefill, decode, endpoint.encode())
            with mute.accept()[0]:
                prefill.sender.close(WAIT_S)

            assert prefill.listener.events.get_nowait() == Failed("t", LinkClosed)
