"""An engine on a GPU: which one, if any, and what is built there. Not run on a GPU so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from engine.config import EngineConfig, ModelConfig
from engine.cuda.device import Device
from engine.cuda.plan import DEFAULT_UTILIZATION, obstacle
from engine.errors import ConfigError
from engine.model.weights import load_weights
from engine.model_config import load_model_config, model_fingerprint
from worker.engine_parts import EngineParts, engine_around, layout_of, max_model_len_of, num_host_blocks_of

logger = logging.getLogger(__name__)

OpenCard = Callable[[str], Device]
"""A device of "cuda" or "cuda:N". Raises `ConfigError` naming `device`."""


def choose_card(config: EngineConfig, shape: ModelConfig, open_card: OpenCard) -> tuple[Device | None, str]:
    """The GPU that a worker shall run on, or None, and then why not, if one was wanted.

    Raises `ConfigError` naming `device` if a GPU is demanded and cannot be had, or cannot run the model.
    """
    if config.device == "cpu" or (config.device == "auto" and config.gpu_memory_utilization is None):
        return None, ""
    try:
        return _usable_card(config, shape, open_card), ""
    except ConfigError as error:
        if config.device != "auto":
            raise
        logger.warning("the model runs on the CPU: %s", error)
        return None, str(error)


def _usable_card(config: EngineConfig, shape: ModelConfig, open_card: OpenCard) -> Device:
    name = "cuda" if config.device == "auto" else config.device
    if config.weights_dtype != "auto":
        raise ConfigError(f"device {name}: weights_dtype {config.weights_dtype} is for CPUs only")
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"device {name}: tensor_parallel_size {config.tensor_parallel_size} is for CPUs so far")
    try:
        import_module("triton")
    except ModuleNotFoundError:
        raise ConfigError(f"device {name}: triton is not installed: pip install 'kvrelay[gpu]'") from None
    from engine.kernels.triton_paged import arch_of

    card = open_card(name)
    if (why := obstacle(shape, config.dtype, arch_of(card.torch_device))) is not None:
        raise ConfigError(f"device {name}: {why}")
    return card


def build_on_card(config: EngineConfig, card: Device) -> EngineParts:
    """Load the model onto `card`, and assemble an engine around it and a pool there. Raises `ModelError` or
    `ConfigError`; then torch has the card's memory back."""
    import triton

    from engine.cuda.build import GpuLimits, build_gpu_model

    started = time.monotonic()
    folder = Path(config.model_path)
    shape = load_model_config(folder)
    layout = layout_of(config, shape)
    limits = GpuLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len_of(config, shape),
        gpu_memory_utilization=config.gpu_memory_utilization or DEFAULT_UTILIZATION,
        num_blocks=config.num_blocks_override,
        num_host_blocks=num_host_blocks_of(config, layout),
    )
    model, kv = build_gpu_model(
        shape,
        lambda weights: load_weights(folder, weights.parts(), weights.ignored),
        getattr(torch, config.dtype),
        layout,
        limits,
        card,
    )
    loaded = time.monotonic()
    parts = engine_around(
        model,
        kv,
        model_fingerprint(folder),
        config,
        kernels=f"triton {triton.__version__}",
        device=f"{card.name}: {card.description}",
        timings={"model_s": loaded - started},
    )
    assembled = time.monotonic()
    model.warm_up()
    timings = {"fingerprint_and_engine_s": assembled - loaded, "warm_up_s": time.monotonic() - assembled}
    return replace(parts, timings={**parts.timings, **timings})
