"""How fast do KV blocks get from one process to another, against one thread's memcpy of the same blocks?

`python -m bench.transfer [--json] [--quick]`

Two processes, blocks of 360 KiB and 2 MiB, 1, 32 and 256 of them scattered in both pools. Each figure is a ratio: the
time of memcpy over that of the transfer, from handing the blocks to the sender to the last acknowledgement. The two
take turns, memcpy in the receiving process, between pools of the same kind. Before each of them its source blocks are
written. The receiver's native copy is on, and so is the digest; what it costs a transfer is the difference to the same
transfers without it.

The sending process treats its blocks as a prefill worker does: their digests are taken right behind the writing, before
the transfer, which reads no block for it. That reading is not in the ratio, but is `digest_step_percent` of the step
that computes the blocks. `lazy`: blocks whose digest nobody took, such as those that come back from host memory; the
link takes it. `again`: the same transfer once more, of blocks that were not written since.

`adopt_us`: without a copy, from handing the blocks to the sender until they can be read where they are; the worst of
all counts. `adopt_floor_us`: what a few bytes take between two idle Python threads of two processes, in the same run.
What is above it is Python and numpy on either side, whose code and data the transfers before have pushed out of the
caches.
`kill_seen_ms`: from killing the sender in the middle of 256 MiB to the receiver's word that the link is lost.
`exposed_ttft_percent`: of the time to the first token of a 2,048-token prompt, what its second token waits for KV.
Peers run in an environment of their own (`make bench-peers`), in the same way against memcpy in the same process.
"""

from __future__ import annotations

import ctypes
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import click

from bench import peers, wake_floor
from bench.local_system import LocalSystem
from bench.report import Goal, Report, median_spread
from bench.transfer_pair import (
    ALL,
    GEOMETRIES,
    SenderProcess,
    Transfer,
    block_hash,
    copier,
    fill,
    identity,
    scattered,
    write,
)
from cluster.config import default_model_dir
from engine.borrowing import Loan
from engine.errors import InternalError, TransferError
from engine.kv_cache import KvCache
from engine.model_store import resolve_model
from kv_transfer.identity import ADOPT, SHM, TCP, LinkEndpoint
from kv_transfer.link import LinkSettings
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ExpectedBlock, ReservationTable
from kvrelay import Client

GOALS = (
    Goal("shm_rel_360k_32", ">=", 0.95),
    Goal("shm_rel_360k_256", ">=", 0.95),
    Goal("shm_rel_2m_32", ">=", 1.3),
    Goal("shm_rel_2m_256", ">=", 1.3),
    Goal("tcp_rel_2m_32", ">=", 0.30),
    Goal("digest_percent", "<=", 3.0),
    Goal("digest_step_percent", "<=", 3.0),
    Goal("adopt_us", "<=", 30.0),
    Goal("kill_seen_ms", "<=", 200.0),
    Goal("exposed_ttft_percent", "<=", 2.0),
)
COUNTS = (1, 32, 256)
POOL_BLOCKS = 320
PEERS_TIMEOUT_S = 600
WAIT_S = 60.0
PROMPT_TOKENS = 2048


class Listener:
    """A `ReceiverListener` that notes when a link was lost."""

    def __init__(self) -> None:
        self.first = threading.Event()
        """A block was adopted."""
        self.lost = queue.Queue[float]()
        self.lent = queue.Queue[tuple[float, Loan]]()

    def blocks_adopted(self, ticket_id: str, ordinals: Sequence[int], num_bytes: int, transport: str) -> None:
        if 0 in ordinals:
            self.first.set()

    def block_refused(self, ticket_id: str, ordinal: int, error: TransferError) -> None:
        raise InternalError(f"block {ordinal} was refused: {error}")

    def writes_quiet(self, ticket_id: str, slots: Collection[int]) -> None:
        """Nobody reuses a slot before its transfer is over."""

    def blocks_lent(self, loan: Loan) -> None:
        self.lent.put((time.perf_counter(), loan))

    def link_lost(self, ticket_ids: Collection[str], error: TransferError) -> None:
        self.lost.put(time.perf_counter())


