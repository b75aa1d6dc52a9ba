"""The prefill worker's side: opens links to decode workers and sends blocks while prefill computes them.

What a link does, and on which thread, is in `kv_transfer.sender_link`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.block_hash import HASH_BYTES
from engine.errors import InternalError, LinkClosed
from kv_transfer.digest import BlockCopier, PythonBlockCopier
from kv_transfer.identity import LinkTarget, PeerIdentity
from kv_transfer.link import LinkSettings, import_groups
from kv_transfer.outgoing import BlockColumns, OutgoingBlock, TicketInfo
from kv_transfer.pool import KvPool
from kv_transfer.sender_link import SenderLink
from kv_transfer.sender_listener import SenderListener
from kv_transfer.source_digests import SourceDigests
from kv_transfer.stats import Counters, SenderStats, TransferStats
from kv_transfer.transfers import OutgoingTransfers

__all__ = ["BlockColumns", "KvSender", "OutgoingBlock", "SenderListener", "TicketInfo", "TransferStats"]

MAX_PREWARMED = 64
"""Links beyond which none is opened before it is needed: each has two threads."""


class KvSender:
    """All links of one prefill worker. Every method may be called from any thread; only `close` waits. What is called
    back is called on link threads only."""

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
        self._digests = SourceDigests(self._copier, kv.num_blocks)
        self._settings = settings or LinkSettings()
        import_groups(self._settings)
        self._clock = clock
        self._counters = Counters()
        self._lock = threading.Lock()
        """Guards everything below, and the transfers of every link."""
        self._links: dict[LinkTarget, SenderLink] = {}
        self._threads: set[SenderLink] = set()
        """Links whose threads may still run; those in `_links` and the ones that are ending."""
        self._requests: dict[str, SenderLink] = {}
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
            step = link.take_step()
        link.write_steps(step)

    def prewarm(self, target: LinkTarget) -> None:
        """Open the link that the first transfer to `target` would open, in the background; whether it opens is that
        transfer's business. At most `MAX_PREWARMED` links are open for that reason.

        Raises `LinkClosed` if the sender is closed.
        """
        with self._lock:
            link = self._link(target)
            if len(self._threads) < MAX_PREWARMED:
                self._start(link)

    def _link(self, target: LinkTarget) -> SenderLink:
        """With the lock held: the link to `target`, or a new one. Raises `LinkClosed` if the sender is closed."""
        if self._closed:
            raise LinkClosed("the sender is closed")
        link = self._links.get(target)
        return SenderLink(self, target) if link is None or link.ending else link

    def _start(self, link: SenderLink) -> None:
        """With the lock held. Does nothing for a link that is started."""
        if link not in self._threads:
            self._links[link.target] = link
            self._threads.add(link)
            link.start()

    def send(self, request_id: str, blocks: Sequence[OutgoingBlock | BlockColumns], *, finish: bool = False) -> None:
        """Queue completed blocks. Those that the ticket does not ask for, or has been given, are skipped. `finish`: as
        if `finish` followed.

        The source blocks must stay as they are until the transfer ends; each of those that may be lent ends with
        `loan_over`, whether it is or not. Ignored if the transfer has ended. Raises `InternalError`, and queues none,
        if one is no block of the pool or its hash has not 32 bytes.
        """
        most = self._kv.num_blocks
        for block in blocks:
            if not (_is_inside(block, most) if isinstance(block, BlockColumns) else _fits(block, most)):
                raise InternalError(f"{block} is no block of this pool of {most}")

        def change(transfers: OutgoingTransfers) -> None:
            transfers.send(request_id, blocks)
            if finish:
                transfers.finish(request_id)

        if not self._change(request_id, change):
            lendable = sum(len(block) for block in blocks if isinstance(block, BlockColumns) and block.lendable)
            if lendable:
                self._listener.loan_over(request_id, lendable)

    def digest(self, blocks: Sequence[tuple[int, int]]) -> None:
        """These blocks, pairs of id and generation, were just filled: take their digests while they are in the caches,
        so that no transfer has to read them for it. Reads those that are not known, on the calling thread."""
        if self._kv.device == "cpu" and (new := [pair for pair in blocks if self._digests.find(*pair) is None]):
            self._digests.take(new, [self._kv.block(block) for block, _ in new])

    def is_damaged(self, block: int, generation: int) -> bool | None:
        """Whether the bytes of a full block are others than when its digest was taken; None if it never was. Reads
        it, on the calling thread, which knows that its slot has this generation."""
        known = self._digests.find(block, generation)
        if known is None or self._kv.device != "cpu":
            return None
        return self._copier.digests([self._kv.block(block)]) != [known]

    def finish(self, request_id: str) -> None:
        """No more blocks will come. Ignored if the transfer has ended."""
        self._change(request_id, lambda transfers: transfers.finish(request_id))

    def abort(self, request_id: str) -> None:
        """End a transfer; `transfer_failed(RequestCancelled)` follows. Ignored if it has ended."""
        self._change(request_id, lambda transfers: transfers.abort(request_id))

    def _change(self, request_id: str, change: Callable[[OutgoingTransfers], None]) -> bool:
        """False: the transfer has ended."""
        with self._lock:
            link = self._requests.get(request_id)
            if link is None:
                return False
            change(link.transfers)
            step = link.take_step()
        link.write_steps(step)
        return True

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


def _fits(block: OutgoingBlock, most: int) -> bool:
    inside = 0 <= block.source_block < most and all(0 <= n < most for n in block.more_blocks)
    return inside and len(block.hash) == HASH_BYTES


def _is_inside(blocks: BlockColumns, most: int) -> bool:
    """As unsigned numbers, negative ones are too large too."""
    return len(blocks.hashes) == len(blocks) * HASH_BYTES > 0 and bool(blocks.sources.view(np.uint64).max() < most)
