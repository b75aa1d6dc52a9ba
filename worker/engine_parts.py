"""What a role is built around, and how an engine is put around a model and a pool. Knows no device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.block_hash import BlockIdentity
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineError, NativeUnavailable
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.machine import memory_bytes
from engine.model.decoder import Model
from engine.native.blocks import NativeBlockCopier, load_block_copier
from engine.plan import Pool, pool_of
from engine.tensor_parallel.ranks import Ranks

logger = logging.getLogger(__name__)


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
    """What computes: "native" and its instruction set; "reference" and, where that was not asked for, why; or "triton"
    and its version."""
    device: str
    """Where: "cpu", and why if a GPU was wanted; or a GPU, as torch names it, and which card that is."""
    timings: Mapping[str, float]
    """Seconds of each part of the build."""
    ranks: Ranks | None = None
    """Processes that hold shares of the model. The role closes them behind `kv`."""


def engine_around(
    model: Model,
    kv: KvCache,
    fingerprint: bytes,
    config: EngineConfig,
    *,
    kernels: str = "reference",
    device: str = "cpu",
    timings: Mapping[str, float],
) -> EngineParts:
    """Takes over `kv`: on an error it is closed."""
    layout, max_model_len = kv.layout, max_model_len_of(config, model.config)
    cache_config = CacheConfig(
        num_blocks=kv.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        sliding_window=model.config.shared_window,
    )
    identity = BlockIdentity(
        model_fingerprint=fingerprint,
        kv_dtype=_identity_dtype(layout.dtype, config.dtype),
        block_size=config.block_size,
    )
    try:
        engine = Engine(model, kv, cache_config, config.scheduler, identity, max_model_len)
    except EngineError:
        kv.close()
        raise
    return EngineParts(
        engine=engine,
        kv=kv,
        pool=pool_of(layout, kv.nbytes, kv.num_blocks),
        identity=identity,
        max_model_len=max_model_len,
        max_requests=config.scheduler.max_num_seqs + config.scheduler.max_waiting,
        native=_load_native(config.native_cache),
        kernels=kernels,
        device=device,
        timings=timings,
    )


def layout_of(config: EngineConfig, shape: ModelConfig) -> KvLayout:
    return KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        dtype=config.kv_dtype(config.dtype),
    )


def max_model_len_of(config: EngineConfig, shape: ModelConfig) -> int:
    """Raises `ConfigError` if more is asked for than the model has."""
    if (config.max_model_len or 0) > shape.max_model_len:
        raise ConfigError(f"max_model_len {config.max_model_len} is more than the model's {shape.max_model_len}")
    return config.max_model_len or shape.max_model_len


def num_host_blocks_of(config: EngineConfig, layout: KvLayout, pool: Pool | None = None) -> int:
    """Whole blocks of `swap_space`. Raises `ConfigError` if it is too little, or too much beside `pool`, which is in
    host memory too."""
    num_host_blocks = config.swap_space // layout.block_bytes
    if config.scheduler.preemption == "swap" and not num_host_blocks:
        raise ConfigError(
            f"preemption swap needs host memory: swap_space {config.swap_space} holds no block of "
            f"{layout.block_bytes} bytes"
        )
    beside, taken = ("", 0) if pool is None else (f" beside {pool}", pool.num_bytes)
    if taken + num_host_blocks * layout.block_bytes > (most := memory_bytes()):
        raise ConfigError(f"swap_space {config.swap_space}{beside} is more than this machine's {most} bytes")
    return num_host_blocks


def _identity_dtype(kv_dtype: str, dtype: str) -> str:
    """The type of the KV, and that of the activations it comes from where it is another: both decide its bytes."""
    return kv_dtype if kv_dtype == dtype else f"{kv_dtype} of {dtype}"


def _load_native(cache: str | None) -> NativeBlockCopier | None:
    if cache is None:
        return None
    try:
        return load_block_copier(Path(cache))
    except NativeUnavailable as error:
        logger.warning("no native code, so KV blocks are copied and digested in Python: %s", error)
        return None
