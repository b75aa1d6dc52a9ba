"""`python -m engine.tensor_parallel SOCKET`: a rank above 0, started by `ranks.py` with this descriptor."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    # Whoever stops a whole group of processes means rank 0, which may still need us for what it finishes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The socket's end says that rank 0 is gone, but only to one that runs and reads: not in a sum, not when frozen.
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    connection = socket.socket(fileno=int(sys.argv[1]))
    if os.getppid() != parent:  # it died before the kernel knew
        return 1
    # Only now: to import torch takes seconds.
    from engine.tensor_parallel.messages import Channel
    from engine.tensor_parallel.rank import run

    return run(Channel(connection))


if __name__ == "__main__":
    sys.exit(main())
