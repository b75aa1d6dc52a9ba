"""From settings to a running engine: model, KV pool, engine, and how long each took. Knows no role."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.batch import ForwardBatch
from engine.block_hash import BlockIdentity
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineError, NativeUnavailable
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.machine import memory_bytes
from engine.model.decoder import Model
from engine.model.native_decoder import obstacle
from engine.model.registry import load_model
from engine.model_config import load_model_config, model_fingerprint
from engine.native.blocks import NativeBlockCopier, load_block_copier
from engine.native.decoder import NativeDecoder, load_decoder
from engine.native.fence import load_fence
from engine.plan import Pool, check_pool, pool_of

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What a role is built around. The role closes `kv` when nothing uses it any more."""

    engine: Engine
    kv: KvCache
    pool: Pool
    """What `kv` holds, in numbers."""
    identity: BlockIdentity
    max_model_len: int
    max_requests: int
    """Requests that the engine takes, running and waiting together."""
    native: NativeBlockCopier | None
    """None: there is no compiler, or none was wanted."""
    kernels: str
    """What computes: "native" and its instruction set, or "reference" and, where that was not asked for, why."""
    timings: Mapping[str, float]
    """Seconds of each part of the build."""


def build_engine(config: EngineConfig) -> EngineParts:
    """Load the model and assemble an engine around it. Raises `ModelError` or `ConfigError`."""
    torch.set_num_threads(config.num_threads)
    started = time.monotonic()
    decoder, kernels = _load_decoder(config)
    compiled = time.monotonic()
    model = load_model(Path(config.model_path), config.dtype, decoder, config.num_threads)
    loaded = time.monotonic()
    fingerprint = model_fingerprint(Path(config.model_path))
    timings = {
        "native_s": compiled - started,
        "model_s": loaded - compiled,
        "fingerprint_s": time.monotonic() - loaded,
    }
    parts = assemble_engine(model, fingerprint, config, timings)
    assembled = time.monotonic()
    warm_up(model, parts.kv)
    return replace(parts, kernels=kernels, timings={**parts.timings, "warm_up_s": time.monotonic() - assembled})


def warm_up(model: Model, kv: KvCache) -> None:
    """Run a short prompt and one decode step through the model, so that the first request does not pay for it.

    What is paid here: page faults of the weights, and the choice of a matrix product for each shape. Writes into the
    first blocks of the pool, which nobody holds yet.
    """
    block_size = kv.layout.block_size
    prompt = min(WARM_UP_TOKENS, kv.num_blocks * block_size - 1, model.config.max_model_len - 1)
    blocks = list(range(-(-(prompt + 1) // block_size)))
    steps = ((0, prompt), (prompt, prompt + 1)) if prompt else ((0, 1),)
    for start, end in steps:
        model.forward(
            ForwardBatch(
                token_ids=torch.zeros(end - start, dtype=torch.int64),
                positions=torch.arange(start, end),
                query_starts=[0, end - start],
                context_lens=[end],
                block_tables=[blocks],
                sample_rows=[end - start - 1],
            ),
            kv,
        )


def assemble_engine(
    model: Model, fingerprint: bytes, config: EngineConfig, timings: Mapping[str, float] | None = None
) -> EngineParts:
    """An engine around `model`, with a pool of its own. On an error no pool is left open."""
    started = time.monotonic()
    shape = model.config
    max_model_len = config.max_model_len or shape.max_model_len
    if max_model_len > shape.max_model_len:
        raise ConfigError(f"max_model_len {max_model_len} is more than the model's {shape.max_model_len}")
    layout = KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        dtype=config.kv_dtype(config.dtype),
    )
    pool = pool_of(layout, config.kv_memory_bytes, config.num_blocks_override)
    check_pool(pool, config, memory_bytes())
    num_host_blocks = config.swap_space // layout.block_bytes
    if config.scheduler.preemption == "swap" and not num_host_blocks:
        raise ConfigError(
            f"preemption swap needs host memory: swap_space {config.swap_space} holds no block of "
            f"{layout.block_bytes} bytes"
        )
    if pool.num_bytes + num_host_blocks * layout.block_bytes > memory_bytes():
        raise ConfigError(
            f"swap_space {config.swap_space} beside {pool} is more than this machine's {memory_bytes()} bytes"
        )
    cache_config = CacheConfig(
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        sliding_window=shape.shared_window,
    )
    identity = BlockIdentity(
        model_fingerprint=fingerprint,
        kv_dtype=_identity_dtype(layout.dtype, config.dtype),
        block_size=config.block_size,
    )
    kv = _pool(layout, pool.num_blocks, num_host_blocks, config)
    try:
        engine = Engine(model, kv, cache_config, config.scheduler, identity, max_model_len)
    except EngineError:
        kv.close()
        raise
    return EngineParts(
        engine=engine,
        kv=kv,
        pool=pool,
        identity=identity,
        max_model_len=max_model_len,
        max_requests=config.scheduler.max_num_seqs + config.scheduler.max_waiting,
        native=_load_native(config.native_cache),
        kernels="reference",
        timings={**(timings or {}), "kv_and_engine_s": time.monotonic() - started},
    )


def _pool(layout: KvLayout, num_blocks: int, num_host_blocks: int, config: EngineConfig) -> KvCache:
    """One whose blocks can be lent, or that can show others', needs a memory barrier, and so a compiler."""
    if not (config.borrows or config.lent_share):
        return KvCache(layout, num_blocks, num_host_blocks)
    try:
        if config.native_cache is None:
            raise NativeUnavailable("no native_cache is set")
        fence = load_fence(Path(config.native_cache))
    except NativeUnavailable as error:
        logger.warning("no native code, so no block is lent, and links of adopt are impossible: %s", error)
        return KvCache(layout, num_blocks, num_host_blocks)
    return KvCache(
        layout, num_blocks, num_host_blocks, borrows=config.borrows, lent_share=config.lent_share, fence=fence
    )


def _identity_dtype(kv_dtype: str, dtype: str) -> str:
    """The type of the KV, and that of the activations it comes from where it is another: both decide its bytes."""
    return kv_dtype if kv_dtype == dtype else f"{kv_dtype} of {dtype}"


def _load_decoder(config: EngineConfig) -> tuple[NativeDecoder | None, str]:
    """Native kernels, where the model can run on them, and what `EngineParts.kernels` says of that.

    Raises `ConfigError` if they are asked for by name and cannot be had.
    """
    if config.kernels == "reference":
        return None, "reference"
    why = obstacle(load_model_config(Path(config.model_path)), config.dtype, config.kv_dtype(config.dtype))
    if why is None and config.native_cache is None:
        why = "no native_cache is set"
    if why is None and config.native_cache is not None:
        try:
            decoder = load_decoder(Path(config.native_cache))
            return decoder, f"native {decoder.name}"
        except NativeUnavailable as error:
            why = str(error)
            logger.warning("no native kernels, so the reference in PyTorch computes, slowly: %s", error)
    if config.kernels == "native":
        raise ConfigError(f"kernels: native is not possible: {why}")
    return None, f"reference: {why}"


def _load_native(cache: str | None) -> NativeBlockCopier | None:
    if cache is None:
        return None
    try:
        return load_block_copier(Path(cache))
    except NativeUnavailable as error:
        logger.warning("no native code, so KV blocks are copied and digested in Python: %s", error)
        return None
