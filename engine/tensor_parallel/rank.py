"""A rank above 0: computes its share of each batch that rank 0 tells it, and ends with it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.errors import EngineError, ProtocolError
from engine.kv_layout import KvLayout
from engine.model.decoder import DecoderModel
from engine.model.registry import load_shard
from engine.tensor_parallel.group import RankGroup
from engine.tensor_parallel.head_slice import HeadSlice
from engine.tensor_parallel.meeting import store_of_rank
from engine.tensor_parallel.messages import Begin, Channel, Done, Failed, Join, Message, Pool, Step
from engine.tensor_parallel.shards import Shard


def run(channel: Channel) -> int:
    """Until rank 0 is gone; returns the exit status. Whatever fails ends the rank, and so the worker."""
    try:
        _run(channel)
    except (EngineError, RuntimeError, OSError) as error:
        try:
            channel.send(Failed(reason=f"{type(error).__name__}: {error}"))
        except OSError:
            return 1  # nobody is left to be told
        return 1
    return 0


def _run(channel: Channel) -> None:
    begin = channel.receive()
    if begin is None:
        return
    if not isinstance(begin, Begin):
        raise _unexpected(begin)
    torch.set_num_threads(begin.num_threads)
    shard = Shard(begin.rank, begin.size)
    weights = load_shard(Path(begin.model_path), begin.dtype, shard)
    channel.send(Done())
    kv: HeadSlice | None = None
    model: DecoderModel | None = None
    while (message := channel.receive()) is not None:
        match message:
            case Join() if model is None:
                group = RankGroup.join(store_of_rank(channel), shard.rank, shard.size)
                model = DecoderModel(weights.config, weights, group.sum)
                channel.send(Done())
            case Pool() if kv is None:
                fd = channel.receive_fd()
                kv = HeadSlice.map(shard, KvLayout.from_wire(message.layout), message.num_blocks, fd)
                os.close(fd)
                channel.send(Done())
            case Step() if model is not None and kv is not None:
                model.forward(message.batch(), kv)
            case _:
                raise _unexpected(message)


def _unexpected(message: Message) -> ProtocolError:
    return ProtocolError(f"{type(message).__name__}, which a rank does not expect now")
