"""The decode worker's side: accepts links, and lets into the pool exactly the blocks that open tickets ask for.

One thread accepts connections, and one more for each link does all the rest: the handshake, checking, copying,
adopting, answering. What may be written where is `ReservationTable`'s to say; the engine hears from the listener.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

from engine.errors import (
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    LinkClosed,
    ProtocolError,
    StaleTicket,
    TransferError,
)
from kv_transfer.digest import digest
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Abort, Ack, Block, Finish, Frame, Nack, Renew, clipped, encode
from kv_transfer.identity import SHM, TCP, LinkEndpoint, PeerIdentity, host_id
from kv_transfer.link import IncomingLink, LinkSettings, Refusal, accept, keep_alive
from kv_transfer.pool import KvPool
from kv_transfer.reservation import DuplicateBlock, ReservationTable, WriteGrant, WriteOutcome
from kv_transfer.stats import Counters, ReceiverStats, TransferStats

MAX_UNSENT_ACKS = 16
"""Adopted blocks that one ACK may wait for while more frames are at hand."""
_REMEMBERED_TRANSFERS = 1024
_NO_DESCRIPTOR_PAUSE_S = 0.1
_BACKLOG = 128


class ReceiverListener(Protocol):
    """Called on link threads, in the order in which things happen to a ticket. Must not wait for the receiver."""

    def block_adopted(self, ticket_id: str, ordinal: int, num_bytes: int, transport: str) -> None:
        """The block is complete and verified in its slot; called once for each."""
        ...

    def block_refused(self, ticket_id: str, ordinal: int, error: TransferError) -> None:
        """A block of an open ticket was not what was agreed; its sender gives the transfer up."""
        ...

    def writes_quiet(self, ticket_id: str, slots: Collection[int]) -> None:
        """Slots that were still being written when their ticket ended are quiet now."""
        ...

    def link_lost(self, ticket_ids: Collection[str], error: TransferError) -> None:
        """These open, incomplete tickets will get no more blocks from their sender: it is gone, or gave them up."""
        ...


class KvReceiver:
    """Accepts links on an abstract Unix socket (Linux) and on a TCP port of `host`."""

    def __init__(
        self,
        identity: PeerIdentity,
        kv: KvPool,
        table: ReservationTable,
        listener: ReceiverListener,
        host: str = "127.0.0.1",
        *,
        settings: LinkSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` for a `host` that peers could not connect to."""
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"host must be the address by which prefill workers reach this one, got {host!r}")
        self.identity = identity
        self.kv = kv
        self.table = table
        self.listener = listener
        self.settings = settings or LinkSettings()
        self.clock = clock
        self.counters = Counters()
        self._host = host
        self._sockets: list[socket.socket] = []
        self._endpoint: LinkEndpoint | None = None
        self._wake_accepter, self._accepter_woken = socket.socketpair()
        self._accepter = threading.Thread(target=self._accept_all, name="kv-accept", daemon=True)
        self._lock = threading.Lock()
        self._links: set[_ReceiverLink] = set()
        self._closing = threading.Event()
        self._transfers: OrderedDict[str, TransferStats] = OrderedDict()

    def start(self) -> None:
        """Listen. Raises `OSError` if `host` cannot be bound; nothing stays open then."""
        unix_name = None
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            tcp = socket.create_server((self._host, 0), family=family, backlog=_BACKLOG)
            self._sockets.append(tcp)
            if sys.platform == "linux":
                unix_name = b"\0kvrelay-" + secrets.token_hex(16).encode()
                unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._sockets.append(unix)
                unix.bind(unix_name)
                unix.listen(_BACKLOG)
        except OSError:
            self._close_sockets()
            raise
        self._endpoint = LinkEndpoint(
            host_id=host_id(),
            unix_name=unix_name,
            host=self._host,
            port=tcp.getsockname()[1],
            transports=(TCP,) if unix_name is None else (SHM, TCP),
        )
        self._accepter.start()

    def endpoint(self) -> bytes:
        """What a sender needs to reach this receiver, encoded."""
        if self._endpoint is None:
            raise LinkClosed("the receiver was not started")
        return self._endpoint.encode()

    def stats(self) -> ReceiverStats:
        with self._lock:
            links_open = len(self._links)
        counters = self.counters
        return ReceiverStats(
            links_open=links_open,
            links_accepted=counters.by_label("links_accepted"),
            links_refused=counters.by_label("links_refused"),
            links_lost=counters.by_label("links_lost"),
            blocks_adopted=counters.by_label("blocks_adopted"),
            bytes_adopted=counters.by_label("bytes_adopted"),
            blocks_refused=counters.by_label("blocks_refused"),
            blocks_duplicate=counters.total("blocks_duplicate"),
            blocks_late=counters.total("blocks_late"),
            frames_ignored=counters.total("frames_ignored"),
        )

    def transfer_stats(self, ticket_id: str) -> TransferStats | None:
        """What one of the last 1,024 tickets has received so far."""
        with self._lock:
            return self._transfers.get(ticket_id)

    def close(self, timeout_s: float) -> None:
        """End all links. Afterwards no thread writes into the pool.

        Raises `DeadlineExceeded` if one is still running after `timeout_s`: then the pool must be kept.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing.set()
            links = list(self._links)
        self._wake_accepter.close()
        for link in links:
            link.end()
        threads = [link.thread for link in links]
        if self._endpoint is not None:
            threads.append(self._accepter)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if still := [thread.name for thread in threads if thread.is_alive()]:
            raise DeadlineExceeded(f"threads {still} are still running")
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self._accepter_woken.close()

    def _accept_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in [*self._sockets, self._accepter_woken]:
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._accepter_woken:
                        return
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept_one(key.fileobj)

    def _accept_one(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
            if sock.family != socket.AF_UNIX:
                keep_alive(sock)
        except OSError as error:
            self.counters.add("links_refused", "accept")
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._closing.wait(_NO_DESCRIPTOR_PAUSE_S)  # the connection stays in the backlog: do not spin on it
            return
        with self._lock:
            reason = (
                "closed" if self._closing.is_set() else "busy" if len(self._links) >= self.settings.max_links else None
            )
            if reason is None:
                link = _ReceiverLink(self, sock)
                self._links.add(link)
                link.thread.start()
        if reason is not None:
            self.counters.add("links_refused", reason)
            sock.close()

    def _ended(self, link: _ReceiverLink) -> None:
        with self._lock:
            self._links.discard(link)

    def _note_adoption(self, ticket_id: str, since: float, num_bytes: int, transport: str) -> None:
        now = self.clock()
        with self._lock:
            before = self._transfers.get(ticket_id)
            self._transfers[ticket_id] = TransferStats(
                blocks=1 + (before.blocks if before else 0),
                bytes=num_bytes + (before.bytes if before else 0),
                transport=transport,
                seconds=now - since,
            )
            if len(self._transfers) > _REMEMBERED_TRANSFERS:
                self._transfers.popitem(last=False)


class _ReceiverLink:
    """One link and its thread."""

    def __init__(self, receiver: KvReceiver, sock: socket.socket) -> None:
        self._receiver = receiver
        self._connection = FrameSocket(sock, receiver.settings.handshake_timeout_s)
        self._table = receiver.table
        self._listener = receiver.listener
        self._counters = receiver.counters
        self._tickets: dict[str, float | None] = {}
        """Open tickets that this link has named -> when the first frame of a block of it came."""
        self._acks: dict[str, list[int]] = {}
        """Ticket -> adopted ordinals that the sender does not know of yet."""
        self.thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)

    def end(self) -> None:
        """From any thread: wake the link's thread up, and let it stop."""
        self._connection.shut_down()

    def _run(self) -> None:
        error: TransferError = LinkClosed("the link's thread ended by a fault")
        link: IncomingLink | None = None
        try:
            link = accept(self._connection, self._receiver.identity, self._receiver.settings)
            self._counters.add("links_accepted", link.intake.transport)
            self._serve(link)
        except TransferError as failure:
            error = failure
        finally:
            self._tear_down(error, link)

    def _serve(self, link: IncomingLink) -> None:
        while True:
            frame = link.connection.receive()
            if frame is None:
                continue  # a sender may be silent: what it owes is bounded by the leases
            self._dispatch(link, frame)
            if self._acks and (self._unsent_acks() >= MAX_UNSENT_ACKS or not link.connection.has_frame()):
                self._send_acks(link)

    def _dispatch(self, link: IncomingLink, frame: Frame) -> None:
        match frame:
            case Block():
                self._take_block(link, frame)
            case Renew():
                for ticket_id in frame.ticket_ids:
                    self._renew(link, ticket_id)
            case Finish():
                short = f"the sender finished after {frame.count} blocks, and not all have come"
                self._no_more_blocks(frame.ticket_id, ProtocolError(short))
            case Abort():
                self._no_more_blocks(frame.ticket_id, LinkClosed("the sender aborted the transfer"))
            case _:
                raise ProtocolError(f"a sender sends no {type(frame).__name__}")

    def _take_block(self, link: IncomingLink, frame: Block) -> None:
        """Check, copy, verify, adopt, answer. Only an impossible frame or a lost stream ends the link."""
        grant = self._begin_write(link, frame)
        if grant is None:
            return
        ok = False
        try:
            ok = self._copy(link, frame, grant)
        finally:
            outcome = self._end_write(frame, grant, ok)
        self._answer(link, frame, outcome)

    def _begin_write(self, link: IncomingLink, frame: Block) -> WriteGrant | None:
        """None: there is nothing to write, and the sender will be told, or was."""
        block_bytes = self._receiver.kv.layout.block_bytes
        if frame.length != block_bytes:
            raise ProtocolError(f"a block of {frame.length} bytes, the layout says {block_bytes}")
        if (fault := link.intake.check(frame)) is not None:
            raise ProtocolError(fault)
        try:
            grant = self._table.begin_write(
                frame.ticket_id, frame.incarnation, frame.ordinal, frame.slot, frame.generation, frame.hash
            )
        except DuplicateBlock:
            link.intake.discard(frame)
            self._counters.add("blocks_duplicate")
            self._acks.setdefault(frame.ticket_id, []).append(frame.ordinal)
            return None
        except TransferError as error:
            link.intake.discard(frame)
            self._refuse(link, frame, error)
            return None
        if self._tickets.get(frame.ticket_id) is None:
            self._tickets[frame.ticket_id] = self._receiver.clock()
        return grant

    def _copy(self, link: IncomingLink, frame: Block, grant: WriteGrant) -> bool:
        """Whether the slot holds what was sent. Raises what ended the stream."""
        slot = self._receiver.kv.block(grant.slot)
        link.intake.read_into(frame, slot)
        return digest(slot) == frame.digest

    def _end_write(self, frame: Block, grant: WriteGrant, ok: bool) -> WriteOutcome:
        outcome = self._table.end_write(grant, ok)
        if outcome is WriteOutcome.LATE:
            self._counters.add("blocks_late")
            self._listener.writes_quiet(frame.ticket_id, [grant.slot])
        return outcome

    def _answer(self, link: IncomingLink, frame: Block, outcome: WriteOutcome) -> None:
        match outcome:
            case WriteOutcome.ADOPTED:
                transport, first = link.intake.transport, self._tickets[frame.ticket_id]
                assert first is not None, "adopted a block that did not begin"
                self._counters.add_all(transport, {"blocks_adopted": 1, "bytes_adopted": frame.length})
                self._receiver._note_adoption(frame.ticket_id, first, frame.length, transport)
                self._listener.block_adopted(frame.ticket_id, frame.ordinal, frame.length, transport)
                self._acks.setdefault(frame.ticket_id, []).append(frame.ordinal)
            case WriteOutcome.REFUSED:
                self._refuse(link, frame, DigestMismatch(f"block {frame.ordinal} is not what was sent"))
            case WriteOutcome.LATE:
                self._refuse(link, frame, StaleTicket(f"ticket {frame.ticket_id} ended during the write"))

    def _refuse(self, link: IncomingLink, frame: Block, error: TransferError) -> None:
        self._counters.add("blocks_refused", type(error).__name__)
        self._nack(link, frame.ticket_id, frame.ordinal, error)
        self._tickets.pop(frame.ticket_id, None)
        if self._table.progress(frame.ticket_id) is not None:
            self._listener.block_refused(frame.ticket_id, frame.ordinal, error)

    def _renew(self, link: IncomingLink, ticket_id: str) -> None:
        try:
            self._table.renew(ticket_id, self._receiver.clock())
        except StaleTicket as error:
            self._tickets.pop(ticket_id, None)
            self._counters.add("frames_ignored")
            self._nack(link, ticket_id, None, error)
            return
        self._tickets.setdefault(ticket_id, None)

    def _no_more_blocks(self, ticket_id: str, error: TransferError) -> None:
        """The sender has said its last about a ticket. `error` counts if blocks are still missing."""
        if ticket_id not in self._tickets:
            self._counters.add("frames_ignored")
            return
        del self._tickets[ticket_id]
        if self._table.missing(ticket_id):
            self._listener.link_lost([ticket_id], error)

    def _nack(self, link: IncomingLink, ticket_id: str, ordinal: int | None, error: TransferError) -> None:
        self._send_acks(link)  # a refusal must not overtake what was adopted before it
        nack = Nack(ticket_id=ticket_id, ordinal=ordinal, error=type(error).__name__, message=clipped(str(error)))
        link.connection.send(encode(nack))

    def _unsent_acks(self) -> int:
        return sum(map(len, self._acks.values()))

    def _send_acks(self, link: IncomingLink) -> None:
        acks, self._acks = self._acks, {}
        if acks:
            encoded = [encode(Ack(ticket_id=ticket, ordinals=tuple(ordinals))) for ticket, ordinals in acks.items()]
            link.connection.send(b"".join(encoded))

    def _tear_down(self, error: TransferError, link: IncomingLink | None) -> None:
        if link is None:
            reason = error.code if isinstance(error, Refusal) else type(error).__name__
            self._counters.add("links_refused", reason)
        else:
            self._counters.add("links_lost", type(error).__name__)
            link.intake.close()
        self._connection.close()
        lost = [ticket_id for ticket_id in self._tickets if self._table.missing(ticket_id)]
        if lost:
            self._listener.link_lost(lost, error)
        self._receiver._ended(self)
