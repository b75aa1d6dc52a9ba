"""Ranks of a tensor-parallel model as threads of this process: what processes do, in milliseconds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import KvCache
from engine.model.decoder import DecoderModel
from engine.model.registry import load_shard
from engine.model_config import load_model_config
from engine.tensor_parallel import rank
from engine.tensor_parallel.head_slice import HeadSlice
from engine.tensor_parallel.messages import Channel
from engine.tensor_parallel.ranks import Ranks
from engine.tensor_parallel.shards import Shard

BOUND_S = 30.0


class RankThreads(Ranks):
    """With everything real but the processes: sockets, messages, Gloo, mappings of the pool's memory."""

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._channels.append(Channel(ours))

        def run() -> None:
            with theirs:
                rank.run(Channel(theirs))

        threading.Thread(target=run, daemon=True).start()


class LockstepModel:
    """A `Model` whose parts meet at a barrier: no sockets and no Gloo, so that it runs over any pool."""

    def __init__(self, folder: Path, size: int, dtype: str = "float32") -> None:
        self.config: ModelConfig = load_model_config(folder)
        self._size = size
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=BOUND_S)
        weights = [load_shard(folder, dtype, Shard(rank, size)) for rank in range(size)]
        self._models = [DecoderModel(each.config, each, self._reduce(rank)) for rank, each in enumerate(weights)]

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        def compute(rank: int) -> torch.Tensor:
            mine = batch if rank == 0 else replace(batch, sample_rows=[])
            return self._models[rank].forward(
                mine, HeadSlice.of(Shard(rank, self._size), kv.layout, kv.pool, kv.scales)
            )

        with ThreadPoolExecutor(self._size) as threads:
            logits, *_ = threads.map(compute, range(self._size))
        return logits

    def _reduce(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def reduce(partial: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = partial
            self._barrier.wait()
            total = torch.stack(self._parts).float().sum(0)
            self._barrier.wait()
            return total

        return reduce
