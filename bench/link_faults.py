"""Do links survive everything that can happen to a frame?

`python -m bench.link_faults [--json] [--faults N] [--seed S] [--gloo]`

Several senders and one receiver, with the engine's own pools, over real sockets: short transfers, one after the other
on each sender, while faults of all kinds meet the frames of both directions at random (`kv_transfer.faults`). Senders
differ in their transports, every fourth has larger blocks than the receiver and converts them; every other round is
with native code, if it can be built. After every transfer, and after every round, when all links were closed:

wrong_adoptions: adopted blocks whose bytes are not the source's, and slots that were written after they were quiet.
leaks: slots that never became quiet, tickets, transfers, links, threads and file descriptors left after a round.
hangs: transfers that did not end, on either side, within their deadline, lease and time-outs.
crashes: threads that ended by anything but a typed error.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

from bench.link_listeners import DecodeListener, PrefillListener, Seen
from bench.report import Goal, Report
from engine.errors import DeadlineExceeded, NativeUnavailable
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.native.blocks import NativeBlockCopier, load_block_copier
from kv_transfer.conversion import convert_block
from kv_transfer.digest import BlockCopier
from kv_transfer.faults import Direction, FaultInjector, FaultKind, FaultPlan
from kv_transfer.identity import GLOO, SHM, TCP, LinkEndpoint, PeerIdentity
from kv_transfer.link import LinkSettings
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ExpectedBlock, ReservationTable
from kv_transfer.sender import KvSender, OutgoingBlock, TicketInfo

GOALS = tuple(Goal(name, "==", 0.0) for name in ("wrong_adoptions", "leaks", "hangs", "crashes"))
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")
"""Small blocks, 4 KiB: what counts here are frames."""
LARGER = replace(LAYOUT, block_size=16)
LANES = 32
"""They mostly wait for time-outs, so many of them fit on one core."""
SLOTS = 8
"""Of the receiver's pool, for each lane."""
SOURCES = 16
TRANSFERS = 20
"""Of each lane, in one round."""
RATE = 0.35
"""Of all frames, faults."""
Transports = Sequence[tuple[str, ...]]
TRANSPORTS: Transports = ((SHM,), (TCP,), (SHM, TCP), (SHM, TCP), (SHM,), (TCP,))
"""Of the lanes, in turn."""
GLOO_TRANSPORTS: Transports = (*TRANSPORTS, (GLOO,), (GLOO,))
"""On request: torch's Gloo has once crashed the process when a group did not come about, after 88,000 faults."""
SETTINGS = LinkSettings(
    connect_timeout_s=2.0, handshake_timeout_s=0.1, progress_timeout_s=0.1, transports=(SHM, TCP, GLOO)
)
LEASE_S = 0.4
DEADLINE_S = 2.0
BOUND_S = 20.0
"""Far behind every deadline: who has not ended by then hangs."""
DELAY_S, FREEZE_S = 0.05, 0.25


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


class _Decode:
    """The receiver of one round."""

    def __init__(self, number: int, pool: KvCache, injector: FaultInjector, copier: BlockCopier | None) -> None:
        self.copier = copier
        self.incarnation = f"round-{number}"
        self.pool = pool
        self.listener = DecodeListener()
        self.table = ReservationTable(self.incarnation, LEASE_S)
        settings = replace(SETTINGS, connection=injector.connection(Direction.TO_SENDER))
        identity = _identity("decode", self.incarnation, LAYOUT)
        self.receiver = KvReceiver(identity, pool, self.table, self.listener, settings=settings, copier=copier)


