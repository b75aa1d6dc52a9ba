"""From a model folder to a model that can run: picks the decoder, allocates its parameters, loads them."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import DTYPE_BYTES, WEIGHTS_DTYPES
from engine.errors import ConfigError
from engine.model.decoder import DecoderModel, DecoderWeights, Model
from engine.model.native_decoder import NativeModel
from engine.model.packed_weights import load_packed
from engine.model.weights import load_weights
from engine.model_config import load_model_config, weights_digest
from engine.native.decoder import NativeDecoder
from engine.tensor_parallel.shards import Shard


def load_model(
    folder: Path,
    dtype: str,
    decoder: NativeDecoder | None = None,
    num_threads: int = 1,
    *,
    weights_dtype: str = "auto",
) -> Model:
    """The model in `folder` with weights and activations in `dtype`, or with weights in `weights_dtype`; by `decoder`
    where there is one, which the caller has found able to (`native_decoder.obstacle`).

    Raises `ModelError` for an architecture that is not supported (it lists those that are) and for files that are
    missing or damaged, `ConfigError` for an unknown `dtype`.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {dtype!r}")
    if weights_dtype not in WEIGHTS_DTYPES:
        raise ConfigError(f"weights_dtype must be one of {', '.join(WEIGHTS_DTYPES)}, got {weights_dtype!r}")
    int8 = weights_dtype == "int8"
    config = load_model_config(folder)  # refuses what the one decoder we have cannot do

    def load() -> DecoderWeights:
        weights = DecoderWeights(config, getattr(torch, dtype))
        load_weights(folder, weights.parts(), weights.ignored)
        return weights

    if decoder is None:
        return DecoderModel(config, load(), int8=int8)
    packed = load_packed(folder, weights_digest(folder), config, load, decoder, int8=int8)
    return NativeModel(config, packed, decoder, num_threads)


def load_shard(folder: Path, dtype: str, shard: Shard) -> DecoderWeights:
    """A rank's share of the model in `folder`.

    Raises as `load_model` does, and `ConfigError` if the model has no equal shares.
    """
    weights = DecoderWeights(shard.config(load_model_config(folder)), getattr(torch, dtype))
    load_weights(folder, weights.parts(), weights.ignored, shard.cut)
    return weights
