"""Who may link to a worker with a cluster key: those that prove they know it, and nobody else, to any effect."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import kv_wire
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_links import (
    SETTINGS,
    WAIT_S,
    DecodeSide,
    Done,
    Failed,
    MemoryPool,
    PrefillSide,
    decode_side,
    fault_proxy,
    identity,
    in_time,
    only,
    outgoing,
    prefill_side,
    ticket,
)

from engine.cluster_key import ClusterKey
from engine.errors import HandshakeRefused, LinkClosed, ProtocolError
from kv_transfer import handshake
from kv_transfer.authentication import CAPABILITY
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Challenge, Frame, Hello, Proof, Refused, Welcome, encode
from kv_transfer.identity import LinkEndpoint

KEY = ClusterKey(bytes(range(32)))
OTHER_KEY = ClusterKey(bytes(32))
KEYED = replace(SETTINGS, key=KEY)
HELLO = replace(kv_wire.HELLO, capabilities=(CAPABILITY,))


@pytest.fixture
def decode() -> Iterator[DecodeSide]:
    with decode_side(KEYED) as side:
        yield side


@pytest.fixture(scope="module")
def shared_decode() -> Iterator[DecodeSide]:
    with decode_side(KEYED) as side:
        yield side


@contextmanager
def stranger(side: DecodeSide) -> Iterator[FrameSocket]:
    endpoint = LinkEndpoint.decode(side.receiver.endpoint())
    with socket.create_connection((endpoint.host, endpoint.port), timeout=WAIT_S) as sock:
        yield FrameSocket(sock, WAIT_S)


def begin(prefill: PrefillSide, decode: DecodeSide, endpoint: bytes) -> None:
    """A transfer of one block."""
    expected = decode.expect("t", [5])
    prefill.sender.open("t", ticket("t", endpoint, expected), in_time())
    prefill.sender.send("t", outgoing([0]))
    prefill.sender.finish("t")


def refusals(side: DecodeSide) -> dict[str, int]:
    side.receiver.close(WAIT_S)
    return dict(side.receiver.stats().links_refused)


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_two_workers_with_the_key_exchange_blocks(decode: DecodeSide, transport: str) -> None:
    with prefill_side(KEYED) as prefill:
        begin(prefill, decode, only(decode.receiver.endpoint(), transport))

        done = prefill.listener.next()

        assert isinstance(done, Done)
        assert done.stats.transport == transport


@pytest.mark.parametrize(
    ("key", "reason"),
    [(None, "a cluster key is set here, and prefill-0"), (OTHER_KEY, "prefill-0 has another cluster key")],
)
def test_a_prefill_worker_without_the_key_is_refused_with_the_reason(
    decode: DecodeSide, key: ClusterKey | None, reason: str
) -> None:
    with prefill_side(replace(SETTINGS, key=key)) as prefill:
        begin(prefill, decode, decode.receiver.endpoint())

        failed = prefill.listener.next()

        assert failed == Failed("t", HandshakeRefused)
        assert isinstance(failed, Failed)
        assert reason in failed.message
        assert decode.table.missing("t") == (0,)
        assert refusals(decode) == {"authentication": 1}


def test_a_prefill_worker_with_a_key_does_not_talk_to_a_decode_worker_without_one() -> None:
    with decode_side() as decode, prefill_side(KEYED) as prefill:
        begin(prefill, decode, decode.receiver.endpoint())

        failed = prefill.listener.next()

        assert isinstance(failed, Failed)
        assert "decode-0 asks for no proof" in failed.message


def test_a_stranger_learns_nothing_of_the_worker_before_its_proof(decode: DecodeSide) -> None:
    with stranger(decode) as connection:
        connection.send(encode(replace(HELLO, fingerprint=bytes(32), target_incarnation="0")))
        assert isinstance(connection.receive(), Challenge)
        connection.send(encode(Proof(nonce=bytes(32), mac=bytes(32))))

        refused = connection.receive()

    assert isinstance(refused, Refused)
    assert (refused.code, refused.message) == ("authentication", "prefill-0 has another cluster key")


def test_an_old_version_that_cannot_prove_anything_is_refused_with_the_reason(decode: DecodeSide) -> None:
    with stranger(decode) as connection:
        connection.send(encode(replace(HELLO, protocol=1, capabilities=())))

        refused = connection.receive()

    assert isinstance(refused, Refused)
    assert (refused.code, "(protocol 1) offers no proof" in refused.message) == ("authentication", True)


@pytest.mark.parametrize(
    "change",
    [
        lambda hello: replace(hello, protocol=1),
        lambda hello: replace(hello, worker_id="prefill-1"),
        lambda hello: replace(hello, incarnation="2"),
        lambda hello: replace(hello, target_worker_id="decode-1"),
        lambda hello: replace(hello, transport="gloo"),
        lambda hello: replace(hello, num_blocks=1),
        lambda hello: replace(hello, capabilities=(CAPABILITY, "more")),
    ],
    ids=["version", "worker", "incarnation", "target", "transport", "pool", "capabilities"],
)
def test_a_hello_that_is_changed_on_its_way_proves_nothing(
    decode: DecodeSide, change: Callable[[Hello], Hello]
) -> None:
    def forge(frame: Frame) -> Frame:
        return change(frame) if isinstance(frame, Hello) else frame

    with fault_proxy(decode.receiver.endpoint(), "tcp") as proxy, prefill_side(KEYED) as prefill:
        proxy.forge = forge
        begin(prefill, decode, proxy.endpoint)

        failed = prefill.listener.next()

        assert isinstance(failed, Failed)
        assert "authentication" in failed.message


@pytest.mark.parametrize("change", [{"protocol": 1}, {"nonce": bytes(32)}], ids=["version", "nonce"])
def test_a_challenge_that_is_changed_on_its_way_is_not_met(decode: DecodeSide, change: dict[str, Any]) -> None:
    def forge(frame: Frame) -> Frame:
        return replace(frame, **change) if isinstance(frame, Challenge) else frame

    with fault_proxy(decode.receiver.endpoint(), "tcp") as proxy, prefill_side(KEYED) as prefill:
        proxy.forge = forge
        begin(prefill, decode, proxy.endpoint)

        failed = prefill.listener.next()

        assert isinstance(failed, Failed)
        assert "authentication" in failed.message


def test_the_proof_of_another_handshake_is_worth_nothing(decode: DecodeSide) -> None:
    heard: list[Frame] = []

    def listen(frame: Frame) -> Frame:
        heard.append(frame)
        return frame

    with fault_proxy(decode.receiver.endpoint(), "tcp") as proxy, prefill_side(KEYED) as prefill:
        proxy.forge = listen
        begin(prefill, decode, proxy.endpoint)
        assert isinstance(prefill.listener.next(), Done)
    hello, proof = (next(frame for frame in heard if isinstance(frame, kind)) for kind in (Hello, Proof))
    with stranger(decode) as connection:
        connection.send(encode(hello))
        assert isinstance(connection.receive(), Challenge)
        connection.send(encode(proof))

        refused = connection.receive()

    assert isinstance(refused, Refused)
    assert refused.code == "authentication"


def impostor(sock: socket.socket, reflect: bool) -> None:
    """A decode worker without the key: it gives the prefill worker's own proof back, or one of its own making."""
    with sock:
        connection = FrameSocket(sock, WAIT_S)
        connection.receive()
        connection.send(encode(Challenge(protocol=2, nonce=bytes(32))))
        proof = connection.receive()
        assert isinstance(proof, Proof)
        connection.send(encode(proof if reflect else Proof(nonce=bytes(32), mac=bytes(32))))
        with suppress(LinkClosed):  # it has seen through us already
            connection.send(encode(Welcome(protocol=2, capabilities=())))
            connection.receive()


