"""Links without sockets and threads: what `kv_transfer` runs on its threads, cut into steps.

The code is the real one (`SenderLink`, `ReceiverLink`, `OutgoingTransfers`, frames, digests). Here is only the order
of calls that the main functions of its threads make, and the wire between the two ends. This file alone knows them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from engine.errors import HandshakeRefused, LinkClosed, TransferError
from engine.peer_windows import PeerWindow
from explorer.agenda import Actor
from explorer.checks import check_adopted
from kv_transfer.copies import blocks_of
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import (
    GROUPS_PROTOCOL_VERSION,
    LENGTH_BYTES,
    Block,
    Blocks,
    Copies,
    Frame,
    Hello,
    body_length,
    decode,
)
from kv_transfer.handshake import examine
from kv_transfer.identity import ADOPT, DEFAULT_TRANSPORTS, MAPPING, LinkEndpoint, LinkTarget
from kv_transfer.link import IncomingLink, LinkSettings, OutgoingLink
from kv_transfer.outgoing import BlockColumns, OutgoingBlock, SendBlocks, SendColumns
from kv_transfer.receiver import KvReceiver
from kv_transfer.receiver_link import ReceiverLink
from kv_transfer.reservation import WriteGrant, WriteOutcome
from kv_transfer.sender import KvSender
from kv_transfer.sender_link import SenderLink
from kv_transfer.transport_shm import ShmOutlet
from kv_transfer.transport_tcp import TcpOutlet

if TYPE_CHECKING:
    from explorer.node import Node
    from explorer.world import World

SETTINGS = LinkSettings(
    connection=lambda connection, timeout_s: cast(Any, connection), transports=(ADOPT, *DEFAULT_TRANSPORTS)
)


@dataclass(slots=True, eq=False)
class Sent:
    """A frame on the wire."""

    origin: int
    encoded: bytes
    payloads: tuple[bytes, ...]
    """Of its blocks; none if the receiver reads them out of the sender's pool."""
    flipped: bool = False


class Wire:
    """A stream between the two ends of a link. Keeps its order, may end at any moment, and (the explorer's doing) bring
    a frame twice, or one of an earlier stream of the same pair."""

    def __init__(self) -> None:
        self.down: deque[Sent] = deque()
        """From prefill to decode worker."""
        self.up: deque[Sent] = deque()
        self.over = False
        """No more is sent; what was sent arrives, unless it is torn too."""
        self.torn = False

    def tear(self) -> None:
        self.over = self.torn = True
        self.down.clear()
        self.up.clear()


class Connection:
    """One end of a wire, in the place of a `FrameSocket`."""

    def __init__(self, world: World, wire: Wire, out: deque[Sent], source: deque[Sent]) -> None:
        self._world = world
        self._wire = wire
        self._out = out
        self._source = source

    def send(self, encoded: bytes, *payloads: memoryview) -> None:
        if self._wire.over:
            raise LinkClosed("the wire is cut")
        while encoded:
            length = LENGTH_BYTES + body_length(encoded[:LENGTH_BYTES])
            sent, encoded = encoded[:length], encoded[length:]
            self._out.append(Sent(self._world.origin(), sent, tuple(map(bytes, payloads))))

    def has_frame(self) -> bool:
        return bool(self._source)

    def shut_down(self) -> None:
        self._wire.over = True

    close = shut_down

    def peer_user(self) -> None:
        return None


class Changed(threading.Condition):
    """Of a link's writer: whether it has been told of something since it last looked."""

    told = True

    def notify(self, n: int = 1) -> None:
        self.told = True


