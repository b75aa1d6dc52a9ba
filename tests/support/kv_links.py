"""Small pools, recording listeners and a proxy that misbehaves on demand, for tests of the KV links."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np
from memory_pool import LAYOUT as LAYOUT
from memory_pool import NUM_BLOCKS as NUM_BLOCKS
from memory_pool import MemoryPool as MemoryPool

from engine.borrowing import Loan
from engine.errors import EngineError, LinkClosed, ProtocolError, TransferError
from engine.kv_layout import KvLayout
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Block, Blocks, Challenge, Frame, Hello, Meet, Proof, Welcome, encode
from kv_transfer.identity import LinkEndpoint, PeerIdentity
from kv_transfer.link import LinkSettings
from kv_transfer.pool import KvPool
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ExpectedBlock, ReservationTable
from kv_transfer.sender import BlockColumns, KvSender, OutgoingBlock, TicketInfo
from kv_transfer.stats import TransferStats

LARGE_LAYOUT = KvLayout(num_layers=128, num_kv_heads=16, head_dim=256, block_size=16, dtype="float32")
NUM_LARGE_BLOCKS = 4
"""Of 64 MiB each: one is under way for long enough to be interrupted."""
FINGERPRINT = sha256(b"a model").digest()
WAIT_S = 20.0
"""Longer than anything here takes; reached only by a test that fails."""
TRANSPORTS = ("adopt", "shm", "tcp", "gloo")
"""That work on any machine."""
SETTINGS = LinkSettings(
    connect_timeout_s=5.0, handshake_timeout_s=5.0, progress_timeout_s=WAIT_S, transports=TRANSPORTS
)


def identity(worker_id: str, incarnation: str = "1", layout: KvLayout = LAYOUT) -> PeerIdentity:
    return PeerIdentity(worker_id=worker_id, incarnation=incarnation, fingerprint=FINGERPRINT, layout=layout)


def block_hash(ordinal: int) -> bytes:
    return sha256(b"block %d" % ordinal).digest()


@dataclass(frozen=True)
class Adopted:
    ticket_id: str
    ordinal: int
    num_bytes: int
    transport: str


@dataclass(frozen=True)
class BlockRefused:
    ticket_id: str
    ordinal: int
    error: type[TransferError]


@dataclass(frozen=True)
class Quiet:
    ticket_id: str
    slots: frozenset[int]


@dataclass(frozen=True)
class Lost:
    ticket_ids: frozenset[str]
    error: type[TransferError]


@dataclass(frozen=True)
class Done:
    request_id: str
    stats: TransferStats


@dataclass(frozen=True)
class Failed:
    request_id: str
    error: type[EngineError]
    message: str = field(compare=False, default="")


ReceiverEvent = Adopted | BlockRefused | Quiet | Lost
SenderEvent = Done | Failed


class RecordingReceiverListener:
    def __init__(self) -> None:
        self.events: queue.Queue[ReceiverEvent] = queue.Queue()
        self.loans: queue.Queue[Loan] = queue.Queue()

    def next(self) -> ReceiverEvent:
        return self.events.get(timeout=WAIT_S)

    def blocks_adopted(self, ticket_id: str, ordinals: Sequence[int], num_bytes: int, transport: str) -> None:
        for ordinal in ordinals:
            self.events.put(Adopted(ticket_id, ordinal, num_bytes // len(ordinals), transport))

    def block_refused(self, ticket_id: str, ordinal: int, error: TransferError) -> None:
        self.events.put(BlockRefused(ticket_id, ordinal, type(error)))

    def writes_quiet(self, ticket_id: str, slots: Collection[int]) -> None:
        self.events.put(Quiet(ticket_id, frozenset(slots)))

    def blocks_lent(self, loan: Loan) -> None:
        self.loans.put(loan)

    def link_lost(self, ticket_ids: Collection[str], error: TransferError) -> None:
        self.events.put(Lost(frozenset(ticket_ids), type(error)))


class RecordingSenderListener:
    def __init__(self) -> None:
        self.events: queue.Queue[SenderEvent] = queue.Queue()
        self.loans_over: queue.Queue[tuple[str, int]] = queue.Queue()
        self.doubted: queue.Queue[OutgoingBlock] = queue.Queue()

    def next(self) -> SenderEvent:
        return self.events.get(timeout=WAIT_S)

    def transfer_done(self, request_id: str, stats: TransferStats) -> None:
        self.events.put(Done(request_id, stats))

    def transfer_failed(self, request_id: str, error: EngineError) -> None:
        self.events.put(Failed(request_id, type(error), str(error)))

    def block_doubted(self, block: OutgoingBlock) -> None:
        self.doubted.put(block)

    def loan_over(self, request_id: str, count: int) -> None:
        self.loans_over.put((request_id, count))


@dataclass
class DecodeSide:
    """A receiver with its pool and table."""

    pool: MemoryPool
    table: ReservationTable
    listener: RecordingReceiverListener
    receiver: KvReceiver

    def expect(self, ticket_id: str, slots: Sequence[int], generation: int = 1, first: int = 0) -> dict[int, int]:
        """Open a ticket for blocks `first`, `first` + 1, ... in `slots`. Returns ordinal -> slot."""
        blocks = [
            ExpectedBlock(ordinal=ordinal, slot=slot, generation=generation, hash=block_hash(ordinal))
            for ordinal, slot in enumerate(slots, start=first)
        ]
        self.table.open(ticket_id, blocks, lease_until=time.monotonic() + self.table.lease_s)
        return {block.ordinal: block.slot for block in blocks}

    def close(self) -> None:
        self.receiver.close(timeout_s=WAIT_S)
        self.table.check_integrity()
        self.pool.close()


@dataclass
class PrefillSide:
    pool: MemoryPool
    listener: RecordingSenderListener
    sender: KvSender

    def close(self) -> None:
        self.sender.close(timeout_s=WAIT_S)
        self.sender.check_integrity()
        self.pool.close()


@contextmanager
def decode_side(settings: LinkSettings = SETTINGS, pool: MemoryPool | None = None) -> Iterator[DecodeSide]:
    pool = pool or MemoryPool(borrows=True)
    table = ReservationTable("1")
    listener = RecordingReceiverListener()
    worker = identity("decode-0", layout=pool.layout)
    side = DecodeSide(pool, table, listener, KvReceiver(worker, pool, table, listener, settings=settings))
    side.receiver.start()
    try:
        yield side
    finally:
        side.close()


@contextmanager
def prefill_side(
    settings: LinkSettings = SETTINGS, pool: MemoryPool | None = None, worker: PeerIdentity | None = None
) -> Iterator[PrefillSide]:
    pool = pool or MemoryPool()
    pool.fill(seed=7)
    listener = RecordingSenderListener()
    sender = KvSender(worker or identity("prefill-0", layout=pool.layout), pool, listener, settings)
    side = PrefillSide(pool, listener, sender)
    try:
        yield side
    finally:
        side.close()


def only(endpoint: bytes, transport: str) -> bytes:
    return replace(LinkEndpoint.decode(endpoint), transports=(transport,)).encode()


def ticket(
    ticket_id: str, endpoint: bytes, slots: dict[int, int], generation: int = 1, incarnation: str = "1"
) -> TicketInfo:
    return TicketInfo(
        ticket_id=ticket_id,
        worker_id="decode-0",
        incarnation=incarnation,
        endpoint=endpoint,
        blocks={ordinal: (slot, generation) for ordinal, slot in slots.items()},
        lease_s=5.0,
    )


def outgoing(ordinals: Sequence[int], first_source: int = 0) -> list[OutgoingBlock]:
    """Block `ordinal` is in source block `first_source` + `ordinal`."""
    return [OutgoingBlock(ordinal, first_source + ordinal, block_hash(ordinal)) for ordinal in ordinals]


def columns(
    ordinals: Sequence[int], sources: Sequence[int] | None = None, generation: int = 0, lendable: bool = False
) -> BlockColumns:
    """The same, full."""
    return BlockColumns(
        np.array(ordinals, dtype=np.int64),
        np.array(ordinals if sources is None else sources, dtype=np.int64),
        np.full(len(ordinals), generation, dtype=np.uint64),
        b"".join(map(block_hash, ordinals)),
        lendable,
    )


def in_time() -> float:
    """A deadline for a transfer that no test reaches."""
    return time.monotonic() + 3600


def same_bytes(source: KvPool, source_block: int, target: KvPool, slot: int) -> bool:
    return bytes(source.block(source_block)) == bytes(target.block(slot))


Pieces = Sequence[bytes | None]
"""What a proxy passes on, one write each; None ends the connection there."""
Hook = Callable[[Frame, bytes, bytes], Pieces]
"""(frame, its encoding, its payload) -> what becomes of it. May wait."""


def pass_on(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
    return [encoded + payload]


def payload_bytes(frame: Frame) -> int:
    """That follow `frame` in the stream."""
    if isinstance(frame, Block):
        frame = frame.grouped()
    return sum(frame.length for entry in frame.entries if entry.offset is None) if isinstance(frame, Blocks) else 0


class Gate:
    """Holds a thread where it is until the test lets it go on."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def hold(self) -> None:
        self._reached.set()
        assert self._opened.wait(WAIT_S), "the gate was never opened"

    def wait_until_reached(self) -> None:
        assert self._reached.wait(WAIT_S), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()


