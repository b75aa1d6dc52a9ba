"""The two ends of `bench.link_faults`: one receiver, and the lanes of senders that send to it and compare what came."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import numpy as np

from bench.link_listeners import DecodeListener, PrefillListener, Seen
from engine.borrowing import Loan
from engine.errors import DeadlineExceeded
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from kv_transfer.conversion import convert_block
from kv_transfer.digest import BlockCopier
from kv_transfer.faults import Direction, FaultInjector, FaultPlan
from kv_transfer.identity import ADOPT, GLOO, SHM, TCP, LinkEndpoint, PeerIdentity
from kv_transfer.link import LinkSettings
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ExpectedBlock, ReservationTable
from kv_transfer.sender import BlockColumns, KvSender, OutgoingBlock, TicketInfo

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")
"""Small blocks, 4 KiB: what counts here are frames."""
LARGER = replace(LAYOUT, block_size=16)
SLOTS = 8
"""Of the receiver's pool, for each lane."""
SOURCES = 16
TRANSFERS = 20
"""Of each lane, in one round."""
SETTINGS = LinkSettings(
    connect_timeout_s=2.0,
    handshake_timeout_s=0.1,
    progress_timeout_s=0.1,
    transports=(ADOPT, SHM, TCP, GLOO),
    ask_loans_s=0.05,
    loan_lease_s=0.3,
)
LEASE_S = 0.4
DEADLINE_S = 2.0
BOUND_S = 20.0
"""Far behind every deadline: who has not ended by then hangs."""
DELAY_S, FREEZE_S = 0.05, 0.25
Transports = Sequence[tuple[str, ...]]


