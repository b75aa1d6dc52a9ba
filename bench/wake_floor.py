"""How long it takes at least until a thread of another process hears something: a few bytes over a Unix socket, between
two threads that do nothing else. No hand-over between Python processes can be faster.

The other process is this module, run with the name of the socket; it is told when by a line on standard input.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from queue import Queue

WAIT_S = 20.0
_TIME = struct.Struct("d")


def measure(rounds: int) -> list[float]:
    """Seconds of each, from before the one sends until the other has received."""
    name = b"\0kvrelay-floor-" + secrets.token_hex(8).encode()
    took = Queue[float]()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        listening.settimeout(WAIT_S)
        command = [sys.executable, "-m", "bench.wake_floor", name[1:].decode()]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            sock, _ = listening.accept()
            with sock:
                sock.settimeout(None)
                hearing = threading.Thread(target=_hear, args=(sock, took), daemon=True)
                hearing.start()
                assert other.stdin is not None
                seconds = []
                for _ in range(rounds):
                    other.stdin.write(b"\n")
                    other.stdin.flush()
                    seconds.append(took.get(timeout=WAIT_S))
                other.stdin.close()
                hearing.join(WAIT_S)
    return seconds


def floor_us(rounds: int) -> float:
    return 1e6 * statistics.median(measure(rounds))


def _hear(sock: socket.socket, took: Queue[float]) -> None:
    while sent := sock.recv(_TIME.size):
        took.put(time.perf_counter() - _TIME.unpack(sent)[0])


def main() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(b"\0" + sys.argv[1].encode())
        for _ in sys.stdin:
            sock.send(_TIME.pack(time.perf_counter()))


if __name__ == "__main__":
    main()