class Lane:
    """One sender's transfers. Owns its source pool and its slots of the receiver's pool."""

    def __init__(self, number: int, plan: FaultPlan, tally: Tally, transports: Transports) -> None:
        self._number = number
        self._tally = tally
        self._rng = random.Random(f"{plan.seed} lane {number}")
        self._layout = LARGER if number % 4 == 3 else LAYOUT
        self._pool = KvCache(self._layout, SOURCES)
        self._pristine = [self._rng.randbytes(self._layout.block_bytes) for _ in range(SOURCES)]
        self._restore(range(SOURCES))
        self.injector = FaultInjector(plan, source=self._pool, delay_s=DELAY_S, freeze_s=FREEZE_S)
        self._free = list(range(number * SLOTS, (number + 1) * SLOTS))
        self._generations = dict.fromkeys(self._free, 0)
        self._transports = transports[number % len(transports)]
        self._serial = 0

    def close(self) -> None:
        self._pool.close()

    def run_round(self, decode: _Decode) -> None:
        """On a thread of its own."""
        settings = replace(SETTINGS, connection=self.injector.connection(Direction.TO_RECEIVER))
        listener = PrefillListener()
        identity = _identity(f"prefill-{self._number}", decode.incarnation, self._layout)
        sender = KvSender(identity, self._pool, listener, settings, copier=decode.copier)
        for _ in range(TRANSFERS):
            self._transfer(decode, sender, listener)
        try:
            sender.close(BOUND_S)
        except DeadlineExceeded as error:
            self._tally.defect("leaks", str(error))
        sender.check_integrity()
        self._tally.defect("leaks", "transfers or links of a sender", sender.stats().transfers_open)
        self._tally.defect("crashes", "a transfer ended twice", listener.outcomes.qsize())

    def _transfer(self, decode: _Decode, sender: KvSender, listener: PrefillListener) -> None:
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

    def _reserve(self, key: str, ordinal: int, decode: _Decode) -> ExpectedBlock:
        slot = self._free.pop(self._rng.randrange(len(self._free)))
        if self._generations[slot] and bytes(decode.pool.block(slot)) != _pattern(slot, self._generations[slot]):
            self._tally.defect("wrong_adoptions", f"slot {slot} was written after it was quiet")
        self._generations[slot] += 1
        hash = sha256(f"{key} {ordinal}".encode()).digest()
        return ExpectedBlock(ordinal=ordinal, slot=slot, generation=self._generations[slot], hash=hash)

    def _send(
        self, key: str, sender: KvSender, decode: _Decode, blocks: Sequence[ExpectedBlock], sources: Sequence[int]
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
        lasting = 1 if self._layout == LAYOUT else None  # what is flipped in a source is undone behind its transfer
        for block, source in zip(blocks, sources, strict=True):
            sender.send(key, [OutgoingBlock(block.ordinal, source, block.hash, (), lasting)])
        if self._rng.random() < 0.05:
            sender.abort(key)
        sender.finish(key)

    def _settle(self, key: str, decode: _Decode, seen: Seen, number: int) -> None:
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
        self, key: str, decode: _Decode, seen: Seen, blocks: Sequence[ExpectedBlock], sources: Sequence[int]
    ) -> None:
        for block, source in zip(blocks, sources, strict=True):
            slot = decode.pool.block(block.slot)
            if block.ordinal in seen.adopted and bytes(slot) != self._as_adopted(block.ordinal, source):
                self._tally.defect("wrong_adoptions", f"block {block.ordinal} of {key}")
            slot[:] = _pattern(block.slot, block.generation)
            self._free.append(block.slot)

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


def _identity(worker_id: str, incarnation: str, layout: KvLayout) -> PeerIdentity:
    fingerprint = sha256(b"link_faults").digest()
    return PeerIdentity(worker_id=worker_id, incarnation=incarnation, fingerprint=fingerprint, layout=layout)


