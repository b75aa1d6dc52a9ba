"""From a model folder to a model that can run: picks the decoder, allocates its parameters, loads them."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import DTYPE_BYTES
from engine.errors import ConfigError
from engine.model.llama import LlamaModel, LlamaWeights
from engine.model.weights import load_weights
from engine.model_config import load_model_config


def load_model(folder: Path, dtype: str) -> LlamaModel:
    """The model in `folder` with weights and activations in `dtype`.

    Raises `ModelError` for an architecture that is not supported (it lists those that are) and for files that are
    missing or damaged, `ConfigError` for an unknown `dtype`.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {dtype!r}")
    config = load_model_config(folder)  # refuses what the one decoder we have cannot do
    weights = LlamaWeights(config, getattr(torch, dtype))
    load_weights(folder, weights.parts(), weights.ignored)
    return LlamaModel(config, weights)
