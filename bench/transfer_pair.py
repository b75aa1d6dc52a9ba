"""The prefill worker's end of `bench.transfer`, in a process of its own, and the parent's handle on it.

Told line by line on standard input, in JSON; answers each line with one: the seconds from the first block's hand-over
to the sender to the last acknowledgement.
"""

from __future__ import annotations

import ctypes
import json
import queue
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import numpy as np

from engine.errors import EngineError, InternalError
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.native import build
from engine.native.blocks import NativeBlockCopier
from kv_transfer.digest import BlockCopier
from kv_transfer.identity import ADOPT, SHM, TCP, PeerIdentity
from kv_transfer.link import LinkSettings
from kv_transfer.sender import BlockColumns, KvSender, OutgoingBlock, TicketInfo
from kv_transfer.stats import TransferStats

ANSWER_TIMEOUT_S = 60.0
ALL = (ADOPT, SHM, TCP)
GEOMETRIES = {
    "360k": KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16"),
    "2m": KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"),
}
"""SmolLM2-135M's blocks, and those of a model of 8 B parameters."""


class UncheckedCopier(NativeBlockCopier):
    """Copies and digests nothing: what is left of a transfer's time without digests."""

    def _native(
        self, count: int, length: int, targets: int, sources: int, digests: ctypes.Array[ctypes.c_char] | None
    ) -> None:
        super()._native(count, length, targets, sources, None)

    def _run(self, targets: Sequence[int] | None, sources: Sequence[int], length: int) -> list[bytes]:
        if targets is not None:
            self._call(targets, sources, length, None)
        return [bytes(16)] * len(sources)


def copier(cache: str, checked: bool) -> BlockCopier:
    library = build.load("blocks.c", Path(cache))
    return NativeBlockCopier(library) if checked else UncheckedCopier(library)


def identity(worker_id: str, geometry: str) -> PeerIdentity:
    layout = GEOMETRIES[geometry]
    return PeerIdentity(worker_id=worker_id, incarnation="1", fingerprint=bytes(32), layout=layout)


def block_hash(ordinal: int) -> bytes:
    return sha256(b"block %d" % ordinal).digest()


def scattered(count: int, pool: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(pool), count)


def fill(kv: KvCache, seed: int) -> None:
    content = random.Random(seed).randbytes(kv.layout.block_bytes)
    for block in range(kv.num_blocks):
        kv.block(block)[:] = content
        kv.block(block)[:8] = block.to_bytes(8, "little")


def write(kv: KvCache, blocks: Sequence[int]) -> None:
    """Every byte of them again, as computing does."""
    for block in blocks:
        there = kv.block(block)
        there[:] = bytes(there)


def prompt(sources: Sequence[int], generation: int, lent: int) -> list[BlockColumns | OutgoingBlock]:
    """As a prefill worker hands over the blocks of one: full ones as columns, and where they are lent the last one by
    itself, as it is copied."""
    count = lent or len(sources)
    full = BlockColumns(
        np.arange(count),
        np.array(sources[:count]),
        np.full(count, 0 if lent else generation, dtype=np.uint64),  # of lent ones the receiver sees 0: nobody writes
        b"".join(map(block_hash, range(count))),
        bool(lent),
    )
    return [full, *(OutgoingBlock(n, sources[n], block_hash(n), (), generation) for n in range(count, len(sources)))]


@dataclass(frozen=True, slots=True)
class Transfer:
    ticket_id: str
    endpoint: bytes
    sources: Sequence[int]
    slots: Sequence[int]
    checked: bool = True
    generation: int = 0
    """Of the sources: says whether their digests are known."""
    lent: int = 0
    """The first so many blocks are not sent, but may be read in the sender's pool."""


@dataclass(frozen=True, slots=True)
class Took:
    """What one transfer took."""

    began: float
    """`time.perf_counter()`, which is the same in all processes of a machine."""
    seconds: float