def _pattern(slot: int, generation: int) -> bytes:
    """What a free slot holds: a write that comes late is seen in it."""
    return random.Random(f"{slot} {generation}").randbytes(32) * (LAYOUT.block_bytes // 32)


@contextmanager
def _counting_crashes(tally: Tally) -> Iterator[None]:
    def note(args: threading.ExceptHookArgs) -> None:
        tally.defect(
            "crashes", f"{args.thread.name if args.thread else '?'}: {args.exc_type.__name__} {args.exc_value}"
        )

    before, threading.excepthook = threading.excepthook, note
    try:
        yield
    finally:
        threading.excepthook = before


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(
    faults: int,
    plan: FaultPlan,
    report: Report,
    console: Console | None = None,
    transports: Transports = TRANSPORTS,
) -> None:
    """Rounds until `faults` were injected by `plan`, of which each lane follows another seed. Fills in `report`."""
    tally = Tally()
    pool = KvCache(LAYOUT, LANES * SLOTS)
    lanes = [Lane(number, replace(plan, seed=plan.seed * LANES + number), tally, transports) for number in range(LANES)]
    answers = FaultInjector(replace(plan, seed=-1 - plan.seed), delay_s=DELAY_S, freeze_s=FREEZE_S)
    injected: Counter[FaultKind] = Counter()
    began, rounds = time.monotonic(), 0
    with TemporaryDirectory() as cache, _counting_crashes(tally):
        native = _native(Path(cache), report)
        while injected.total() < faults:
            rounds += 1
            _round(rounds, lanes, pool, answers, native if rounds % 2 else None, tally)
            injected = sum(
                (Counter(one.injected()) for one in [answers, *(lane.injector for lane in lanes)]), Counter()
            )
            if console is not None:
                console.print(f"{injected.total()} faults, {time.monotonic() - began:.0f} s, {dict(tally.counts)}")
    for lane in lanes:
        lane.close()
    pool.close()
    _fill_in(report, tally, injected, time.monotonic() - began)


def _native(cache: Path, report: Report) -> NativeBlockCopier | None:
    try:
        return load_block_copier(cache)
    except NativeUnavailable as error:
        report.notes.append(f"no native code: {error}")
        return None


def _round(
    number: int,
    lanes: Sequence[Lane],
    pool: KvCache,
    answers: FaultInjector,
    copier: BlockCopier | None,
    tally: Tally,
) -> None:
    descriptors = _open_descriptors()
    decode = _Decode(number, pool, answers, copier)
    decode.receiver.start()
    threads = [
        threading.Thread(target=lane.run_round, args=(decode,), name=f"lane-{n}") for n, lane in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        decode.receiver.close(BOUND_S)
    except DeadlineExceeded as error:
        tally.defect("leaks", str(error))
    decode.table.check_integrity()
    stats = decode.table.stats()
    tally.defect("leaks", "tickets", stats.open + stats.ending)
    tally.defect("leaks", "links of the receiver", decode.receiver.stats().links_open)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
    tally.defect("leaks", f"threads {left}", len(left))
    tally.defect("leaks", "file descriptors", max(0, _open_descriptors() - descriptors))


def _fill_in(report: Report, tally: Tally, injected: Counter[FaultKind], seconds: float) -> None:
    report.figures["faults"] = float(injected.total())
    for goal in GOALS:
        report.figures[goal.name] = float(tally.counts[goal.name])
    report.figures["transfers"] = float(tally.counts["transfers"])
    report.figures["slowest_transfer_s"] = tally.slowest_s
    report.figures["seconds"] = seconds
    for kind in FaultKind:
        report.figures[f"faults_{kind}"] = float(injected[kind])
    report.notes.append("transfers by outcome: " + ", ".join(f"{n} {name}" for name, n in tally.outcomes.most_common()))
    report.notes += tally.details


@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--faults", default=100_000, show_default=True, help="Go on until so many were injected.")
@click.option("--seed", default=0, show_default=True)
@click.option("--gloo", is_flag=True, help="Over gloo too.")
def main(as_json: bool, faults: int, seed: int, gloo: bool) -> None:
    report = Report("link_faults", GOALS)
    transports = GLOO_TRANSPORTS if gloo else TRANSPORTS
    run(faults, FaultPlan(rate=RATE, seed=seed), report, Console(stderr=True), transports)
    report.print(as_json)


if __name__ == "__main__":
    main()
