"""NIXL and mooncake on the cell `2m_32` of `bench.transfer`, in their own environment: imports nothing of ours.

Argument: nixl or mooncake. Prints one JSON object of figures. Two processes, each with a pool of 320 blocks of 2 MiB;
the source writes 32 scattered ones into scattered slots of the target, which then answers one byte. Before each
transfer the source copies the same blocks by memcpy to another pool.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BLOCK_BYTES = 2 * 1024 * 1024
POOL_BLOCKS = 320
COUNT = 32
RUNS = 9
TIMEOUT_S = 60.0
SOURCES = random.Random(3).sample(range(POOL_BLOCKS), COUNT)
SLOTS = random.Random(4).sample(range(POOL_BLOCKS), COUNT)


class Pool:
    def __init__(self, mark: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, POOL_BLOCKS * BLOCK_BYTES))
        for block in range(POOL_BLOCKS):
            self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes([mark]) * BLOCK_BYTES
            self.memory[block * BLOCK_BYTES] = block % 256
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.nbytes = len(self.memory)

    def addresses(self, blocks: list[int]) -> list[int]:
        return [self.address + block * BLOCK_BYTES for block in blocks]


class Control:
    """Lines of JSON, and single bytes, between the two processes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(TIMEOUT_S)

    def swap(self, mine: dict[str, Any]) -> dict[str, Any]:
        self.sock.sendall(json.dumps(mine).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            line += self.sock.recv(1)
        theirs: dict[str, Any] = json.loads(line)
        return theirs

    def ping(self) -> None:
        self.sock.sendall(b"x")
        self.sock.recv(1)

    def pong(self) -> None:
        self.sock.recv(1)
        self.sock.sendall(b"y")


def nixl(control: Control, pool: Pool, is_source: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """(what a transfer is, what the target does meanwhile). Without progress threads, which cost it more on 2 cores."""
    import numpy as np
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"agent-{is_source}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool.address, pool.nbytes, 0, "")], "DRAM")
    theirs = control.swap({"metadata": agent.get_agent_metadata().hex(), "address": pool.address})
    name = agent.add_remote_agent(bytes.fromhex(theirs["metadata"]))
    name = name.decode() if isinstance(name, bytes) else name

    def descriptors(address: int) -> Any:
        return np.array([(address + n * BLOCK_BYTES, BLOCK_BYTES, 0) for n in range(POOL_BLOCKS)], dtype=np.uint64)

    def write() -> None:
        handle = agent.make_prepped_xfer(
            "WRITE", local, np.asarray(SOURCES, np.int32), remote, np.asarray(SLOTS, np.int32)
        )
        state = agent.transfer(handle)
        until = time.monotonic() + TIMEOUT_S
        while state == "PROC" and time.monotonic() < until:
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        handle.release()

    def progress() -> None:
        until = time.monotonic() + TIMEOUT_S
        while not select.select([control.sock], [], [], 0)[0] and time.monotonic() < until:
            agent.get_new_notifs()

    if is_source:
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors(pool.address), "DRAM")
        remote = agent.prep_xfer_dlist(name, descriptors(theirs["address"]), "DRAM")
    return write, progress


def mooncake(control: Control, pool: Pool, is_source: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(pool.address, pool.nbytes):
        raise RuntimeError("mooncake does not start")
    theirs = control.swap({"session": f"127.0.0.1:{engine.get_rpc_port()}", "address": pool.address})
    targets = [theirs["address"] + slot * BLOCK_BYTES for slot in SLOTS]

    def write() -> None:
        if status := engine.batch_transfer_sync_write(
            theirs["session"], pool.addresses(SOURCES), targets, [BLOCK_BYTES] * COUNT
        ):
            raise RuntimeError(f"the transfer ended with status {status}")

    return write, lambda: None


PEERS = {"nixl": nixl, "mooncake": mooncake}


def be_source(peer: str, control: Control) -> None:
    pool, other = Pool(1), Pool(2)
    write, _ = PEERS[peer](control, pool, True)
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    pairs = list(zip(other.addresses(SLOTS), pool.addresses(SOURCES), strict=True))
    memcpy, transfers = [], []
    for run in range(RUNS + 1):
        began = time.perf_counter()
        for target, source in pairs:
            copy(target, source, BLOCK_BYTES)
        copied = time.perf_counter()
        write()
        control.ping()
        if run:
            memcpy.append(copied - began)
            transfers.append(time.perf_counter() - copied)
    if not control.swap({})["equal"]:
        raise RuntimeError("the target holds other bytes")
    rel = statistics.median(memcpy) / statistics.median(transfers)
    print(json.dumps({f"{peer}_rel_2m_32": rel}), flush=True)


def be_target(peer: str, control: Control) -> None:
    pool = Pool(3)
    _keeps_the_engine, progress = PEERS[peer](control, pool, False)
    for _ in range(RUNS + 1):
        progress()
        control.pong()
    right = [bytes([source % 256]) + b"\1" * (BLOCK_BYTES - 1) for source in SOURCES]
    held = [pool.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] for slot in SLOTS]
    control.swap({"equal": all(a == b for a, b in zip(held, right, strict=True))})


def main() -> None:
    peer = sys.argv[1]
    if len(sys.argv) > 2:
        be_target(peer, Control(socket.socket(fileno=int(sys.argv[2]))))
        return
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, peer, str(theirs.fileno())]
    target = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
    try:
        theirs.close()
        be_source(peer, Control(ours))
    finally:
        target.kill()
        target.wait()


if __name__ == "__main__":
    main()