class SenderProcess:
    """The other process. Leaving the context ends it."""

    def __init__(self, geometry: str, num_blocks: int, cache: str) -> None:
        command = [sys.executable, "-m", "bench.transfer_pair", geometry, str(num_blocks), cache]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        self.answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.communicate(timeout=ANSWER_TIMEOUT_S)

    def open(self, transfer: Transfer) -> None:
        """Connect, if need be, and say that the ticket is wanted."""
        self._tell(
            do="open",
            ticket_id=transfer.ticket_id,
            endpoint=transfer.endpoint.hex(),
            slots=list(transfer.slots),
            checked=transfer.checked,
        )
        self.answer()

    def produce(self, sources: Sequence[int], generation: int, checked: bool, digested: bool) -> float:
        """Let it write blocks, and take their digests, as a prefill worker does behind a step. Returns
        the seconds that the digests took."""
        told = {"sources": list(sources), "generation": generation, "checked": checked, "digested": digested}
        self._tell(do="produce", ticket_id="", **told)
        return self.answer().seconds

    def begin(self, transfer: Transfer) -> None:
        self._tell(
            do="send",
            ticket_id=transfer.ticket_id,
            sources=list(transfer.sources),
            generation=transfer.generation,
            checked=transfer.checked,
            lent=transfer.lent,
        )

    def answer(self) -> Took:
        """Of what was begun."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(ANSWER_TIMEOUT_S) else ""
        if not line:
            raise InternalError("the sending process does not answer")
        told = json.loads(line)
        if told["error"]:
            raise InternalError(f"the transfer failed: {told['error']}")
        return Took(float(told["began"]), float(told["seconds"]))

    def kill(self) -> None:
        self._process.kill()

    def _tell(self, **what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


class _Ends:
    """A `SenderListener` that notes when and how transfers end."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[float, str]] = queue.Queue()

    def transfer_done(self, request_id: str, stats: TransferStats) -> None:
        self.queue.put((time.perf_counter(), ""))

    def transfer_failed(self, request_id: str, error: EngineError) -> None:
        self.queue.put((time.perf_counter(), f"{type(error).__name__}: {error}"))

    def block_doubted(self, block: OutgoingBlock) -> None:
        """The failed transfer says so too."""

    def loan_over(self, request_id: str, count: int) -> None:
        """Nobody writes into these pools."""


@click.command()
@click.argument("geometry")
@click.argument("num_blocks", type=int)
@click.argument("cache")
def main(geometry: str, num_blocks: int, cache: str) -> None:
    kv = KvCache(GEOMETRIES[geometry], num_blocks, lent_share=1.0)
    fill(kv, seed=1)
    ends = _Ends()
    senders = {
        checked: KvSender(
            identity("prefill-0", geometry), kv, ends, LinkSettings(transports=ALL), copier=copier(cache, checked)
        )
        for checked in (True, False)
    }
    _say(0.0)
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        sender, ticket_id = senders[told["checked"]], told["ticket_id"]
        if told["do"] == "produce":
            write(kv, told["sources"])
            began = time.perf_counter()
            sender.digest([(source, told["generation"]) for source in told["sources"] if told["digested"]])
            _say(time.perf_counter() - began)
        elif told["do"] == "open":
            info = TicketInfo(
                ticket_id=ticket_id,
                worker_id="decode-0",
                incarnation="1",
                endpoint=bytes.fromhex(told["endpoint"]),
                blocks={ordinal: (slot, 1) for ordinal, slot in enumerate(told["slots"])},
                lease_s=5.0,
            )
            sender.open(ticket_id, info, time.monotonic() + ANSWER_TIMEOUT_S)
            _say(0.0)
        else:
            blocks = prompt(told["sources"], told["generation"], told["lent"])
            began = time.perf_counter()
            sender.send(ticket_id, blocks, finish=True)
            ended, error = ends.queue.get(timeout=ANSWER_TIMEOUT_S)
            _say(ended - began, error, began)


def _say(seconds: float, error: str = "", began: float = 0.0) -> None:
    print(json.dumps({"began": began, "seconds": seconds, "error": error}), flush=True)


if __name__ == "__main__":
    main()
