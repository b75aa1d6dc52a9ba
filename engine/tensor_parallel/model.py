"""Rank 0's model: to the engine a model like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.errors import WorkerLost
from engine.kv_cache import KvCache
from engine.model.decoder import DecoderModel
from engine.tensor_parallel.head_slice import HeadSlice
from engine.tensor_parallel.messages import Channel, Step
from engine.tensor_parallel.shards import Shard


class TensorParallelModel:
    """A `Model`. One thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        part: DecoderModel,
        shard: Shard,
        channels: Sequence[Channel],
        on_lost: Callable[[WorkerLost], None],
    ) -> None:
        """`config` of the whole model, `part` of rank 0. `on_lost`: see `Ranks`."""
        self.config = config
        self._part = part
        self._shard = shard
        self._channels = channels
        self._on_lost = on_lost

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """See `Model`. Raises `WorkerLost`, after `on_lost`, if a rank is gone or does not come to a sum in time: then
        the ranks are no longer in step, and no further batch can be computed."""
        try:
            step = Step.of(batch)
            for channel in self._channels:
                channel.send(step)
            whole = replace(batch, control=None)  # the ranks cannot all stop in front of the same layer
            return self._part.forward(whole, HeadSlice.of(self._shard, kv.layout, kv.pool, kv.scales))
        except (RuntimeError, OSError) as error:  # of torch and Gloo; of the sockets
            reason = str(error).partition("\n")[0] or type(error).__name__
            lost = WorkerLost(f"a step on {self._shard.size} ranks failed: {reason}")
            self._on_lost(lost)
            raise lost from error
