"""A prefill worker's end of a link in a process of its own, for tests that kill and stop it.

Needs the checkout and this folder on PYTHONPATH, and two arguments: `large` or `small` for its blocks, the transport.
Told line by line on standard input, `NAME JSON`; says `ready`, and then `done REQUEST` or `failed REQUEST CLASS`.
"""

from __future__ import annotations

import json
import sys

from kv_links import LARGE_LAYOUT, NUM_LARGE_BLOCKS, MemoryPool, identity, in_time, outgoing, ticket

from engine.errors import EngineError
from kv_transfer.link import LinkSettings
from kv_transfer.sender import KvSender
from kv_transfer.stats import TransferStats

FILL_SEED = 7


class Printer:
    def transfer_done(self, request_id: str, stats: TransferStats) -> None:
        print("done", request_id, flush=True)

    def transfer_failed(self, request_id: str, error: EngineError) -> None:
        print("failed", request_id, type(error).__name__, flush=True)


def main() -> None:
    size, transport = sys.argv[1:]
    if size == "large":
        pool = MemoryPool(LARGE_LAYOUT, NUM_LARGE_BLOCKS)
        pool.number()
    else:
        pool = MemoryPool()
        pool.fill(FILL_SEED)
    settings = LinkSettings(transports=(transport,))
    sender = KvSender(identity("prefill-0", layout=pool.layout), pool, Printer(), settings)
    print("ready", flush=True)
    for line in sys.stdin:
        command, _, text = line.partition(" ")
        told = json.loads(text)
        if command == "open":
            slots = {int(ordinal): slot for ordinal, slot in told["slots"].items()}
            info = ticket(told["ticket_id"], bytes.fromhex(told["endpoint"]), slots, told["generation"])
            sender.open(told["ticket_id"], info, in_time())
        elif command == "send":
            sender.send(told["ticket_id"], outgoing(told["ordinals"]))
        else:
            sender.finish(told["ticket_id"])
    sender.close(timeout_s=10.0)


if __name__ == "__main__":
    main()
