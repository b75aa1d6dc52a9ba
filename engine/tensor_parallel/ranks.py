"""Owns the processes of the ranks above 0: starts them, watches them, and ends with them."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError, ProtocolError, WorkerLost
from engine.kv_cache import KvCache
from engine.model.decoder import DecoderModel
from engine.model.registry import load_shard
from engine.model_config import load_model_config
from engine.tensor_parallel.group import TIMEOUT_S, RankGroup
from engine.tensor_parallel.meeting import store_of_first
from engine.tensor_parallel.messages import Begin, Channel, Done, Failed, Join, Message, Pool
from engine.tensor_parallel.model import TensorParallelModel
from engine.tensor_parallel.shards import Shard, check_shards

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For each rank to import torch and load its weights."""
_STOP_S = 5.0
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR if sys.platform == "linux" else 0


def end_process(error: WorkerLost) -> None:
    """Where a rank is gone, its heads' KV is written no more: nothing that runs here can be finished, and the routers
    resume it elsewhere once this process is gone as well."""
    logger.critical("%s: %s", type(error).__name__, error)
    os._exit(1)


class Ranks:
    """Used by the thread that builds the engine, then by the engine thread, then by the one that stops the worker."""

    def __init__(self, config: EngineConfig, on_lost: Callable[[WorkerLost], None] = end_process) -> None:
        """Start the processes; they load their weights while the caller loads its own.

        `on_lost` is called, on any thread, when a rank is gone or does not answer after `watch`.
        Raises `ConfigError` if the model cannot be shared out so; then nothing was started.
        """
        self.size = config.tensor_parallel_size
        if sys.platform != "linux":
            raise ConfigError(f"tensor_parallel_size {self.size} needs Linux")
        check_shards(load_model_config(Path(config.model_path)), self.size)
        self._config = config
        self._on_lost = on_lost
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started, self._watching = threading.Event(), threading.Event()
        self._failure: OSError | None = None
        self._closing = False
        # The kernel ends a process with the thread that started it: this one lives as long as they shall.
        self._owner = threading.Thread(target=self._own, name="ranks", daemon=True)
        self._owner.start()
        self._started.wait()
        if self._failure is not None:
            self.close()
            raise WorkerLost(f"the ranks cannot be started: {self._failure}") from self._failure

    def load_model(self) -> TensorParallelModel:
        """The model, of which each rank has its share. Raises `ModelError`; `WorkerLost` if a rank fails."""
        config, shard = self._config, Shard(0, self.size)
        for rank, channel in enumerate(self._channels, 1):
            begin = Begin(
                rank=rank,
                size=self.size,
                model_path=str(Path(config.model_path).resolve()),
                dtype=config.dtype,
                num_threads=config.num_threads,
            )
            self._tell(rank, channel, begin)
        weights = load_shard(Path(config.model_path), config.dtype, shard)
        self._all_done()
        for rank, channel in enumerate(self._channels, 1):
            self._tell(rank, channel, Join())
        try:
            group = RankGroup.join(store_of_first(self._channels, TIMEOUT_S), 0, self.size)
        except (RuntimeError, OSError, ProtocolError) as error:
            raise WorkerLost(f"the {self.size} ranks do not meet: {error}") from error
        self._all_done()
        whole = load_model_config(Path(config.model_path))
        return TensorParallelModel(
            whole, DecoderModel(weights.config, weights, group.sum), shard, self._channels, self._lost
        )

    def share_pool(self, kv: KvCache) -> None:
        """Have the ranks map the pool, before it is sealed against other writers. Raises `WorkerLost`."""
        for rank, channel in enumerate(self._channels, 1):
            self._tell(rank, channel, Pool(layout=kv.layout.to_wire(), num_blocks=kv.num_blocks), kv.fd)
        self._all_done()

    def watch(self) -> None:
        """From now on the end of a rank is told to `on_lost`, whatever goes on here."""
        for channel in self._channels:
            channel.connection.settimeout(TIMEOUT_S)
        self._watching.set()

    def close(self) -> None:
        """End the processes and wait for that. No step may be under way. Idempotent."""
        self._closing = True
        self._watching.set()
        for channel in self._channels:
            if channel.connection.fileno() >= 0:
                channel.connection.shutdown(socket.SHUT_RDWR)
        self._owner.join()
        for channel in self._channels:
            channel.close()

    def _own(self) -> None:
        try:
            for _ in range(1, self.size):
                self._start()
        except OSError as error:
            self._failure = error
        self._started.set()
        self._watching.wait()
        poll = select.poll()
        for channel in self._channels:
            poll.register(channel.connection, _GONE)
        gone = [] if self._closing else [fd for fd, _ in poll.poll()]
        if not self._closing:
            numbers = [i for i, channel in enumerate(self._channels) if channel.connection.fileno() in gone]
            self._on_lost(WorkerLost(self._how(numbers[0])))
        for process in self._processes:
            self._end(process)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._channels.append(Channel(ours))
            ours.settimeout(START_TIMEOUT_S)
            command = [sys.executable, "-m", "engine.tensor_parallel", str(theirs.fileno())]
            nowhere = subprocess.DEVNULL  # standard output is the worker's, for its ready line
            process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, pass_fds=[theirs.fileno()])
            self._processes.append(process)

    def _tell(self, rank: int, channel: Channel, message: Message, fd: int | None = None) -> None:
        try:
            channel.send(message, fd)
        except OSError as error:
            raise WorkerLost(f"rank {rank} of {self.size} cannot be told {type(message).__name__}: {error}") from error

    def _all_done(self) -> None:
        for rank, channel in enumerate(self._channels, 1):
            try:
                answer = channel.receive()
            except OSError as error:
                raise WorkerLost(f"rank {rank} of {self.size} does not answer: {error}") from error
            if isinstance(answer, Failed):
                raise WorkerLost(f"rank {rank} of {self.size}: {answer.reason}")
            if answer is None:
                raise WorkerLost(self._how(rank - 1))
            if not isinstance(answer, Done):
                raise WorkerLost(f"rank {rank} of {self.size} says {type(answer).__name__}")

    def _lost(self, error: WorkerLost) -> None:
        if not self._closing:
            self._on_lost(error)

    def _how(self, number: int) -> str:
        try:
            last = self._channels[number].receive()
        except (OSError, ProtocolError):
            last = None  # it was killed in the middle of something
        if isinstance(last, Failed):
            return f"rank {number + 1} of {self.size}: {last.reason}"
        try:
            status = f"with status {self._processes[number].wait(1.0)}"
        except subprocess.TimeoutExpired:
            status = "or has closed its socket"
        return f"rank {number + 1} of {self.size} has ended, {status}"

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
