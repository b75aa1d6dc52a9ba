"""The prefill worker's side: opens links to decode workers and sends blocks while prefill computes them.

A link has two threads. The writer connects, then does what `OutgoingTransfers` says, deadlines and lease renewals
included, and alone reads source blocks. The reader takes in the answers. Either may report the end of a transfer, once
the writer has none of its blocks in hand; when a link ends, the writer reports all that is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from engine.block_hash import HASH_BYTES
from engine.errors import (
    DeadlineExceeded,
    DigestMismatch,
    HandshakeRefused,
    InternalError,
    LinkClosed,
    ProtocolError,
    TransferError,
)
from engine.kv_layout import compatible
from kv_transfer.conversion import Staging
from kv_transfer.digest import BlockCopier, PythonBlockCopier
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import GROUPS_PROTOCOL_VERSION, Ack, BlockEntry, Blocks, Frame, Nack, Release, Renew, encode
from kv_transfer.identity import MAPPING, LinkEndpoint, LinkTarget, PeerIdentity
from kv_transfer.link import LinkSettings, OutgoingLink, connect, import_groups
from kv_transfer.pool import KvPool
from kv_transfer.sender_listener import SenderListener, error_of
from kv_transfer.source_digests import SourceDigests
from kv_transfer.stats import Counters, SenderStats, TransferStats
from kv_transfer.transfers import OutgoingBlock, OutgoingTransfers, SendBlocks, TicketInfo

__all__ = ["KvSender", "OutgoingBlock", "SenderListener", "TicketInfo", "TransferStats"]

MAX_PREWARMED = 64
"""Links beyond which none is opened before it is needed: each has two threads."""


class KvSender:
    """All links of one prefill worker. Every method may be called from any thread; only `close` waits."""

    def __init__(
        self,
        identity: PeerIdentity,
        kv: KvPool,
        listener: SenderListener,
        settings: LinkSettings | None = None,
        *,
        copier: BlockCopier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._kv = kv
        self._listener = listener
        self._copier = copier or PythonBlockCopier()
        self._digests = SourceDigests(self._copier)
        self._settings = settings or LinkSettings()
        import_groups(self._settings)
        self._clock = clock
        self._counters = Counters()
        self._lock = threading.Lock()
        """Guards everything below, and the transfers of every link."""
        self._links: dict[LinkTarget, _SenderLink] = {}
        self._threads: set[_SenderLink] = set()
        """Links whose threads may still run; those in `_links` and the ones that are ending."""
        self._requests: dict[str, _SenderLink] = {}
        self._closed = False

    def open(self, request_id: str, ticket: TicketInfo, deadline: float) -> None:
        """Begin a transfer that must end by `deadline` (monotonic). From now on the ticket's lease is renewed.

        The link is opened in the background if there is none; if that fails, so does the transfer. Raises
        `InternalError` if the request has an open transfer, `LinkClosed` if the sender is closed; nothing begins then.
        """
        target = LinkTarget(ticket.worker_id, ticket.incarnation, ticket.endpoint, ticket.layout)
        with self._lock:
            if request_id in self._requests:
                raise InternalError(f"request {request_id} has an open transfer already")
            link = self._link(target)
            link.transfers.open(request_id, ticket, deadline, self._clock())
            self._requests[request_id] = link
            self._start(link)
            link.changed.notify()

    def prewarm(self, target: LinkTarget) -> None:
        """Open the link that the first transfer to `target` would open, in the background; whether it opens is that
        transfer's business. At most `MAX_PREWARMED` links are open for that reason.

        Raises `LinkClosed` if the sender is closed.
        """
        with self._lock:
            link = self._link(target)
            if len(self._threads) < MAX_PREWARMED:
                self._start(link)

    def _link(self, target: LinkTarget) -> _SenderLink:
        """With the lock held: the link to `target`, or a new one. Raises `LinkClosed` if the sender is closed."""
        if self._closed:
            raise LinkClosed("the sender is closed")
        link = self._links.get(target)
        return _SenderLink(self, target) if link is None or link.ending else link

    def _start(self, link: _SenderLink) -> None:
        """With the lock held. Does nothing for a link that is started."""
        if link not in self._threads:
            self._links[link.target] = link
            self._threads.add(link)
            link.start()

    def send(self, request_id: str, blocks: Sequence[OutgoingBlock]) -> None:
        """Queue completed blocks. Those that the ticket does not ask for, or has been given, are skipped.

        The source blocks must stay as they are until the transfer ends. Ignored if the transfer has ended. Raises
        `InternalError`, and queues none, if one is no block of the pool or its hash has not 32 bytes.
        """
        most = self._kv.num_blocks
        for block in blocks:
            inside = 0 <= block.source_block < most and all(0 <= n < most for n in block.more_blocks)
            if not inside or len(block.hash) != HASH_BYTES:
                raise InternalError(f"{block} is no block of this pool of {most}")
        with self._lock:
            if (link := self._requests.get(request_id)) is not None:
                link.transfers.send(request_id, blocks)
                link.changed.notify()
        if link is None and (count := sum(block.lendable for block in blocks)):
            self._listener.loan_over(request_id, count)

    def finish(self, request_id: str) -> None:
        """No more blocks will come. Ignored if the transfer has ended."""
        with self._lock:
            if (link := self._requests.get(request_id)) is not None:
                link.transfers.finish(request_id)
                link.changed.notify()

    def abort(self, request_id: str) -> None:
        """End a transfer; `transfer_failed(RequestCancelled)` follows. Ignored if it has ended."""
        with self._lock:
            if (link := self._requests.get(request_id)) is not None:
                link.transfers.abort(request_id)
                link.changed.notify()

    def stats(self) -> SenderStats:
        with self._lock:
            links_open, transfers_open = len(self._threads), len(self._requests)
        counters = self._counters
        return SenderStats(
            links_open=links_open,
            links_connected=counters.by_label("links_connected"),
            links_lost=counters.by_label("links_lost"),
            fallbacks=counters.total("fallbacks"),
            transfers_open=transfers_open,
            transfers_done=counters.total("transfers_done"),
            transfers_failed=counters.by_label("transfers_failed"),
            blocks_acked=counters.total("blocks_acked"),
            bytes_acked=counters.total("bytes_acked"),
            renewals=counters.total("renewals"),
            answers_ignored=counters.total("answers_ignored"),
        )

    def check_integrity(self) -> None:
        with self._lock:
            assert sum(len(link.transfers) for link in self._threads) == len(self._requests), "a transfer has no link"
            assert set(self._links.values()) <= self._threads

    def close(self, timeout_s: float) -> None:
        """End all links and, with `LinkClosed`, their transfers; they are reported before this returns.

        Raises `DeadlineExceeded` if a link thread is still running after `timeout_s`: then source blocks may be read.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            links = list(self._threads)
        for link in links:
            link.end(LinkClosed("the sender is closed"))
        for link in links:
            link.join(deadline)