class SenderEnd(SenderLink):
    """The writer and the reader of one link of a prefill worker."""

    def __init__(self, sender: KvSender, target: LinkTarget) -> None:
        super().__init__(sender, target)
        assert isinstance(sender, ExploredSender)
        self.world, self.node = sender.world, sender.node
        self.number = len(self.world.senders)
        self.actor = Actor(f"link{self.number}.p")
        self.changed = Changed(sender._lock)
        self.decode_worker = target.worker_id
        self.connect_by = 0.0
        self.wire: Wire | None = None
        self.outgoing: OutgoingLink | None = None
        self.in_hand: SendBlocks | SendColumns | None = None
        self.over = False

    def start(self) -> None:
        self.connect_by = self.world.clock.now + SETTINGS.connect_timeout_s + SETTINGS.handshake_timeout_s
        self.world.senders.append(self)

    def join(self, deadline: float) -> None:
        pass

    @property
    def has_step(self) -> bool:
        """Whether the writer would do anything."""
        if self.in_hand is not None or cast(Changed, self.changed).told:
            return True
        wake = self.transfers.next_wake()
        return wake is not None and wake <= self.world.clock.now

    @property
    def deadline(self) -> float | None:
        return self.connect_by if self.wire is None else self.transfers.next_wake()

    def connect(self, to: Node | None) -> None:
        """Find `to` where the ticket says that its worker is: perhaps another incarnation, or nobody."""
        LinkEndpoint.decode(self.target.endpoint)
        try:
            if self._error is not None:
                raise self._error
            if to is None:
                raise LinkClosed("nobody answers")
            identity = self._sender._identity
            hello = Hello(
                protocol=self.world.setup.protocol,
                oldest_protocol=1,
                worker_id=identity.worker_id,
                incarnation=identity.incarnation,
                target_worker_id=self.target.worker_id,
                target_incarnation=self.target.incarnation,
                fingerprint=identity.fingerprint,
                layout=identity.layout.to_wire(),
                transport=self.world.setup.transport,
                num_blocks=self._sender._kv.num_blocks,
                capabilities=(),
            )
            wire = Wire()
            there = cast(FrameSocket, Connection(self.world, wire, wire.up, wire.down))
            self._open(to, hello, wire, examine(there, hello, to.receiver.identity, None))
        except TransferError as error:
            self._end(HandshakeRefused(str(error)) if isinstance(error, HandshakeRefused) else error)

    def _open(self, to: Node, hello: Hello, wire: Wire, protocol: int) -> None:
        self.wire = wire
        connection = cast(FrameSocket, Connection(self.world, wire, wire.down, wire.up))
        block_bytes = self._sender._kv.layout.block_bytes
        maps = hello.transport in MAPPING
        outlet = ShmOutlet(connection, block_bytes, hello.transport) if maps else TcpOutlet(connection)
        self._connection = connection
        columns = maps and protocol >= GROUPS_PROTOCOL_VERSION
        self.outgoing = OutgoingLink(connection, outlet, protocol, fell_back=False, columns=columns)
        self.transfers.transport, self.transfers.columns = outlet.transport, columns
        self.world.receivers.append(ReceiverEnd(self, to, hello, protocol))

    def write(self) -> None:
        """What the writer does between two places where others can come in between."""
        assert self.outgoing is not None
        changed = cast(Changed, self.changed)
        try:
            if self.in_hand is not None:
                step, self.in_hand = self.in_hand, None
                self._send(self.outgoing, step)
                with changed:
                    self._note_sent(step)
                    changed.told = True
                return
            with changed:
                if self._error is not None:
                    raise self._error
                taken = self.transfers.next_step(self.world.clock.now)
                changed.told = taken is not None or self.transfers.has_outcomes()
            self._report()
            if isinstance(taken, (SendBlocks, SendColumns)):
                self.in_hand = taken
            elif taken is not None:
                self._send(self.outgoing, taken)
        except TransferError as error:
            self._end(error)

    def read(self) -> None:
        """The next answer, or the end of the stream."""
        assert self.wire is not None
        try:
            if not self.wire.up:
                raise LinkClosed("the peer closed the link")
            self._take_in(decoded(self.wire.up.popleft()))
            self._report()
        except TransferError as error:
            self.end(error)

    def _end(self, error: TransferError) -> None:
        self.over, self.in_hand = True, None
        self._tear_down(error, self.outgoing, None)


class ExploredSender(KvSender):
    """The sender of one prefill worker. Remembers in which life each source block was handed over."""

    def __init__(self, world: World, node: Node, identity: Any, kv: Any, listener: Any) -> None:
        super().__init__(identity, kv, listener, SETTINGS, clock=lambda: world.clock.now)
        self.world, self.node = world, node
        self.sources: dict[str, list[tuple[int, int]]] = {}
        """Request -> (source block, its generation), until the transfer ends."""

    def send(self, request_id: str, blocks: Sequence[OutgoingBlock | BlockColumns], *, finish: bool = False) -> None:
        if request_id in self._requests:
            singles = [b for some in blocks for b in (some.singly() if isinstance(some, BlockColumns) else [some])]
            generation = self.node.blocks.generation
            handed = [(b.source_block, generation(b.source_block)) for b in singles]
            self.sources.setdefault(request_id, []).extend(handed)
        super().send(request_id, blocks, finish=finish)

    def reading(self) -> list[tuple[str, int, int]]:
        """Source blocks that some link may be reading, or will."""
        self.sources = {key: blocks for key, blocks in self.sources.items() if key in self._requests}
        return [(key, block, generation) for key, blocks in self.sources.items() for block, generation in blocks]


