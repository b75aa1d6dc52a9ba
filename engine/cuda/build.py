"""From a model's weights to a model and a pool on a card, the pool as large as measurement says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.cuda.decoder import GpuDecoder
from engine.cuda.device import Device
from engine.cuda.memory import CudaKvCache
from engine.cuda.model import GpuModel
from engine.cuda.plan import DEFAULT_UTILIZATION, GpuMemory, decode_step_bytes, pool_bytes
from engine.errors import ConfigError
from engine.kv_layout import KvLayout
from engine.model.decoder import DecoderWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    """Share of the card that this worker may take: weights, steps, graphs, KV."""
    num_blocks: int | None = None
    """Of the pool, whatever the memory; None: as many as fit."""
    num_host_blocks: int = 0


def build_gpu_model(
    config: ModelConfig,
    load: Callable[[DecoderWeights], None],
    dtype: torch.dtype,
    layout: KvLayout,
    limits: GpuLimits,
    device: Device,
) -> tuple[GpuModel, CudaKvCache]:
    """`load` fills the parameters, which are on the card already.

    The largest step is run once over a pool that just holds it, to see what it takes. Raises `ConfigError` naming the
    setting if what is left holds no block, or the card does not hold the weights, and whatever `load` raises; then
    torch has its memory back.
    """
    free, total = device.memory()
    try:
        weights = DecoderWeights(config, dtype, str(device.torch_device))
        load(weights)
        decoder = GpuDecoder(config, weights, limits.max_model_len, limits.max_num_seqs)
        num_blocks = limits.num_blocks
        if num_blocks is None:
            memory = GpuMemory(total, total - free, _peak(decoder, layout, limits, device))
            graphs = decode_step_bytes(config, limits.max_num_seqs, dtype.itemsize)
            budget = pool_bytes(memory, limits.gpu_memory_utilization, graphs, layout.block_bytes)
            num_blocks = budget // layout.block_bytes
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"device {device.name}: weights and a step do not fit into {free} free bytes") from error
    kv = CudaKvCache(layout, num_blocks, device, limits.num_host_blocks)
    return GpuModel(decoder, kv, device, limits.max_num_seqs, limits.max_model_len), kv


def _peak(decoder: GpuDecoder, layout: KvLayout, limits: GpuLimits, device: Device) -> int:
    """Bytes allocated at most, the weights included, in a step of as many tokens as a step may have."""
    num_tokens = min(limits.max_num_batched_tokens, limits.max_model_len)
    num_blocks = -(-num_tokens // layout.block_size)
    pool = CudaKvCache(layout, num_blocks, device)
    probe = GpuModel(decoder, pool, device, limits.max_num_seqs, limits.max_model_len)
    batch = ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens),
        query_starts=[0, num_tokens],
        context_lens=[num_tokens],
        block_tables=[list(range(num_blocks))],
        sample_rows=list(range(max(0, num_tokens - limits.max_num_seqs), num_tokens)),
    )
    peak = device.measure(lambda: probe.forward_eagerly(batch, pool)) - pool.nbytes
    pool.close()
    return peak