class Tally:
    """What was seen, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        """Of all transfers, until both sides were done with it."""
        self.details: list[str] = []
        """Of the first defects."""

    def defect(self, name: str, detail: str, n: int = 1) -> None:
        if n:
            with self._lock:
                self.counts[name] += n
                if len(self.details) < 20:
                    self.details.append(f"{name}: {detail}")

    def ended(self, outcome: str, seconds: float) -> None:
        with self._lock:
            self.slowest_s = max(self.slowest_s, seconds)
            self.counts["transfers"] += 1
            self.outcomes[outcome] += 1


class Decode:
    """The receiver of one round."""

    def __init__(self, number: int, pool: KvCache, injector: FaultInjector, copier: BlockCopier | None) -> None:
        self.copier = copier
        self.incarnation = f"round-{number}"
        self.pool = pool
        self.listener = DecodeListener()
        self.table = ReservationTable(self.incarnation, LEASE_S)
        settings = replace(SETTINGS, connection=injector.connection(Direction.TO_SENDER))
        identity = identity_of("decode", self.incarnation, LAYOUT)
        self.receiver = KvReceiver(identity, pool, self.table, self.listener, settings=settings, copier=copier)


class Lane:
    """One sender's transfers. Owns its source pool and its slots of the receiver's pool."""

    def __init__(self, number: int, plan: FaultPlan, tally: Tally, transports: Transports) -> None:
        self._number = number
        self._tally = tally
        self._rng = random.Random(f"{plan.seed} lane {number}")
        self._layout = LARGER if number % 4 == 3 else LAYOUT
        self._transports = transports[number % len(transports)]
        self._lends = ADOPT in self._transports and self._layout == LAYOUT
        self._pool = KvCache(self._layout, SOURCES, lent_share=float(self._lends))
        self._source_generations = np.ones(SOURCES, dtype=np.uint64)
        if self._lends:
            assert self._pool.generations is not None, "who lends says so"
            self._source_generations = self._pool.generations
        self._pristine = [self._rng.randbytes(self._layout.block_bytes) for _ in range(SOURCES)]
        self._restore(range(SOURCES))
        self.injector = FaultInjector(plan, source=self._pool, delay_s=DELAY_S, freeze_s=FREEZE_S)
        self._free = list(range(number * SLOTS, (number + 1) * SLOTS))
        self._generations = dict.fromkeys(self._free, 0)
        self._serial = 0
        self._lent: Counter[str] = Counter()
        """Request -> blocks that were handed over to be lent, in this round."""

    def close(self) -> None:
        self._pool.close()

    def run_round(self, decode: Decode) -> None:
        """On a thread of its own."""
        settings = replace(SETTINGS, connection=self.injector.connection(Direction.TO_RECEIVER))
        listener = PrefillListener()
        identity = identity_of(f"prefill-{self._number}", decode.incarnation, self._layout)
        sender = KvSender(identity, self._pool, listener, settings, copier=decode.copier)
        self._lent.clear()
        for _ in range(TRANSFERS):
            self._transfer(decode, sender, listener)
        try:
            sender.close(BOUND_S)
        except DeadlineExceeded as error:
            self._tally.defect("leaks", str(error))
        sender.check_integrity()
        self._tally.defect("leaks", "transfers or links of a sender", sender.stats().transfers_open)
        self._tally.defect("crashes", "a transfer ended twice", listener.outcomes.qsize())
        for key in (self._lent - listener.loans_over) + (listener.loans_over - self._lent):
            self._tally.defect("leaks", f"{self._lent[key]} blocks of {key} lent, {listener.loans_over[key]} over")

    def _transfer(self, decode: Decode, sender: KvSender, listener: PrefillListener) -> None:
        self._serial += 1
        key = f"{self._number}-{self._serial}"
        number = self._rng.randint(1, min(4, len(self._free)))
        sources = self._rng.sample(range(SOURCES), number)
        blocks = [self._reserve(key, ordinal, decode) for ordinal in range(number)]
        seen = decode.listener.watch(key)
        decode.table.open(key, blocks, time.monotonic() + LEASE_S)
        began = time.monotonic()
        self._send(key, sender, decode, blocks, sources)
        try:
            request, outcome = listener.outcomes.get(timeout=BOUND_S)
        except queue.Empty:
            self._tally.defect("hangs", f"{key} did not end at its sender")
            request, outcome = key, "hung"
        if request != key:
            self._tally.defect("crashes", f"{request} ended again")
        self._settle(key, decode, seen, len(blocks))
        self._compare(key, decode, seen, blocks, sources)
        decode.listener.forget(key)
        if outcome == "done" and len(seen.adopted) < len(blocks):
            outcome = "done, but not adopted"  # an answer was forged; the receiver heard so and recomputes
        self._tally.ended(outcome, time.monotonic() - began)
        self._restore(sources)

    def _reserve(self, key: str, ordinal: int, decode: Decode) -> ExpectedBlock:
        slot = self._free.pop(self._rng.randrange(len(self._free)))
        if self._generations[slot] and bytes(decode.pool.block(slot)) != pattern_of(slot, self._generations[slot]):
            self._tally.defect("wrong_adoptions", f"slot {slot} was written after it was quiet")
        self._generations[slot] += 1
        hash = sha256(f"{key} {ordinal}".encode()).digest()
        return ExpectedBlock(ordinal=ordinal, slot=slot, generation=self._generations[slot], hash=hash)

    def _send(
        self, key: str, sender: KvSender, decode: Decode, blocks: Sequence[ExpectedBlock], sources: Sequence[int]
    ) -> None:
        endpoint = replace(LinkEndpoint.decode(decode.receiver.endpoint()), transports=self._transports)
        ticket = TicketInfo(
            ticket_id=key,
            worker_id="decode",
            incarnation=decode.incarnation,
            endpoint=endpoint.encode(),
            blocks={block.ordinal: (block.slot, block.generation) for block in blocks},
            lease_s=LEASE_S,
            layout=LAYOUT,
        )
        sender.open(key, ticket, time.monotonic() + DEADLINE_S)
        if self._layout != LAYOUT:
            for block, source in zip(blocks, sources, strict=True):
                sender.send(key, [OutgoingBlock(block.ordinal, source, block.hash)])
        else:
            self._send_same_layout(key, sender, blocks, sources)
        if self._rng.random() < 0.05:
            sender.abort(key)
        sender.finish(key)

    def _send_same_layout(
        self, key: str, sender: KvSender, blocks: Sequence[ExpectedBlock], sources: Sequence[int]
    ) -> None:
        """Full blocks as columns, whose digests are known or not, in one or two parts; the last one alone."""
        generations = self._source_generations[list(sources)]
        if self._rng.random() < 0.7:
            sender.digest(list(zip(sources, generations.tolist(), strict=True)))
        last = len(blocks) - 1
        bounds = sorted({0, self._rng.randint(0, last), last})
        for first, end in pairwise(bounds):
            part = slice(first, end)
            hashes = b"".join(block.hash for block in blocks[part])
            ordinals = np.array([block.ordinal for block in blocks[part]])
            columns = BlockColumns(ordinals, np.array(sources[part]), generations[part], hashes, self._lends)
            sender.send(key, [columns])
            self._lent[key] += len(columns) * self._lends
        final = OutgoingBlock(blocks[last].ordinal, sources[last], blocks[last].hash, (), int(generations[last]))
        sender.send(key, [final])

    def _settle(self, key: str, decode: Decode, seen: Seen, number: int) -> None:
        """Wait until the ticket is over at the receiver, as a decode worker does, and its slots are quiet."""
        bound = time.monotonic() + BOUND_S
        changed, table = decode.listener.changed, decode.table
        with changed:
            while len(seen.adopted) < number and not seen.given_up and table.progress(key) is not None:
                now = time.monotonic()
                if now > bound:
                    self._tally.defect("hangs", f"{key} did not end at its receiver")
                    break
                expiry = table.next_expiry()
                changed.wait(BOUND_S if expiry is None else max(0.001, expiry - now))
                if table.expire(time.monotonic()):
                    changed.notify_all()
            busy = table.close(key)
            if not changed.wait_for(lambda: busy <= seen.quiet, BOUND_S):
                self._tally.defect("leaks", f"slots {busy} of {key} never became quiet", len(busy))
        table.check_integrity()

    def _compare(
        self, key: str, decode: Decode, seen: Seen, blocks: Sequence[ExpectedBlock], sources: Sequence[int]
    ) -> None:
        if self._rng.random() < 0.2:
            self._reuse(sources)  # as an engine that has given the reader up, or was given them back
        lent = {loaned.ordinal for loan in seen.loans for loaned in loan.blocks}
        for loan in seen.loans:
            self._compare_lent(key, decode, loan, sources)
        for block, source in zip(blocks, sources, strict=True):
            slot = decode.pool.block(block.slot)
            copied = block.ordinal in seen.adopted and block.ordinal not in lent
            if copied and bytes(slot) != self._as_adopted(block.ordinal, source):
                self._tally.defect("wrong_adoptions", f"block {block.ordinal} of {key}")
            slot[:] = pattern_of(block.slot, block.generation)
            self._free.append(block.slot)

    def _compare_lent(self, key: str, decode: Decode, loan: Loan, sources: Sequence[int]) -> None:
        for block in loan.blocks:
            there = bytes(decode.pool.block(loan.lender.first_block + block.source))
            kept = int(loan.lender.generations[block.source]) == block.generation
            if kept and (block.source != sources[block.ordinal] or there != self._pristine[block.source]):
                self._tally.defect("wrong_adoptions", f"lent block {block.ordinal} of {key}")
        loan.give_back(len(loan.blocks))

    def _reuse(self, sources: Sequence[int]) -> None:
        """Give the slots to other contents, if they may be lent."""
        if self._lends:
            for source in sources:
                self._source_generations[source] += 1
                self._pool.block(source)[:] = bytes(self._layout.block_bytes)

    def _as_adopted(self, ordinal: int, source: int) -> bytes:
        if self._layout == LAYOUT:
            return self._pristine[source]
        block = bytearray(LAYOUT.block_bytes)
        convert_block(self._layout, [memoryview(self._pristine[source])], LAYOUT, ordinal, memoryview(block))
        return bytes(block)

    def _restore(self, sources: Sequence[int]) -> None:
        """Undo what was flipped in the sender's memory."""
        for source in sources:
            self._pool.block(source)[:] = self._pristine[source]


def identity_of(worker_id: str, incarnation: str, layout: KvLayout) -> PeerIdentity:
    fingerprint = sha256(b"link_faults").digest()
    return PeerIdentity(worker_id=worker_id, incarnation=incarnation, fingerprint=fingerprint, layout=layout)


def pattern_of(slot: int, generation: int) -> bytes:
    """What a free slot holds: a write that comes late is seen in it."""
    return random.Random(f"{slot} {generation}").randbytes(32) * (LAYOUT.block_bytes // 32)