class ExploredReceiver(KvReceiver):
    """The receiver of one decode worker, on no socket."""

    def __init__(self, world: World, identity: Any, kv: Any, table: Any, listener: Any) -> None:
        super().__init__(identity, kv, table, listener, settings=SETTINGS, clock=lambda: world.clock.now)

    def start(self) -> None:
        self._endpoint = LinkEndpoint(host_id=bytes(16), unix_name=None, host="h", port=1, transports=("shm", "tcp"))

    def stop(self) -> None:
        for sock in (self._wake_accepter, self._accepter_woken):
            sock.close()


class ReceiverEnd:
    """The thread of one link of a decode worker. The grants of a write are held over several steps."""

    def __init__(self, peer: SenderEnd, node: Node, hello: Hello, protocol: int) -> None:
        assert peer.wire is not None
        self.peer, self.node, self.world = peer, node, peer.world
        self.wire = peer.wire
        self.actor = Actor(f"link{peer.number}.d")
        connection = Connection(self.world, self.wire, self.wire.up, self.wire.down)
        self._end = ReceiverLink(node.receiver, cast(Any, connection))
        node.receiver._links[self._end] = None
        self._link = IncomingLink(cast(FrameSocket, connection), self, protocol, hello)
        self.transport = hello.transport
        self.window: PeerWindow | None = None
        if hello.transport == ADOPT:
            assert node.kv.windows is not None
            self.window = node.kv.windows.open(peer.node.kv.fd or 0, hello.num_blocks)
        self.taken: Sent | None = None
        self.writing: tuple[Blocks, WriteGrant, Mapping[int, TransferError]] | None = None
        self.copied = False
        self._intact: list[bool] = []
        self._error: TransferError | None = None
        self.over = False

    @property
    def slots(self) -> list[tuple[int, int]]:
        """(slot, generation) of all that it is writing."""
        if self.writing is None:
            return []
        frame, _, refused = self.writing
        return [(entry.slot, entry.generation) for i, entry in enumerate(frame.entries) if i not in refused]

    def receive(self) -> None:
        """Take the next frame; if it brings blocks, stop when it is known which of them may be written."""
        try:
            if not self.wire.down:
                raise LinkClosed("the peer closed the link")
            self.taken = self.wire.down.popleft()
            frame = decoded(self.taken)
            if isinstance(frame, Block):
                frame = frame.grouped()
            if isinstance(frame, Copies):
                frame = blocks_of(frame)
            if isinstance(frame, Blocks):
                self._end._check(self._link, frame)
                self.writing = frame, *self._end._begin_write(frame)
                self.copied, self._intact = False, [False] * len(self.writing[1].slots)
                return
            self._end._dispatch(self._link, frame)
            self._flush()
        except TransferError as error:
            self._tear_down(error)

    def copy(self) -> None:
        assert self.writing is not None
        try:
            self._intact = self._end._copy(self._link, *self.writing)
        except TransferError as error:
            self._error = error
        self.copied = True

    def finish(self) -> None:
        assert self.writing is not None
        frame, grant, refused = self.writing
        entries = {entry.ordinal: entry for i, entry in enumerate(frame.entries) if i not in refused}
        try:
            outcomes = self._end._end_write(grant, self._intact)
            self.writing = None
            if self._error is not None:
                raise self._error
            for ordinal, outcome in zip(grant.ordinals, outcomes, strict=True):
                if outcome is WriteOutcome.ADOPTED:
                    check_adopted(self.node, entries[ordinal])
            self._end._conclude(self._link, frame, grant, outcomes, refused)
            self._flush()
        except TransferError as error:
            self._tear_down(error)

    def _flush(self) -> None:
        if self._end._acks and not self._link.connection.has_frame():
            self._end._send_acks(self._link)

    def _tear_down(self, error: TransferError) -> None:
        self.over = True
        self._end._tear_down(error, self._link)

    # From here on: the link's `Intake`.

    def check(self, frame: Blocks) -> str | None:
        return None

    def receive_into(self, frame: Blocks, slots: Sequence[memoryview | None]) -> list[bytes]:
        assert self.taken is not None
        written = []
        for i, (slot, entry) in enumerate(zip(slots, frame.entries, strict=True)):
            if slot is None:
                continue
            if self.transport in MAPPING:
                assert entry.offset is not None
                slot[:] = self.peer.node.kv.block(entry.offset // len(slot))
            elif self.wire.torn:
                slot[: len(slot) // 2] = self.taken.payloads[i][: len(slot) // 2]
                raise LinkClosed("the wire is torn")
            else:
                slot[:] = self.taken.payloads[i]
            if self.taken.flipped:
                slot[0] ^= 1
            written.append(slot)
        return self.node.receiver.copier.digests(written)

    def close(self) -> None:
        if self.window is not None:
            self.window.retire()


def decoded(sent: Sent) -> Frame:
    return decode(sent.encoded[LENGTH_BYTES:])
