"""Faults on purpose: a link's connection that loses, changes or withholds what its end sends. For tests and drills.

`FaultPlan` says which frame meets which fault; it is a pure function of a seed. `FaultInjector` makes the connections
that carry it out: give `injector.connection(direction)` to one end as `LinkSettings.connection`, and every frame that
this end sends goes through the plan, the first of the handshake included. The other end cannot tell it from a
network, a peer or a memory that fails. Nothing here is active unless a caller brings it.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.errors import ConfigError
from kv_transfer import frames
from kv_transfer.copies import blocks_of
from kv_transfer.digest import PythonBlockCopier
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import LENGTH_BYTES, Block, Blocks, Copies, Frame
from kv_transfer.pool import KvPool

_REMEMBERED_FRAMES = 64


class FaultKind(StrEnum):
    DROP = "drop"
    """The frame and its payload are never sent."""
    DELAY = "delay"
    """They are sent `delay_s` late, and everything behind them too."""
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    """The frame changes places with the next one; without a next one it is lost."""
    TRUNCATE = "truncate"
    """The end of the frame or of its payload is left out, and the stream goes on."""
    FLIP = "flip"
    """One bit is inverted."""
    REPLAY = "replay"
    """An earlier frame, perhaps of an earlier link, is sent before this one."""
    FREEZE = "freeze"
    """This end sends and receives nothing for `freeze_s`, then goes on as if nothing had been."""
    KILL = "kill"
    """The stream ends in the middle of the frame or its payload."""


class Direction(StrEnum):
    TO_RECEIVER = "to_receiver"
    TO_SENDER = "to_sender"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    in_payload: bool = False
    """A bit of the payload is flipped, not one of its frame; on a link whose payload does not travel with the frame,
    a bit of a source block, whose digest was taken before. Where there is no payload, a bit of the frame."""
    position: float = 0.5
    """Where in the bytes, or among the remembered frames, from 0 up to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.position < 1:
            raise ConfigError(f"position must be in [0, 1), got {self.position}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which frame meets which fault: those `at` a place always, all others at random with probability `rate`."""

    at: Mapping[tuple[Direction, int], Fault] = field(default_factory=dict)
    """By direction and number of the frame on its link, from 0, which is HELLO or WELCOME."""
    rate: float = 0.0
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"rate must be in [0, 1], got {self.rate}")

    def fault(self, link: int, direction: Direction, frame: int) -> Fault | None:
        """For frame number `frame` of one direction of link number `link`."""
        planned = self.at.get((direction, frame))
        if planned is not None or not self.rate:
            return planned
        rng = random.Random(f"{self.seed} {link} {direction} {frame}")
        if rng.random() >= self.rate:
            return None
        return Fault(kind=rng.choice(self.kinds), in_payload=rng.random() < 0.5, position=rng.random())


class FaultInjector:
    """Makes connections that follow `plan`. Owns what they have in common: their numbers, counts and memory."""

    def __init__(
        self, plan: FaultPlan, *, source: KvPool | None = None, delay_s: float = 0.05, freeze_s: float = 0.5
    ) -> None:
        """`source`: the sender's pool, in which bits are flipped if payloads do not travel with their frames."""
        self.plan = plan
        self.source = source
        self.delay_s = delay_s
        self.freeze_s = freeze_s
        self._lock = threading.Lock()
        self._links = 0
        self._injected: Counter[FaultKind] = Counter()
        self._remembered: deque[bytes] = deque(maxlen=_REMEMBERED_FRAMES)

    def connection(self, direction: Direction) -> Callable[[socket.socket, float], FrameSocket]:
        """For the `LinkSettings` of the end that sends in `direction`."""

        def make(sock: socket.socket, timeout_s: float) -> FrameSocket:
            with self._lock:
                number = self._links
                self._links += 1
            return _FaultySocket(sock, timeout_s, self, direction, number)

        return make

    def injected(self) -> Mapping[FaultKind, int]:
        """Faults that were carried out so far."""
        with self._lock:
            return dict(self._injected)

    def count(self, kind: FaultKind) -> None:
        with self._lock:
            self._injected[kind] += 1

    def remember(self, sent: bytes) -> None:
        with self._lock:
            self._remembered.append(sent)

    def source_block(self, digest: bytes) -> memoryview | None:
        """The block of `source` that has it; None if there is none, as where blocks are converted."""
        assert self.source is not None, "the caller has looked"
        blocks = [self.source.block(n) for n in range(self.source.num_blocks)]
        digests = PythonBlockCopier().digests(blocks)
        return blocks[digests.index(digest)] if digest in digests else None

    def recall(self, position: float) -> bytes:
        """One of the last frames that were sent, with its payload; empty if there was none."""
        with self._lock:
            return self._remembered[int(position * len(self._remembered))] if self._remembered else b""


