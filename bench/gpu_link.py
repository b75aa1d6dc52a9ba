"""Two workers on one card: KV from one's pool to the other's, on the card and over a link.

The link is a real one (`kv_transfer`, tcp) between the workers' pinned host memory: NCCL connects no two ends on one
card. So what it proves is that blocks which leave a pool on the card, and come into another, are the same KV.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Collection, Sequence
from hashlib import sha256

import torch

from bench.gpu_bench import Bench, config_of
from bench.gpu_parity import BLOCK_SIZE, gpu_model, step
from bench.report import Report
from engine.borrowing import Loan
from engine.cuda.memory import CudaKvCache
from engine.errors import InternalError, TransferError
from engine.kernels import triton_kv
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from kv_transfer.identity import PeerIdentity
from kv_transfer.link import LinkSettings
from kv_transfer.receiver import KvReceiver
from kv_transfer.reservation import ExpectedBlock, ReservationTable
from kv_transfer.sender import KvSender, OutgoingBlock, TicketInfo
from kv_transfer.stats import TransferStats

WAIT_S = 60.0


def check(report: Report, bench: Bench) -> None:
    _measure_copies(report, bench)
    _hand_over(report, bench)


def _measure_copies(report: Report, bench: Bench) -> None:
    """Scattered blocks from pool to pool by our kernel, against a plain copy of as many bytes."""
    num_blocks, block_bytes = (6, 4096) if bench.tiny else (512, 1 << 21)
    source, target = (
        torch.randint(0, 255, (num_blocks, block_bytes), dtype=torch.uint8, device=bench.where) for _ in range(2)
    )
    ids, into = (torch.randperm(num_blocks, device=bench.where) for _ in range(2))
    ours = bench.seconds(lambda _: triton_kv.copy_blocks(source, target, ids, into))
    plain = bench.seconds(lambda _: target.copy_(source))
    report.figures["pool_to_pool_copy_share"] = plain / ours


def _hand_over(report: Report, bench: Bench) -> None:
    """One worker computes a prompt, its blocks go over a link, the other goes on: both draw the same tokens."""
    length, new_tokens = (18, 2) if bench.tiny else (333, 16)
    config = config_of(1, (4, 2), 16, 48, 64) if bench.tiny else config_of(6, (9, 3), 64, 1536, 8192)
    workers = [
        gpu_model(bench, config, torch.bfloat16, num_blocks=64, max_num_seqs=1, max_model_len=1024) for _ in range(2)
    ]
    (first, first_pool), (second, second_pool) = workers
    tables = [random.Random(seed).sample(range(64), -(-(length + new_tokens) // BLOCK_SIZE)) for seed in (1, 2)]
    tokens = [random.Random(3).randrange(config.vocab_size) for _ in range(length)]
    tokens.append(int(step(first, first_pool, tables[:1], [(0, tokens, 0, length)]).argmax()))
    num_blocks = -(-length // BLOCK_SIZE)
    began = time.perf_counter()
    _send(first_pool, second_pool, tables[0][:num_blocks], tables[1][:num_blocks], bench)
    seconds = time.perf_counter() - began
    drawn: list[list[int]] = []
    for model, pool, table in ((first, first_pool, tables[0]), (second, second_pool, tables[1])):
        sequence = list(tokens)
        for _ in range(new_tokens - 1):
            end = len(sequence)
            sequence.append(int(step(model, pool, [table], [(0, sequence, end - 1, end)]).argmax()))
        drawn.append(sequence[length:])
    report.figures["link_tokens_differing"] = sum(a != b for a, b in zip(*drawn, strict=True))
    report.notes.append(
        f"link: {num_blocks} blocks of {first_pool.layout.block_bytes} bytes over tcp through host memory, "
        f"{1e3 * seconds:.0f} ms with its handshake; nccl and cuda_ipc between cards: not run by this script"
    )
    for pool in (first_pool, second_pool):
        pool.close()


def _send(source: CudaKvCache, target: CudaKvCache, sources: list[int], slots: list[int], bench: Bench) -> None:
    """Blocks of one pool into slots of another: gathered, sent, verified, scattered."""
    layout, count = source.layout, len(sources)
    ends = KvCache(layout, count), KvCache(layout, count)
    order = torch.arange(count, device=bench.where)
    staging = torch.empty(count, layout.block_bytes, dtype=torch.uint8, device=bench.where)
    triton_kv.copy_blocks(source.by_block, staging, torch.tensor(sources, device=bench.where), order)
    _bytes_of(ends[0]).copy_(staging)
    _over_a_link(ends[0], ends[1])
    staging.copy_(_bytes_of(ends[1]))
    triton_kv.copy_blocks(staging, target.by_block, order, torch.tensor(slots, device=bench.where))
    for end in ends:
        end.close()


def _bytes_of(kv: KvCache) -> torch.Tensor:
    by_byte = torch.frombuffer(kv.block(0).obj, dtype=torch.uint8, count=kv.nbytes)
    return by_byte.view(kv.num_blocks, kv.layout.block_bytes)


class _Ends:
    """Hears of both ends of the transfer."""

    def __init__(self) -> None:
        self.sent: queue.Queue[str] = queue.Queue()

    def transfer_done(self, request_id: str, stats: TransferStats) -> None:
        self.sent.put("")

    def transfer_failed(self, request_id: str, error: Exception) -> None:
        self.sent.put(f"{type(error).__name__}: {error}")

    def blocks_adopted(self, ticket_id: str, ordinals: Sequence[int], num_bytes: int, transport: str) -> None:
        """Of the sender's word: it hears when all are."""

    def blocks_lent(self, loan: Loan) -> None:
        self.sent.put("a block was lent")

    def block_doubted(self, block: OutgoingBlock) -> None:
        """The failed transfer says so too."""

    def loan_over(self, request_id: str, count: int) -> None:
        self.sent.put("a loan is over that never was")

    def block_refused(self, ticket_id: str, ordinal: int, error: TransferError) -> None:
        self.sent.put(f"block {ordinal}: {error}")

    def writes_quiet(self, ticket_id: str, slots: Collection[int]) -> None:
        """Nobody waits for quiet slots here."""

    def link_lost(self, ticket_ids: Collection[str], error: TransferError) -> None:
        self.sent.put(str(error))


