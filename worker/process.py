"""The process around one worker: build, serve, say so in one line, stop within a bound. Knows no role."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import uvloop

from engine.errors import ConfigError, EngineError
from kvrelay._logs import log_to_stderr
from worker.config import WorkerConfig
from worker.server import WorkerServer
from worker.session import Role

logger = logging.getLogger(__name__)

STOP_MARGIN_S = 10.0
"""Of a stop, beyond the drain time: after that the process ends whatever its threads do."""
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RunningWorker:
    """One worker of this process: its role and its server. Used by `run_worker` and by the Ray actors."""

    def __init__(self, config: WorkerConfig, build: Callable[[WorkerConfig], Role]) -> None:
        self._config = config
        self._build = build
        self._stack = AsyncExitStack()

    async def start(self) -> dict[str, Any]:
        """Build and serve; returns the ready report. If it fails, or is cancelled, nothing is left running."""
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            # On a thread: loading a model takes seconds, and Ray's calls must be answered meanwhile.
            with _no_garbage():
                role = await asyncio.to_thread(self._build, self._config)
            stack.push_async_callback(role.stop)
            await role.start()
            server = WorkerServer(role, self._config)
            address = await server.start()
            stack.push_async_callback(server.stop, self._config.drain_s)
            self._stack = stack.pop_all()
        welcome = role.welcome()
        return {
            "worker_id": welcome.worker_id,
            "incarnation": welcome.incarnation,
            "role": welcome.role,
            "address": address,
            "pid": welcome.pid,
            "num_blocks": welcome.num_blocks,
            "block_size": welcome.block_size,
            "pool": str(role.pool()),
            "authenticates": self._config.cluster_key is not None,
            "native": welcome.native,
            "kernels": welcome.kernels,
            "device": welcome.device,
            "tensor_parallel_size": self._config.engine.tensor_parallel_size,
            "timings": {**role.timings(), "total_s": round(time.monotonic() - started, 3)},
        }

    async def stop(self) -> None:
        """Drain, end the sessions, give everything back. Idempotent."""
        await self._stack.aclose()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Importing torch and building an engine make objects that stay: looking for garbage among them costs 0.4 s here,
    and would go on costing, in every full collection between two tokens."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_worker(build: Callable[[WorkerConfig], Role], config: WorkerConfig) -> None:
    """Run one worker until SIGTERM or SIGINT. Exits 1 with one line on stderr if it cannot start."""
    log_to_stderr(config.worker_id, config.log_format)
    # Until it serves there is nothing to give back that the kernel does not take, and a build cannot be interrupted.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    worker = RunningWorker(config, build)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signal(worker, config.drain_s + STOP_MARGIN_S))
    except EngineError as error:
        print(f"{config.worker_id}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


async def _serve_until_signal(worker: RunningWorker, stop_limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    asked_to_stop = asyncio.Event()
    ready = await worker.start()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, asked_to_stop.set)
    print(json.dumps(ready), flush=True)  # who reads it may ask to stop at once
    await asked_to_stop.wait()
    for number in _STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)  # whoever asks twice does not want to wait
    _exit_after(stop_limit_s)
    await worker.stop()


def _exit_after(limit_s: float) -> None:
    # A thread stuck in native code would keep the interpreter, and so the worker's memory and port, for ever.
    def give_up() -> None:
        sys.stderr.write(f"not stopped within {limit_s:.0f} s: ending the process\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()


def exit_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `number` to this process when its parent dies. Raises `ConfigError` where it cannot."""
    if sys.platform != "linux":
        raise ConfigError("--exit-with-parent needs Linux")
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise ConfigError(f"--exit-with-parent: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)


def exit_with_raylet() -> None:
    """For an actor, whose parent the raylet is. Ray's own watch takes a dead raylet that nobody reaped for alive.

    SIGKILL, because an actor's main thread, which would handle another signal, waits in native code for ever.
    """
    if sys.platform == "linux":
        exit_with_parent(signal.SIGKILL)