class _FaultySocket(FrameSocket):
    """As `FrameSocket`, for an end that fails as the injector's plan says."""

    def __init__(
        self, sock: socket.socket, timeout_s: float, injector: FaultInjector, direction: Direction, number: int
    ) -> None:
        super().__init__(sock, timeout_s)
        self._injector = injector
        self._direction = direction
        self._number = number
        self._frame = 0
        self._held = b""
        """A frame that waits for the next one to go first."""
        self._fd: int | None = None
        """Goes with the next bytes."""
        self._frozen = threading.Lock()
        """Held while this end does nothing."""
        self._over = threading.Event()

    def send(self, encoded: bytes, *payload: memoryview) -> None:
        for frame, last in _split(encoded):
            self._send_one(frame, *(payload if last else ()))

    def send_now(self, encoded: bytes) -> int:
        """Nothing: what may be delayed is sent by whoever may wait."""
        return 0

    def send_with_fd(self, encoded: bytes, fd: int) -> None:
        self._fd = fd
        try:
            self._send_one(encoded)
        finally:
            self._fd = None

    def receive(self) -> Frame | None:
        frame = super().receive()
        with self._frozen:
            return frame

    def receive_into(self, target: memoryview) -> None:
        with self._frozen:
            pass
        super().receive_into(target)

    def shut_down(self) -> None:
        super().shut_down()
        self._over.set()  # only now: what was held back must not get out any more

    def close(self) -> None:
        self._over.set()
        super().close()

    def _send_one(self, frame: bytes, *payload: memoryview) -> None:
        fault = self._injector.plan.fault(self._number, self._direction, self._frame)
        self._frame += 1
        whole = b"".join((frame, *payload))
        if fault is None:
            self._emit(whole)
        else:
            self._injector.count(fault.kind)
            self._fail(fault, frame, whole)
        self._injector.remember(whole)

    def _fail(self, fault: Fault, frame: bytes, whole: bytes) -> None:
        cut = int(fault.position * len(whole))
        match fault.kind:
            case FaultKind.DROP:
                pass
            case FaultKind.DELAY:
                self._over.wait(self._injector.delay_s)
                self._emit(whole)
            case FaultKind.DUPLICATE:
                self._emit(whole)
                self._emit(whole)
            case FaultKind.REORDER:
                self._held += whole
            case FaultKind.TRUNCATE:
                self._emit(whole[:cut])
            case FaultKind.FLIP:
                self._emit(self._damaged(fault, frame, whole))
            case FaultKind.REPLAY:
                self._emit(self._injector.recall(fault.position))
                self._emit(whole)
            case FaultKind.FREEZE:
                with self._frozen:
                    self._over.wait(self._injector.freeze_s)
                self._emit(whole)
            case FaultKind.KILL:
                self._emit(whole[:cut])
                self.shut_down()

    def _emit(self, data: bytes) -> None:
        data, self._held = (data + self._held, b"") if data else (data, self._held)
        fd, self._fd = self._fd, None
        if fd is not None and data:
            super().send_with_fd(data, fd)
        elif data:
            super().send(data)

    def _damaged(self, fault: Fault, frame: bytes, whole: bytes) -> bytes:
        if fault.in_payload and len(whole) > len(frame):
            return frame + flipped(whole[len(frame) :], fault.position)
        digests = _digests(frame) if fault.in_payload and self._injector.source is not None else []
        block = self._injector.source_block(digests[int(fault.position * len(digests))]) if digests else None
        if block is None:
            return flipped(frame, fault.position) + whole[len(frame) :]
        block[:] = flipped(bytes(block), fault.position)
        return whole


def flipped(data: bytes, position: float) -> bytes:
    """`data` with one bit inverted."""
    bit = int(position * len(data) * 8)
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _split(encoded: bytes) -> Iterator[tuple[bytes, bool]]:
    """The frames of one send; with the last one, whose payload follows, True."""
    start = 0
    while start < len(encoded):
        end = start + LENGTH_BYTES + frames.body_length(encoded[start : start + LENGTH_BYTES])
        yield encoded[start:end], end == len(encoded)
        start = end


def _digests(frame: bytes) -> list[bytes]:
    """Of the payloads that `frame` announces."""
    match frames.decode(frame[LENGTH_BYTES:]):
        case Blocks(entries=entries):
            return [entry.digest for entry in entries]
        case Block(digest=digest):
            return [digest]
        case Copies() as copies:
            return [entry.digest for entry in blocks_of(copies).entries]
        case _:
            return []