def _over_a_link(source: KvCache, target: KvCache) -> None:
    """All blocks of one pool into the same of the other. Raises `InternalError` if they do not arrive."""
    ends, table = _Ends(), ReservationTable("1")
    settings = LinkSettings(transports=("tcp",))
    receiver = KvReceiver(_identity("second", target.layout), target, table, ends, settings=settings)
    sender = KvSender(_identity("first", source.layout), source, ends, settings=settings)
    receiver.start()
    try:
        hashes = [sha256(b"%d" % ordinal).digest() for ordinal in range(source.num_blocks)]
        expected = [ExpectedBlock(ordinal=n, slot=n, generation=1, hash=h) for n, h in enumerate(hashes)]
        table.open("t", expected, time.monotonic() + WAIT_S)
        info = TicketInfo(
            ticket_id="t",
            worker_id="second",
            incarnation="1",
            endpoint=receiver.endpoint(),
            blocks={n: (n, 1) for n in range(source.num_blocks)},
            lease_s=5.0,
        )
        sender.open("t", info, time.monotonic() + WAIT_S)
        sender.send("t", [OutgoingBlock(n, n, h) for n, h in enumerate(hashes)])
        sender.finish("t")
        if error := ends.sent.get(timeout=WAIT_S):
            raise InternalError(f"the hand-over failed: {error}")
    finally:
        sender.close(WAIT_S)
        receiver.close(WAIT_S)


def _identity(worker_id: str, layout: KvLayout) -> PeerIdentity:
    return PeerIdentity(worker_id=worker_id, incarnation="1", fingerprint=sha256(b"random").digest(), layout=layout)
