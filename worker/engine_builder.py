"""From settings to a running engine: model, KV pool, engine, and how long each took. Knows no role."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.cuda.device import open_card
from engine.errors import ConfigError, NativeUnavailable
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.machine import memory_bytes
from engine.model.decoder import Model
from engine.model.native_decoder import obstacle
from engine.model.registry import load_model
from engine.model_config import load_model_config, model_fingerprint, weights_fingerprint
from engine.native.decoder import NativeDecoder, load_decoder
from engine.native.fence import load_fence
from engine.plan import check_pool, pool_of
from engine.tensor_parallel.ranks import Ranks
from worker.card_builder import OpenCard, build_on_card, choose_card
from worker.engine_parts import EngineParts, engine_around, layout_of, max_model_len_of, num_host_blocks_of

__all__ = ["EngineParts", "assemble_engine", "build_engine", "warm_up"]

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32


def build_engine(config: EngineConfig, open_card: OpenCard = open_card) -> EngineParts:
    """Load the model and assemble an engine around it.

    Raises `ModelError`, `ConfigError`, or `WorkerLost` if a rank does not come up; then no process is left.

    `open_card`: a test, or a rehearsal on the CPU, brings its own.
    """
    torch.set_num_threads(config.num_threads)
    card, why_not = choose_card(config, load_model_config(Path(config.model_path)), open_card)
    if card is not None:
        return build_on_card(config, card)
    parts = _build_on_cpu(config)
    return replace(parts, device=f"cpu: {why_not}") if why_not else parts


def _build_on_cpu(config: EngineConfig) -> EngineParts:
    started = time.monotonic()
    decoder, kernels = _load_decoder(config)
    compiled = time.monotonic()
    with ExitStack() as stack:
        ranks: Ranks | None = None
        model: Model
        if config.tensor_parallel_size > 1:
            ranks = stack.enter_context(closing(Ranks(config)))
            model = ranks.load_model()
        else:
            folder = Path(config.model_path)
            model = load_model(folder, config.dtype, decoder, config.num_threads, weights_dtype=config.weights_dtype)
        loaded = time.monotonic()
        fingerprint = weights_fingerprint(model_fingerprint(Path(config.model_path)), config.weights_dtype)
        timings = {
            "native_s": compiled - started,
            "model_s": loaded - compiled,
            "fingerprint_s": time.monotonic() - loaded,
        }
        parts = assemble_engine(model, fingerprint, config, timings, ranks.share_pool if ranks else _nothing)
        if ranks is not None:
            ranks.watch()
        assembled = time.monotonic()
        warm_up(model, parts.kv)
        stack.pop_all()
    timings = {**parts.timings, "warm_up_s": time.monotonic() - assembled}
    return replace(parts, kernels=kernels, ranks=ranks, timings=timings)


def _nothing(kv: KvCache) -> None:
    pass


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
    model: Model,
    fingerprint: bytes,
    config: EngineConfig,
    timings: Mapping[str, float] | None = None,
    before_seal: Callable[[KvCache], None] = _nothing,
) -> EngineParts:
    """An engine around `model`, with a pool of its own (`before_seal`: see there). On an error no pool is left open."""
    started = time.monotonic()
    layout = layout_of(config, model.config)
    max_model_len_of(config, model.config)
    pool = pool_of(layout, config.kv_memory_bytes, config.num_blocks_override)
    check_pool(pool, config, memory_bytes())
    kv = _pool(layout, pool.num_blocks, num_host_blocks_of(config, layout, pool), config, before_seal)
    parts = engine_around(model, kv, fingerprint, config, timings=timings or {})
    return replace(parts, timings={**parts.timings, "kv_and_engine_s": time.monotonic() - started})


def _pool(
    layout: KvLayout,
    num_blocks: int,
    num_host_blocks: int,
    config: EngineConfig,
    before_seal: Callable[[KvCache], None],
) -> KvCache:
    """One whose blocks can be lent, or that can show others', needs a memory barrier, and so a compiler."""
    if not (config.borrows or config.lent_share):
        return KvCache(layout, num_blocks, num_host_blocks, before_seal=before_seal)
    try:
        if config.native_cache is None:
            raise NativeUnavailable("no native_cache is set")
        fence = load_fence(Path(config.native_cache))
    except NativeUnavailable as error:
        logger.warning("no native code, so no block is lent, and links of adopt are impossible: %s", error)
        return KvCache(layout, num_blocks, num_host_blocks, before_seal=before_seal)
    return KvCache(
        layout,
        num_blocks,
        num_host_blocks,
        borrows=config.borrows,
        lent_share=config.lent_share,
        fence=fence,
        before_seal=before_seal,
    )


def _load_decoder(config: EngineConfig) -> tuple[NativeDecoder | None, str]:
    """Native kernels, where the model can run on them, and what `EngineParts.kernels` says of that.

    Raises `ConfigError` if they are asked for by name and cannot be had.
    """
    if config.kernels == "reference":
        return None, "reference"
    shape = load_model_config(Path(config.model_path))
    why = obstacle(shape, config.dtype, config.kv_dtype(config.dtype), config.weights_dtype)
    if config.tensor_parallel_size > 1:
        why = f"tensor_parallel_size is {config.tensor_parallel_size}, and native code runs a model as a whole"
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