class Pair:
    """This process as decode worker, another as prefill worker, and a third pool for memcpy to read from."""

    def __init__(self, geometry: str, num_blocks: int, cache: str, stack: ExitStack) -> None:
        layout = GEOMETRIES[geometry]
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self._other = KvCache(layout, num_blocks)
        self._kv = KvCache(layout, num_blocks, borrows=True)
        for pool in (self._other, self._kv):
            stack.callback(pool.close)
            fill(pool, seed=2)
        self._table = ReservationTable("1")
        self.listener = Listener()
        self._receivers = {}
        for checked in (True, False):
            receiver = KvReceiver(
                identity("decode-0", geometry),
                self._kv,
                self._table,
                self.listener,
                settings=LinkSettings(transports=ALL),
                copier=copier(cache, checked),
            )
            receiver.start()
            stack.callback(receiver.close, WAIT_S)
            self._receivers[checked] = receiver
        self.sender = stack.enter_context(SenderProcess(geometry, num_blocks, cache))
        self._tickets = 0
        self._generation = 0

    def memcpy(self, count: int) -> float:
        """Seconds."""
        copy = ctypes.CDLL(None).memcpy
        copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        sources, slots = self._places(count)
        write(self._other, sources)
        pairs = [
            (self._kv.address + slot * self.block_bytes, self._other.address + source * self.block_bytes)
            for source, slot in zip(sources, slots, strict=True)
        ]
        began = time.perf_counter()
        for target, source in pairs:
            copy(target, source, self.block_bytes)
        return time.perf_counter() - began

    def begin(self, count: int, transport: str, checked: bool = True, lent: int = 0) -> str:
        """A ticket, its transfer and the blocks. Returns the ticket's id. The first `lent` blocks are not sent."""
        self._tickets += 1
        sources, slots = self._places(count)
        ticket_id = f"t{self._tickets}"
        expected = [
            ExpectedBlock(ordinal=ordinal, slot=slot, generation=1, hash=block_hash(ordinal))
            for ordinal, slot in enumerate(slots)
        ]
        self._table.open(ticket_id, expected, time.monotonic() + self._table.lease_s)
        endpoint = replace(LinkEndpoint.decode(self._receivers[checked].endpoint()), transports=(transport,))
        transfer = Transfer(ticket_id, endpoint.encode(), sources, slots, checked, self._generation, lent)
        self.sender.open(transfer)
        self.sender.begin(transfer)
        return ticket_id

    def produce(self, count: int, checked: bool = True, digested: bool = True) -> float:
        """New contents for the sender's blocks, and their digests, unless nobody takes them. Returns the seconds that
        these took."""
        self._generation += 1
        return self.sender.produce(self._places(count)[0], self._generation, checked, digested)

    def transfer(self, count: int, transport: str, checked: bool = True) -> float:
        """Seconds, as the sender saw them. Raises `InternalError` if it failed or brought other bytes."""
        ticket_id = self.begin(count, transport, checked)
        seconds = self.sender.answer().seconds
        self._table.close(ticket_id)
        for source, slot in zip(*self._places(count), strict=True):
            if bytes(self._kv.block(slot)[:8]) != source.to_bytes(8, "little"):
                raise InternalError(f"slot {slot} does not hold source block {source}")
        return seconds

    def adopt(self, count: int) -> float:
        """Seconds from handing `count` blocks to the sender until they can be read here. Beside them goes one that is
        copied, as in every prompt. Raises `InternalError` if they are not the sender's."""
        ticket_id = self.begin(count + 1, ADOPT, lent=count)
        took = self.sender.answer()
        self._table.close(ticket_id)
        ended, loan = self.listener.lent.get(timeout=WAIT_S)
        for block, source in zip(loan.blocks, self._places(count + 1)[0], strict=False):
            there = self._kv.block(loan.lender.first_block + block.source)
            if block.source != source or bytes(there[:8]) != source.to_bytes(8, "little"):
                raise InternalError(f"block {block} is not the sender's {source}")
        if len(loan.blocks) != count:
            raise InternalError(f"{len(loan.blocks)} of {count} blocks were lent")
        loan.give_back(count)
        return ended - took.began

    def _places(self, count: int) -> tuple[list[int], list[int]]:
        return scattered(count, self.num_blocks, seed=3), scattered(count, self.num_blocks, seed=4)