class _SenderLink:
    """One link and its two threads."""

    def __init__(self, sender: KvSender, target: LinkTarget) -> None:
        self._sender = sender
        self._settings = sender._settings
        self.target = target
        self._layout = target.layout or sender._kv.layout
        """Of the blocks that leave."""
        self._converts = self._layout != sender._kv.layout
        self._digests = SourceDigests(sender._copier) if self._converts else sender._digests
        self.transfers = OutgoingTransfers(self._layout.block_bytes, sender._settings, self._digests.is_kept)
        self._staging: Staging | None = None
        """If ours are of another one."""
        self.changed = threading.Condition(sender._lock)
        self._connection: FrameSocket | None = None
        self._error: TransferError | None = None
        """Why the link ends; the first reason counts."""
        self._writer = threading.Thread(target=self._write, name=f"kv-send-{target.worker_id}", daemon=True)

    @property
    def ending(self) -> bool:
        return self._error is not None

    def start(self) -> None:
        self._writer.start()

    def end(self, error: TransferError) -> None:
        """Wake both threads up, and let them stop."""
        with self.changed:
            self._error = self._error or error
            connection = self._connection
            self.changed.notify()
        if connection is not None:
            connection.shut_down()

    def join(self, deadline: float) -> None:
        self._writer.join(max(0.0, deadline - time.monotonic()))
        if self._writer.is_alive():
            raise DeadlineExceeded(f"thread {self._writer.name} is still running")

    def _write(self) -> None:
        error: TransferError = LinkClosed("the link's thread ended by a fault")
        reader: threading.Thread | None = None
        link: OutgoingLink | None = None
        try:
            link = self._connect()
            name = f"{self._writer.name}-answers"
            reader = threading.Thread(target=self._read, args=(link.connection,), name=name, daemon=True)
            reader.start()
            self._send_until_ended(link)
        except TransferError as failure:
            error = failure
        finally:
            self._tear_down(error, link, reader)

    def _connect(self) -> OutgoingLink:
        sender = self._sender
        target = self.target
        if (reason := compatible(sender._kv.layout, self._layout)) is not None:
            raise HandshakeRefused(f"{target.worker_id} asks for blocks that we cannot make: {reason}")
        link = connect(
            sender._identity,
            (target.worker_id, target.incarnation),
            LinkEndpoint.decode(target.endpoint),
            sender._kv,
            self._settings,
            self._opened,
        )
        sender._counters.add("links_connected", link.outlet.transport)
        sender._counters.add("fallbacks", n=int(link.fell_back))
        with self.changed:
            self.transfers.transport = link.outlet.transport
        if self._converts:
            self._staging = Staging(sender._kv.layout, self._layout, self.transfers.group_blocks)
        return link

    def _opened(self, connection: FrameSocket) -> None:
        with self.changed:
            self._connection = connection
            ending = self.ending
        if ending:
            connection.shut_down()

    def _send_until_ended(self, link: OutgoingLink) -> None:
        while True:
            with self.changed:
                step = self._next_step()
            self._report()
            if isinstance(step, SendBlocks):
                self._send_blocks(link, step)
            elif step is not None:
                if isinstance(step, Renew):
                    self._sender._counters.add("renewals")
                link.connection.send(encode(step))

    def _next_step(self) -> SendBlocks | Frame | None:
        """Wait for something to send, or (None) to report. Raises what ended the link."""
        while True:
            if self._error is not None:
                raise self._error
            now = self._sender._clock()
            step = self.transfers.next_step(now)
            if step is not None or self.transfers.has_outcomes():
                return step
            wake = self.transfers.next_wake()
            self.changed.wait(None if wake is None else max(0.0, wake - now))

    def _send_blocks(self, link: OutgoingLink, step: SendBlocks) -> None:
        if step.lend:
            link.connection.send(encode(step.loan()))
        else:
            self._send_copies(link, step)
        with self.changed:
            self.transfers.sent(step)

    def _send_copies(self, link: OutgoingLink, step: SendBlocks) -> None:
        digests = self._digests.kept(step.blocks)
        sources: list[memoryview] = []
        if digests is None or link.outlet.transport not in MAPPING:
            sources = [self._source(place, block) for place, block in enumerate(step.blocks)]
        digests = digests or self._digests.take(step.blocks, sources)
        offset = link.outlet.offset
        entries = tuple(
            BlockEntry(block.ordinal, *place, block.hash, digest, offset(block.source_block))
            for block, place, digest in zip(step.blocks, step.places, digests, strict=True)
        )
        length = self._layout.block_bytes
        frame = Blocks(ticket_id=step.ticket_id, incarnation=step.incarnation, entries=entries, length=length)
        if link.protocol >= GROUPS_PROTOCOL_VERSION:
            link.outlet.send(encode(frame), sources)
        else:
            for n, block in enumerate(frame.singly()):
                link.outlet.send(encode(block), sources[n : n + 1])

    def _source(self, place: int, block: OutgoingBlock) -> memoryview:
        kv = self._sender._kv
        if self._staging is None:
            return kv.block(block.source_block)
        sources = [kv.block(source) for source in (block.source_block, *block.more_blocks)]
        return self._staging.put(place, block.ordinal, sources)

    def _read(self, connection: FrameSocket) -> None:
        error: TransferError = LinkClosed("the reader ended by a fault")
        try:
            while True:
                frame = connection.receive()
                if frame is not None:
                    self._take_in(frame)
                    self._report()
        except TransferError as failure:
            error = failure
        finally:
            self.end(error)

    def _take_in(self, frame: Frame) -> None:
        now = self._sender._clock()
        counters = self._sender._counters
        match frame:
            case Ack(ticket_id=ticket_id, ordinals=ordinals):
                with self.changed:
                    ignored = self.transfers.acked(ticket_id, ordinals, now)
                    counters.add("blocks_acked", n=len(ordinals) - ignored)
                    counters.add("bytes_acked", n=(len(ordinals) - ignored) * self._layout.block_bytes)
                    counters.add("answers_ignored", n=ignored)
                    self.changed.notify()
            case Release():
                with self.changed:
                    self.transfers.loans.released(frame, now)
                    self.changed.notify()
            case Nack(ticket_id=ticket_id, ordinal=ordinal):
                if frame.error == DigestMismatch.__name__:
                    self._digests.forget()
                with self.changed:
                    mattered = self.transfers.nacked(ticket_id, ordinal, error_of(frame), now)
                    counters.add("answers_ignored", n=int(not mattered))
                    self.changed.notify()
            case _:
                raise ProtocolError(f"a receiver sends no {type(frame).__name__}")

    def _report(self) -> None:
        """Tell the listener, without the lock, of the transfers that ended."""
        sender = self._sender
        while True:
            with self.changed:
                over = self.transfers.loans.take_over()
                outcome = self.transfers.take_outcome()
                if outcome is not None:
                    del sender._requests[outcome.request_id]
            for request_id, count in over:
                sender._listener.loan_over(request_id, count)
            if outcome is None:
                return
            if outcome.error is None:
                sender._counters.add("transfers_done")
                sender._listener.transfer_done(outcome.request_id, outcome.stats)
            else:
                sender._counters.add("transfers_failed", type(outcome.error).__name__)
                sender._listener.transfer_failed(outcome.request_id, outcome.error)

    def _tear_down(self, error: TransferError, link: OutgoingLink | None, reader: threading.Thread | None) -> None:
        """On the writer, last: nobody reads a source block any more."""
        with self.changed:
            self._error = error = self._error or error
            if self._sender._links.get(self.target) is self:
                del self._sender._links[self.target]  # the next transfer opens a new link
            self.transfers.fail_all(error)
        self._sender._counters.add("links_lost", type(error).__name__)
        if link is not None:
            link.connection.shut_down()
            if reader is not None:
                reader.join(self._settings.progress_timeout_s)  # it is out of `receive` at once
            link.connection.close()
            link.outlet.close()
        self._report()
        with self.changed:
            self._sender._threads.discard(self)
