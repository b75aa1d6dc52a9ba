"""The decode worker's side: accepts links, and lets into the pool exactly the blocks that open tickets ask for.

One thread accepts connections, and one more for each link (`receiver_link`) does all the rest.
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
from collections.abc import Callable

from engine.errors import ConfigError, DeadlineExceeded, LinkClosed
from kv_transfer.digest import BlockCopier, PythonBlockCopier
from kv_transfer.handshake import RefusalCode
from kv_transfer.identity import LinkEndpoint, PeerIdentity, host_id, possible_transports
from kv_transfer.link import LinkSettings, import_groups, keep_alive
from kv_transfer.pool import KvPool
from kv_transfer.receiver_link import ReceiverLink, ReceiverListener
from kv_transfer.reservation import ReservationTable
from kv_transfer.stats import Counters, ReceiverStats, TransferStats

__all__ = ["KvReceiver", "ReceiverListener"]

_REMEMBERED_TRANSFERS = 1024
_NO_DESCRIPTOR_PAUSE_S = 0.1
_ROOM_WAIT_S = 1.0
"""For the thread of a connection that makes room. It is awake at once; later ones wait in the backlog."""
_BACKLOG = 128


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
        copier: BlockCopier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` for a `host` that peers could not connect to."""
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"host must be the address by which prefill workers reach this one, got {host!r}")
        self.identity = identity
        self.kv = kv
        self.table = table
        self.listener = listener
        self.copier = copier or PythonBlockCopier()
        self.settings = settings or LinkSettings()
        self.clock = clock
        self.counters = Counters()
        self._host = host
        self._sockets: list[socket.socket] = []
        self._endpoint: LinkEndpoint | None = None
        self._wake_accepter, self._accepter_woken = socket.socketpair()
        self._accepter = threading.Thread(target=self._accept_all, name="kv-accept", daemon=True)
        self._lock = threading.Lock()
        self._link_gone = threading.Condition(self._lock)
        self._links: dict[ReceiverLink, None] = {}
        """In the order in which they came."""
        self._closing = threading.Event()
        self._transfers: OrderedDict[str, TransferStats] = OrderedDict()

    def start(self) -> None:
        """Listen. Raises `OSError` if `host` cannot be bound, `ConfigError` if there is no transport to offer; nothing
        stays open then."""
        unix_name = None
        import_groups(self.settings)
        transports = possible_transports(self.settings.transports, self.kv.device, self.kv.windows is not None)
        if not transports:
            raise ConfigError(
                f"none of the transports {', '.join(self.settings.transports)} is possible: the KV pool is on "
                f"{self.kv.device}, the system is {sys.platform}"
            )
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
            transports=transports,
        )
        self._accepter.start()

    def endpoint(self) -> bytes:
        """What a sender needs to reach this receiver, encoded."""
        if self._endpoint is None:
            raise LinkClosed("the receiver was not started")
        return self._endpoint.encode()

    def refusals(self) -> dict[str, int]:
        """Links refused so far, by reason, but for those whose peer was only sent on to another transport."""
        refused = self.counters.by_label("links_refused")
        return {reason: n for reason, n in refused.items() if reason != RefusalCode.TRANSPORT}

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
            reason = self._why_no_room()
            if reason is None:
                link = ReceiverLink(self, sock)
                self._links[link] = None
                link.thread.start()
        if reason is not None:
            self.counters.add("links_refused", reason)
            sock.close()

    def _why_no_room(self) -> str | None:
        """For one more link; with the lock held. Connections whose handshake is not over make room, the oldest first: a
        crowd of strangers keeps no peer out."""
        most = self.settings.max_links
        if len(self._links) >= most and (stranger := next((link for link in self._links if link.is_stranger), None)):
            stranger.end()
            self._link_gone.wait_for(lambda: len(self._links) < most, _ROOM_WAIT_S)
        if self._closing.is_set():
            return "closed"
        return "busy" if len(self._links) >= most else None

    def link_ended(self, link: ReceiverLink) -> None:
        with self._lock:
            self._links.pop(link, None)
            self._link_gone.notify()

    def note_adoption(self, ticket_id: str, since: float, blocks: int, num_bytes: int, transport: str) -> None:
        """Blocks were adopted; the first of their ticket began at `since`."""
        now = self.clock()
        with self._lock:
            before = self._transfers.get(ticket_id)
            self._transfers[ticket_id] = TransferStats(
                blocks=blocks + (before.blocks if before else 0),
                bytes=num_bytes + (before.bytes if before else 0),
                transport=transport,
                seconds=now - since,
            )
            if len(self._transfers) > _REMEMBERED_TRANSFERS:
                self._transfers.popitem(last=False)
