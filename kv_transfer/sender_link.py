"""One link of a prefill worker: its two threads, and who of them and of those that hand over blocks writes to it.

The writer connects, then does what `OutgoingTransfers` says, deadlines and lease renewals included, and alone reads
source blocks. The reader takes in the answers. Either may report the end of a transfer, once nobody has any of its
blocks in hand; when a link ends, the writer reports all that is left.

Whoever hands over blocks writes their frames itself if nothing else is being written, and nothing must be read or
waited for: over shared memory a group is one short frame, and to wake a thread for it takes longer than to copy many
blocks. A frame that does not fit into the socket's buffer is the writer's to end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import (
    DeadlineExceeded,
    DigestMismatch,
    HandshakeRefused,
    LinkClosed,
    ProtocolError,
    TransferError,
)
from engine.kv_layout import compatible
from kv_transfer.block_sources import BlockSources
from kv_transfer.digest import UNVERIFIED
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import GROUPS_PROTOCOL_VERSION, Ack, BlockEntry, Blocks, Frame, Nack, Release, Renew, encode
from kv_transfer.identity import LinkEndpoint, LinkTarget
from kv_transfer.link import OutgoingLink, connect
from kv_transfer.outgoing import SendBlocks, SendColumns, Step
from kv_transfer.sender_listener import error_of
from kv_transfer.source_digests import SourceDigests
from kv_transfer.transfers import OutgoingTransfers

if TYPE_CHECKING:
    from kv_transfer.sender import KvSender

_MAX_STEPS_OF_A_CALLER = 4
"""That one call writes at most; the writer does what is left."""


class SenderLink:
    """One link and its two threads."""

    def __init__(self, sender: KvSender, target: LinkTarget) -> None:
        self._sender = sender
        self._settings = sender._settings
        self.target = target
        self._layout = target.layout or sender._kv.layout
        """Of the blocks that leave."""
        self._sources = BlockSources(sender._kv, self._layout, self._settings.max_unacked_bytes)
        own = SourceDigests(sender._copier, sender._kv.num_blocks) if self._sources.converts else None
        self._digests = own or sender._digests
        self.transfers = OutgoingTransfers(self._layout.block_bytes, sender._settings, self._digests)
        self.changed = threading.Condition(sender._lock)
        self._connection: FrameSocket | None = None
        self._error: TransferError | None = None
        """Why the link ends; the first reason counts."""
        self._link: OutgoingLink | None = None
        """Once connected."""
        self._writer_writes = False
        self._caller_writes = False
        """Never both."""
        self._unsent = b""
        """The end of a frame that a caller could not write without waiting: before anything else."""
        self._wake_at: float | None = None
        """When the writer will look again."""
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
            self._sources.memory,
        )
        sender._counters.add("links_connected", link.outlet.transport)
        sender._counters.add("fallbacks", n=int(link.fell_back))
        self._sources.open(self.transfers.group_blocks)
        with self.changed:
            self.transfers.transport = link.outlet.transport
            self.transfers.columns = link.columns and not self._reads(link)
            self._link = link
        return link

    def _opened(self, connection: FrameSocket) -> None:
        with self.changed:
            self._connection = connection
            ending = self.ending
        if ending:
            connection.shut_down()

    def take_step(self) -> Step | None:
        """With the lock held, after the transfers have changed: what the caller shall give to `write_steps` when it has
        let go of the lock. None: there is nothing, or the writer does it."""
        link = self._link
        busy = self._writer_writes or self._caller_writes or self._unsent or self._error is not None
        if busy or link is None or self._reads(link) or not self.transfers.is_light():
            self.changed.notify()
            return None
        try:
            step = self.transfers.next_step(self._sender._clock())
        except TransferError as error:
            self._error = error
            self.changed.notify()
            return None
        self._caller_writes = step is not None
        if step is None:
            self._tell_writer()
        return step

    def _tell_writer(self) -> None:
        """With the lock held: it need not look if nothing is to be reported, or is due before it looks anyhow."""
        wake = self.transfers.next_wake()
        sooner = wake is not None and (self._wake_at is None or wake < self._wake_at)
        if sooner or self.transfers.has_outcomes():
            self.changed.notify()

    def write_steps(self, step: Step | None) -> None:
        """On the thread of a caller. Never waits, and raises nothing: a broken link is the writer's business."""
        for left in reversed(range(_MAX_STEPS_OF_A_CALLER)):
            if step is not None:
                step = self._write_step(step, last=not left)

    def _write_step(self, step: Step, *, last: bool) -> Step | None:
        """Returns the next one, if there is one and this was not the last for this caller."""
        link, error, rest = self._link, None, b""
        assert link is not None, "taken before there was a link"
        try:
            encoded = b"".join(self._encoded(link, step))
            rest = encoded[link.connection.send_now(encoded) :]
        except TransferError as failure:
            error = failure
        finally:
            with self.changed:
                self._caller_writes = False
                self._unsent = rest
                self._note_sent(step)
        if error is not None:
            self.end(error)
            return None
        with self.changed:
            if not last:
                return self.take_step()
            self.changed.notify()
            return None

    def _send_until_ended(self, link: OutgoingLink) -> None:
        while True:
            with self.changed:
                self._writer_writes = False
                unsent, step = self._next_step()
            self._report()
            if unsent:
                link.connection.send(unsent)
            if step is not None:
                self._send(link, step)
                with self.changed:
                    self._note_sent(step)

    def _next_step(self) -> tuple[bytes, Step | None]:
        """Wait for something to send, or (nothing) to report. Raises what ended the link."""
        while True:
            if self._error is not None:
                raise self._error
            now = self._sender._clock()
            if not self._caller_writes:
                unsent, self._unsent = self._unsent, b""
                step = None if unsent else self.transfers.next_step(now)
                if unsent or step is not None or self.transfers.has_outcomes():
                    self._writer_writes = True
                    return unsent, step
            self._wake_at = self.transfers.next_wake()
            self.changed.wait(None if self._wake_at is None else max(0.0, self._wake_at - now))

    def _send(self, link: OutgoingLink, step: Step) -> None:
        """On the writer. Waits."""
        if isinstance(step, SendBlocks) and self._reads(link):
            self._send_payload(link, step)
        else:
            for frame in self._encoded(link, step):
                link.outlet.send(frame, (), ())

    def _reads(self, link: OutgoingLink) -> bool:
        """Whether blocks that leave over it have to be read, whatever is known of them."""
        return self._sources.wanted(link.outlet.transport)

    def _send_payload(self, link: OutgoingLink, step: SendBlocks) -> None:
        blocks = [block.source_block for block in step.blocks]
        if link.outlet.reads_pool:
            sources: list[memoryview] = []
            frames = self._frames(link, step, [UNVERIFIED] * len(blocks), blocks)
        else:
            sources, places = self._sources.get(step.blocks)
            digests = self._digests.kept(step.blocks) or self._take_digests(step, sources)
            frames = self._frames(link, step, digests, places)
        if len(frames) == 1:
            link.outlet.send(frames[0], sources, blocks)
        else:
            for n, frame in enumerate(frames):
                link.outlet.send(frame, sources[n : n + 1], blocks[n : n + 1])

    def _encoded(self, link: OutgoingLink, step: Step) -> list[bytes]:
        """All that a step sends, but for payloads."""
        if isinstance(step, SendBlocks):
            digests = self._digests.kept(step.blocks)
            digests = digests or self._take_digests(step, self._sources.get(step.blocks)[0])
            return self._frames(link, step, digests, [block.source_block for block in step.blocks])
        if isinstance(step, Renew):
            self._sender._counters.add("renewals")
        return [encode(step.frame if isinstance(step, SendColumns) else step)]

    def _note_sent(self, step: Step) -> None:
        """With the lock held."""
        if isinstance(step, (SendBlocks, SendColumns)):
            self.transfers.sent(step)

    def _frames(
        self, link: OutgoingLink, step: SendBlocks, digests: Sequence[bytes], found: Sequence[int]
    ) -> list[bytes]:
        """`found`: the place of each block in what a peer on this host maps."""
        offset = link.outlet.offset
        entries = tuple(
            BlockEntry(block.ordinal, *place, block.hash, digest, offset(source))
            for block, place, digest, source in zip(step.blocks, step.places, digests, found, strict=True)
        )
        length = self._layout.block_bytes
        frame = Blocks(ticket_id=step.ticket_id, incarnation=step.incarnation, entries=entries, length=length)
        if link.protocol >= GROUPS_PROTOCOL_VERSION:
            return [encode(frame)]
        return [encode(block) for block in frame.singly()]

    def _take_digests(self, step: SendBlocks, sources: Sequence[memoryview]) -> list[bytes]:
        return self._digests.take(((block.source_block, block.generation) for block in step.blocks), sources)

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
                with self.changed:
                    block = self.transfers.sent_block(ticket_id, ordinal)
                    mattered = self.transfers.nacked(ticket_id, ordinal, error_of(frame), now)
                    counters.add("answers_ignored", n=int(not mattered))
                    self.changed.notify()
                if block is not None and frame.error == DigestMismatch.__name__:
                    self._sender._listener.block_doubted(block)
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
            while self._caller_writes:  # which never waits
                self.changed.wait(self._settings.progress_timeout_s)
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
        self._sources.close()
        self._report()
        with self.changed:
            self._sender._threads.discard(self)
