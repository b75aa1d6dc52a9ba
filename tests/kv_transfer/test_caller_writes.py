"""Over shared memory whoever hands over blocks writes the frames of them itself, if that needs no waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from kv_links import Done, Failed, columns, outgoing
from kv_wire import Wire, open_wire

from engine.errors import InternalError, LinkClosed
from kv_transfer.frame_socket import FrameSocket

SendNow = Callable[[FrameSocket, bytes], int]


@pytest.fixture(params=["shm", "tcp"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with open_wire(request.param) as wire:
        wire.begin("first", [1], direct=True)  # opens the link
        wire.send("first", [0])
        wire.prefill.sender.finish("first")
        assert isinstance(wire.prefill.listener.next(), Done)
        yield wire


def hand_over(wire: Wire, ticket_id: str = "t") -> Done | Failed:
    wire.begin(ticket_id, [5, 6], generation=2, direct=True)
    wire.prefill.sender.digest([(0, 1), (1, 1)])
    wire.prefill.sender.send(ticket_id, [replace(block, generation=1) for block in outgoing([0, 1])])
    wire.prefill.sender.finish(ticket_id)
    return wire.prefill.listener.next()


def test_a_caller_writes_what_needs_not_be_read(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    real = FrameSocket.send_now

    def send_now(self: FrameSocket, encoded: bytes) -> int:
        threads.append(threading.current_thread().name)
        return real(self, encoded)

    monkeypatch.setattr(FrameSocket, "send_now", send_now)

    for number in range(20):  # the writer may be busy with the end of the one before
        assert isinstance(hand_over(wire, f"t{number}"), Done)
        assert wire.arrived([5, 6])

    assert set(threads) == ({threading.current_thread().name} if wire.transport == "shm" else set())


def test_the_writer_ends_a_frame_that_a_caller_could_not_write_without_waiting(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FrameSocket.send_now
    monkeypatch.setattr(FrameSocket, "send_now", lambda self, encoded: real(self, encoded[:7]))

    assert isinstance(hand_over(wire), Done)
    assert wire.arrived([5, 6])


def test_a_link_that_breaks_under_a_caller_fails_the_transfer_and_not_the_caller(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def send_now(self: FrameSocket, encoded: bytes) -> int:
        called.append(len(encoded))
        raise LinkClosed("gone")

    monkeypatch.setattr(FrameSocket, "send_now", send_now)

    ended = hand_over(wire)

    assert (ended == Failed("t", LinkClosed)) if called else isinstance(ended, Done)


def test_columns_are_refused_at_the_caller_if_they_cannot_be_meant(wire: Wire) -> None:
    for columns_ in (columns([0], sources=[1000]), columns([0], sources=[-1]), replace(columns([0]), hashes=b"short")):
        with pytest.raises(InternalError, match="no block of this pool"):
            wire.prefill.sender.send("t", [columns_])
