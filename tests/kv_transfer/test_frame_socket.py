"""Hostile and dying peers at the socket: every call ends, with a reason, and before it allocates what is claimed."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Iterator

import pytest
from descriptors import open_descriptors, opened_since

from engine.errors import LinkClosed, ProtocolError
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Abort, Finish, encode

FRAME = encode(Abort(ticket_id="t"))


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, socket.socket]]:
    near, far = socket.socketpair()
    connection = FrameSocket(near, timeout_s=0.05)
    yield connection, far
    connection.close()
    far.close()


Ends = tuple[FrameSocket, socket.socket]


def test_frames_arrive_in_order_however_the_stream_is_cut(ends: Ends) -> None:
    connection, peer = ends
    stream = FRAME + encode(Finish(ticket_id="t", count=3))
    for byte in stream[:5]:
        peer.send(bytes([byte]))
    peer.send(stream[5:])

    assert connection.receive() == Abort(ticket_id="t")
    assert connection.has_frame()
    assert connection.receive() == Finish(ticket_id="t", count=3)
    assert not connection.has_frame()


def test_a_silent_peer_gives_no_frame_after_the_time_out(ends: Ends) -> None:
    assert ends[0].receive() is None


def test_a_peer_that_stops_in_the_middle_of_a_frame_is_given_up(ends: Ends) -> None:
    connection, peer = ends
    peer.send(FRAME[:-1])

    with pytest.raises(LinkClosed, match="in the middle of a frame"):
        connection.receive()


def test_a_peer_that_closes_is_told_from_one_that_closes_in_the_middle(ends: Ends) -> None:
    connection, peer = ends
    peer.send(FRAME + FRAME[:3])
    peer.close()

    assert connection.receive() == Abort(ticket_id="t")
    with pytest.raises(LinkClosed, match="in the middle of a frame"):
        connection.receive()


def test_an_orderly_end_is_a_closed_link(ends: Ends) -> None:
    connection, peer = ends
    peer.close()

    with pytest.raises(LinkClosed, match=r"closed the link$"):
        connection.receive()


def test_a_huge_claim_is_refused_at_its_first_four_bytes(ends: Ends) -> None:
    connection, peer = ends
    peer.send(b"\xff\xff\xff\x7f")

    with pytest.raises(ProtocolError, match="2147483647 bytes is announced"):
        connection.receive()


def test_payload_is_taken_first_from_what_was_read_along_with_the_frame(ends: Ends) -> None:
    connection, peer = ends
    payload = os.urandom(50_000)
    peer.sendall(FRAME + payload + FRAME)
    target = bytearray(len(payload))

    connection.receive()
    connection.receive_into(memoryview(target))

    assert bytes(target) == payload
    assert connection.receive() == Abort(ticket_id="t")


def test_a_payload_shorter_than_what_was_read_ahead_leaves_the_rest(ends: Ends) -> None:
    connection, peer = ends
    peer.sendall(FRAME + b"payload" + FRAME)
    target = bytearray(len(b"payload"))

    connection.receive()
    connection.receive_into(memoryview(target))

    assert bytes(target) == b"payload"
    assert connection.receive() == Abort(ticket_id="t")


def test_discarding_a_payload_keeps_the_place_in_the_stream(ends: Ends) -> None:
    connection, peer = ends
    peer.sendall(FRAME + bytes(100_000) + FRAME)

    connection.receive()
    connection.discard(100_000)

    assert connection.receive() == Abort(ticket_id="t")


@pytest.mark.parametrize("closes", [False, True])
def test_a_payload_that_does_not_come_completely_is_an_error(ends: Ends, closes: bool) -> None:
    connection, peer = ends
    peer.sendall(bytes(1000))
    if closes:
        peer.close()

    with pytest.raises(LinkClosed, match="payload"):
        connection.receive_into(memoryview(bytearray(2000)))


def test_sending_to_a_peer_that_does_not_read_ends_at_the_time_out(ends: Ends) -> None:
    connection, _ = ends

    with pytest.raises(LinkClosed, match=r"within 0\.05 s|no progress"):
        connection.send(FRAME, memoryview(bytes(16 * 1024 * 1024)))


def test_shutting_down_wakes_the_receiver_for_good(ends: Ends) -> None:
    connection, _ = ends
    connection.shut_down()

    with pytest.raises(LinkClosed):
        connection.receive()
    with pytest.raises(LinkClosed):
        connection.send(FRAME)


def test_a_descriptor_comes_with_its_frame(ends: Ends) -> None:
    connection, peer = ends
    with open(os.devnull) as file:
        socket.send_fds(peer, [FRAME], [file.fileno()])
        frame, fd = connection.receive_with_fd()

        assert frame == Abort(ticket_id="t")
        assert fd is not None
        assert os.path.sameopenfile(fd, file.fileno())
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_descriptors_that_nobody_asked_for_are_not_kept(ends: Ends) -> None:
    connection, peer = ends
    with open(os.devnull) as file:
        before = open_descriptors()
        many = array("i", [file.fileno()] * 4)
        peer.sendmsg([FRAME], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
        assert connection.receive() == Abort(ticket_id="t")
        peer.sendmsg([FRAME[:3]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
        peer.sendmsg([FRAME[3:]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])

        with pytest.raises(ProtocolError, match="file descriptor"):
            connection.receive_with_fd()
        assert not opened_since(before)


def test_descriptors_are_counted_before_their_frame_is_complete(ends: Ends) -> None:
    connection, peer = ends
    with open(os.devnull) as file:
        before = open_descriptors()
        for start in range(3):
            peer.sendmsg(
                [FRAME[start : start + 1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file.fileno()]))]
            )

        with pytest.raises(ProtocolError, match="more than one file descriptor"):
            connection.receive_with_fd()
        assert not opened_since(before)
