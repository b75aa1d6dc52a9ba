"""A prefill worker's end of a link in a process of its own, for tests that kill and stop it.

Needs the checkout and this folder on PYTHONPATH, and as arguments: `large` or `small` for its blocks, the transports,
and perhaps its key in hexadecimal digits and a layout of its own. Told line by line on standard input, `NAME JSON`;
says `ready`, and then `done REQUEST` or `failed REQUEST CLASS MESSAGE`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from kv_links import LARGE_LAYOUT, LAYOUT, NUM_LARGE_BLOCKS, MemoryPool, block_hash, identity, in_time, outgoing, ticket

from engine.cluster_key import ClusterKey
from engine.errors import EngineError
from engine.kv_layout import KvLayout
from kv_transfer.link import LinkSettings
from kv_transfer.sender import KvSender, OutgoingBlock
from kv_transfer.stats import TransferStats

FILL_SEED = 7


class Printer:
    def transfer_done(self, request_id: str, stats: TransferStats) -> None:
        print("done", request_id, flush=True)

    def transfer_failed(self, request_id: str, error: EngineError) -> None:
        print("failed", request_id, type(error).__name__, error, flush=True)

    def block_doubted(self, block: OutgoingBlock) -> None:
        """Said by the failed transfer too."""

    def loan_over(self, request_id: str, count: int) -> None:
        print("over", request_id, count, flush=True)


def main() -> None:
    size, transports, key, layout = (*sys.argv[1:], "", "")[:4]
    if size == "large":
        pool = MemoryPool(LARGE_LAYOUT, NUM_LARGE_BLOCKS)
        pool.number()
    else:
        pool = MemoryPool(KvLayout.from_wire(json.loads(layout)) if layout else LAYOUT)
        pool.fill(FILL_SEED)
    settings = LinkSettings(transports=tuple(transports.split(",")), key=ClusterKey.parse(key) if key else None)
    sender = KvSender(identity("prefill-0", layout=pool.layout), pool, Printer(), settings)
    print("ready", flush=True)
    for line in sys.stdin:
        command, _, text = line.partition(" ")
        told = json.loads(text)
        if command == "open":
            slots = {int(ordinal): slot for ordinal, slot in told["slots"].items()}
            info = ticket(told["ticket_id"], bytes.fromhex(told["endpoint"]), slots, told["generation"])
            if told.get("layout"):
                info = replace(info, layout=KvLayout.from_wire(told["layout"]))
            sender.open(told["ticket_id"], info, in_time())
        elif command == "send":
            sender.send(told["ticket_id"], outgoing(told["ordinals"]))
        elif command == "send_pieces":
            pieces = [OutgoingBlock(n, first, block_hash(n), tuple(more)) for n, first, *more in told["pieces"]]
            sender.send(told["ticket_id"], pieces)
        elif command == "close_links":
            sender.close(timeout_s=10.0)
            print("closed", flush=True)
        elif command == "left":
            sender.check_integrity()
            print("left", sender.stats().transfers_open, len(os.listdir("/proc/self/fd")), flush=True)
        else:
            sender.finish(told["ticket_id"])
    sender.close(timeout_s=10.0)


if __name__ == "__main__":
    main()