HANDSHAKE = (Hello, Welcome, Meet, Challenge, Proof)


class FaultProxy:
    """Stands between a sender and a receiver and passes their frames on, through `to_receiver` and `to_sender`."""

    def __init__(self, target: bytes, transport: str) -> None:
        self._target = LinkEndpoint.decode(target)
        self._is_unix = transport in ("adopt", "shm")
        self._has_payload = transport == "tcp"
        self.to_receiver: Hook = pass_on
        self.to_sender: Hook = pass_on
        self.forge: Callable[[Frame], Frame] = lambda frame: frame
        """What becomes of each frame of a handshake."""
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        if self._is_unix:
            name = b"\0kvrelay-proxy-" + secrets.token_hex(8).encode()
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind(name)
            self._listening.listen()
            changed = replace(self._target, unix_name=name, transports=(transport,))
        else:
            self._listening = socket.create_server(("127.0.0.1", 0))
            changed = replace(self._target, port=self._listening.getsockname()[1], transports=(transport,))
        self.endpoint = changed.encode()
        self._start(self._accept)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a hook of the proxy did not return"
        for sock in self._sockets:
            sock.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listening socket was shut down
            while True:
                near, _ = self._listening.accept()
                if self._is_unix:
                    far = socket.socket(socket.AF_UNIX)
                    assert self._target.unix_name is not None
                    far.connect(self._target.unix_name)
                else:
                    far = socket.create_connection((self._target.host, self._target.port))
                self._sockets += [near, far]
                near_end, far_end = FrameSocket(near, WAIT_S), FrameSocket(far, WAIT_S)
                self._start(self._forward, near_end, far, True)
                self._start(self._forward, far_end, near, False)

    def _forward(self, source: FrameSocket, target: socket.socket, to_receiver: bool) -> None:
        try:
            first, fd = source.receive_with_fd() if source.is_unix and to_receiver else (source.receive(), None)
            assert first is not None
            if fd is not None:
                socket.send_fds(target, [encode(self.forge(first))], [fd])
                os.close(fd)
            else:
                target.sendall(encode(self.forge(first)))
            while (frame := source.receive()) is not None:
                received = bytearray(payload_bytes(frame) if self._has_payload else 0)
                source.receive_into(memoryview(received))
                payload = bytes(received)
                hook = self.to_receiver if to_receiver else self.to_sender
                if isinstance(frame, HANDSHAKE):
                    frame, hook = self.forge(frame), pass_on
                for piece in hook(frame, encode(frame), payload):
                    if piece is None:
                        return
                    target.sendall(piece)
        except (LinkClosed, ProtocolError, OSError):
            pass  # one of the two ended the link, and the other hears of it now
        finally:
            source.shut_down()
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)


@contextmanager
def fault_proxy(target: bytes, transport: str) -> Iterator[FaultProxy]:
    proxy = FaultProxy(target, transport)
    try:
        yield proxy
    finally:
        proxy.close()