@dataclass(slots=True)
class Cell:
    """One geometry and count: seconds of each repetition."""

    memcpy: list[float] = field(default_factory=list)
    transports: dict[str, list[float]] = field(default_factory=dict)
    lazy: dict[str, list[float]] = field(default_factory=dict)
    again: dict[str, list[float]] = field(default_factory=dict)
    unchecked: dict[str, list[float]] = field(default_factory=dict)
    digests: list[float] = field(default_factory=list)
    """Of all its blocks, behind the writing."""

    def rel(self, seconds: list[float]) -> float:
        return statistics.median(self.memcpy) / statistics.median(seconds)

    def digest_percent(self, transport: str) -> float:
        return _part(self.transports[transport], self.unchecked[transport])

    def digest_lazy_percent(self, transport: str) -> float:
        return _part(self.lazy[transport], self.unchecked[transport])


def _part(with_it: list[float], without: list[float]) -> float:
    """Percent of the time that would be saved."""
    return 100 * (1 - statistics.median(without) / statistics.median(with_it))


def measure_cell(pair: Pair, count: int, runs: int) -> Cell:
    cell = Cell()
    for run in range(-1, runs):  # the first one opens the links and touches every page
        for transport in (SHM, TCP):
            memcpy = pair.memcpy(count)
            digests = pair.produce(count)
            seconds, again = pair.transfer(count, transport), pair.transfer(count, transport)
            pair.produce(count, digested=False)
            lazy = pair.transfer(count, transport)
            pair.produce(count, checked=False)
            unchecked = pair.transfer(count, transport, checked=False)
            if run >= 0:
                cell.memcpy.append(memcpy)
                cell.digests.append(digests)
                cell.transports.setdefault(transport, []).append(seconds)
                cell.again.setdefault(transport, []).append(again)
                cell.lazy.setdefault(transport, []).append(lazy)
                cell.unchecked.setdefault(transport, []).append(unchecked)
    return cell


def measure_transports(report: Report, counts: Collection[int], num_blocks: int, runs: int, cache: str) -> None:
    for geometry in GEOMETRIES:
        with pair_of(geometry, num_blocks, cache) as pair:
            for count in counts:
                cell = measure_cell(pair, count, runs)
                num_bytes = count * pair.block_bytes
                rates = [f"memcpy {num_bytes / statistics.median(cell.memcpy) / 1e9:.1f} GB/s"]
                digest_us = report.figures[f"digest_us_{geometry}_{count}"] = 1e6 * statistics.median(cell.digests)
                rates.append(f"digests {num_bytes / digest_us / 1e3:.1f} GB/s")
                for transport, seconds in cell.transports.items():
                    lazy, again = cell.lazy[transport], cell.again[transport]
                    report.figures[f"{transport}_rel_{geometry}_{count}"] = cell.rel(seconds)
                    report.figures[f"{transport}_lazy_rel_{geometry}_{count}"] = cell.rel(lazy)
                    report.figures[f"{transport}_again_rel_{geometry}_{count}"] = cell.rel(again)
                    rates.append(f"{transport} {median_spread([1e3 * s for s in seconds])} ms")
                    rates.append(f"its digest {cell.digest_percent(transport):.0f} %")
                    rates.append(f"lazy {median_spread([1e3 * s for s in lazy])} ms")
                    rates.append(f"again {median_spread([1e3 * s for s in again])} ms")
                report.notes.append(f"{count} x {geometry}: {'; '.join(rates)}; load {os.getloadavg()[0]:.1f}")
                if (geometry, count) == ("2m", max(counts)):
                    report.figures["digest_percent"] = max(map(cell.digest_percent, cell.transports))
                    report.figures["digest_lazy_percent"] = max(map(cell.digest_lazy_percent, cell.transports))


def measure_adopt(report: Report, counts: Collection[int], num_blocks: int, runs: int, cache: str) -> None:
    """Without a copy, so in microseconds: it depends on the number of blocks alone, not on their size."""
    medians: list[float] = []
    for geometry in GEOMETRIES:
        with pair_of(geometry, num_blocks, cache) as pair:
            for count in counts:
                micros = [1e6 * pair.adopt(count) for _ in range(2 * runs + 1)][1:]  # the first one opens the link
                medians.append(statistics.median(micros))
                report.figures[f"adopt_us_{geometry}_{count}"] = medians[-1]
                saved = count * pair.block_bytes / 2**20
                report.notes.append(
                    f"{count} x {geometry} lent: {median_spread(micros)} us, {saved:.1f} MiB less at the receiver; "
                    f"load {os.getloadavg()[0]:.1f}"
                )
    report.figures["adopt_us"] = max(medians)
    report.figures["adopt_floor_us"] = report.peers["adopt_us"] = wake_floor.floor_us(20 * runs)