@pytest.mark.parametrize("reflect", [False, True], ids=["forged", "reflected"])
def test_a_decode_worker_without_the_key_is_not_believed(reflect: bool) -> None:
    pool = MemoryPool()
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=impostor, args=(theirs, reflect))
    thread.start()
    connection = FrameSocket(ours, WAIT_S)
    with pytest.raises(HandshakeRefused, match="decode-0 does not know the cluster key"):
        handshake.introduce(connection, identity("prefill-0"), ("decode-0", "1"), pool, "tcp", KEY)
    connection.close()
    thread.join(WAIT_S)
    pool.close()


def test_the_version_that_was_proved_is_the_one_that_is_spoken(decode: DecodeSide) -> None:
    def lower(frame: Frame) -> Frame:
        return replace(frame, protocol=1) if isinstance(frame, Welcome) else frame

    with fault_proxy(decode.receiver.endpoint(), "tcp") as proxy, prefill_side(KEYED) as prefill:
        proxy.forge = lower
        begin(prefill, decode, proxy.endpoint)

        assert prefill.listener.next() == Failed("t", ProtocolError)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answer=st.one_of(
        st.binary(min_size=1, max_size=200),
        st.builds(
            lambda nonce, mac: encode(Proof(nonce=nonce, mac=mac)),
            st.binary(min_size=32, max_size=32),
            st.binary(min_size=32, max_size=32),
        ),
    )
)
def test_random_answers_to_a_challenge_open_no_link(shared_decode: DecodeSide, answer: bytes) -> None:
    before = shared_decode.receiver.stats().links_accepted
    with stranger(shared_decode) as connection:
        connection.send(encode(HELLO))
        assert isinstance(connection.receive(), Challenge)
        connection._sock.sendall(answer)
        connection._sock.shutdown(socket.SHUT_WR)
        while connection._sock.recv(4096):
            pass
    assert shared_decode.receiver.stats().links_accepted == before
