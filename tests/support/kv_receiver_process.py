"""A decode worker's end of a link in a process of its own, with large blocks, for tests that kill and stop it.

Needs the checkout and this folder on PYTHONPATH. Says `ready ENDPOINT`; is told `expect JSON` on standard input and
answers `expecting`; says `writing` before each block that it gets.
"""

from __future__ import annotations

import json
import sys

from kv_links import LARGE_LAYOUT, NUM_LARGE_BLOCKS, SETTINGS, MemoryPool, decode_side


def main() -> None:
    pool = MemoryPool(LARGE_LAYOUT, NUM_LARGE_BLOCKS, borrows=True)
    with decode_side(SETTINGS, pool) as decode:
        pool.before_block = lambda block: print("writing", flush=True)
        print("ready", decode.receiver.endpoint().hex(), flush=True)
        for line in sys.stdin:
            told = json.loads(line.partition(" ")[2])
            decode.expect(told["ticket_id"], told["slots"])
            print("expecting", flush=True)


if __name__ == "__main__":
    main()