def measure_kill(report: Report, num_blocks: int, runs: int, cache: str) -> None:
    """The sender dies when the first block has come."""
    seen: list[float] = []
    for _ in range(runs):
        with pair_of("2m", num_blocks, cache) as pair:
            pair.begin(num_blocks, TCP)
            if not pair.listener.first.wait(WAIT_S):
                raise InternalError("no block came")
            killed = time.perf_counter()
            pair.sender.kill()
            seen.append(pair.listener.lost.get(timeout=WAIT_S) - killed)
    report.figures["kill_seen_ms"] = 1e3 * statistics.median(seen)
    report.notes.append(f"kill_seen_ms {median_spread([1e3 * s for s in seen])}, {num_blocks} x 2 MiB over tcp")


def measure_exposed(report: Report, model: str, runs: int) -> None:
    folder = resolve_model(model, default_model_dir())
    shares, waits, ttfts = [], [], []
    flags = ["--kv-memory-bytes", str(512 << 20), "--max-num-batched-tokens", "512"]
    with LocalSystem(folder, prefill=1, decode=1, worker_flags=flags) as system:
        with Client(system.router_address) as client:
            for run in range(runs + 1):
                prompt = [1000 + (run * 131 + 7 * n) % 20_000 for n in range(PROMPT_TOKENS)]
                done = client.generate(prompt_token_ids=prompt, max_tokens=4, ignore_eos=True)
                wait_us = sum(part.duration_us for part in done.waterfall.after_first if part.name == "transfer")
                if run:  # the first one opens the link
                    waits.append(wait_us / 1e3)
                    ttfts.append(done.waterfall.ttft_us / 1e3)
                    shares.append(100 * wait_us / done.waterfall.ttft_us)
    report.figures["exposed_ttft_percent"] = statistics.median(shares)
    per_token_us = 1e3 * statistics.median(ttfts) / PROMPT_TOKENS
    digest_us = report.figures[f"digest_us_360k_{max(COUNTS)}"] / max(COUNTS)  # that model's blocks, of 16 tokens
    report.figures["digest_step_percent"] = 100 * digest_us / (16 * per_token_us)
    report.notes.append(
        f"{PROMPT_TOKENS} tokens: TTFT {median_spread(ttfts)} ms, then waited {median_spread(waits)} ms for KV"
    )


def measure_peers(report: Report) -> None:
    for peer in ("nixl", "mooncake"):
        try:
            report.figures.update(peers.ask(peer, "transfer_engines.py", [peer], PEERS_TIMEOUT_S))
        except peers.PeerMissing as error:
            report.notes.append(f"{peer} was not measured: {error}")


@contextmanager
def pair_of(geometry: str, num_blocks: int, cache: str) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(geometry, num_blocks, cache, stack)


@click.command(
    help="Transports against memcpy, what the digest costs, and how much of a hand-over a request waits for."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--quick", is_flag=True, help="Small pools and few repetitions: whether it works, not how fast it is.")
@click.option("--runs", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, quick: bool, runs: int, model: str) -> None:
    report = Report("transfer", GOALS)
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as cache:
        if quick:
            measure_transports(report, (1, 4), num_blocks=8, runs=1, cache=cache)
            measure_adopt(report, (1, 4), num_blocks=8, runs=1, cache=cache)
            measure_kill(report, num_blocks=8, runs=1, cache=cache)
        else:
            measure_transports(report, COUNTS, POOL_BLOCKS, runs, cache)
            measure_adopt(report, COUNTS, POOL_BLOCKS, runs, cache)
            measure_kill(report, num_blocks=128, runs=5, cache=cache)
            measure_exposed(report, model, runs=5)
            measure_peers(report)
    report.print(as_json)


if __name__ == "__main__":
    main()
