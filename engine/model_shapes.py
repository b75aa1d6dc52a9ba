"""The shape of a model's KV: of well-known models by name, of others from their `config.json`. Knows no sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import shared_window
from engine.config_fields import Fields, read_json_object
from engine.errors import ConfigError, ModelError
from engine.model_families import find_family


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the size of a model's KV depends on."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int | None = None
    """Tokens that it was trained for; None: not known."""
    sliding_window: int | None = None
    """Tokens that every layer looks back on; None: all."""

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            if not 1 <= getattr(self, field) <= MAX_DIMENSION:
                raise ConfigError(f"{field} must be in [1, {MAX_DIMENSION}], got {getattr(self, field)}")
        for field in ("max_model_len", "sliding_window"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ConfigError(f"{field} must be at least 1, got {value}")


MAX_DIMENSION = 65536


def _shape(  # one line a model
    name: str, layers: int, kv_heads: int, head_dim: int, max_model_len: int, window: int | None = None
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=max_model_len,
        sliding_window=window,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("smollm2-135m", 30, 3, 64, 8192),
        _shape("smollm2-360m", 32, 5, 64, 8192),
        _shape("smollm2-1.7b", 24, 32, 64, 8192),
        _shape("tinyllama-1.1b", 22, 4, 64, 2048),
        _shape("llama-7b", 32, 32, 128, 2048),
        _shape("llama-13b", 40, 40, 128, 2048),
        _shape("llama-65b", 80, 64, 128, 2048),
        _shape("llama-2-7b", 32, 32, 128, 4096),
        _shape("llama-2-13b", 40, 40, 128, 4096),
        _shape("llama-2-70b", 80, 8, 128, 4096),
        _shape("llama-3-8b", 32, 8, 128, 8192),
        _shape("llama-3-70b", 80, 8, 128, 8192),
        _shape("llama-3.1-8b", 32, 8, 128, 131072),
        _shape("llama-3.1-70b", 80, 8, 128, 131072),
        _shape("llama-3.1-405b", 126, 8, 128, 131072),
        _shape("llama-3.2-1b", 16, 8, 64, 131072),
        _shape("llama-3.2-3b", 28, 8, 128, 131072),
        _shape("mistral-7b", 32, 8, 128, 32768, 4096),
        _shape("mixtral-8x7b", 32, 8, 128, 32768),
        _shape("qwen2.5-0.5b", 24, 2, 64, 32768),
        _shape("qwen2.5-1.5b", 28, 2, 128, 32768),
        _shape("qwen2.5-7b", 28, 4, 128, 32768),
        _shape("qwen2.5-72b", 80, 8, 128, 32768),
        _shape("qwen3-0.6b", 28, 8, 128, 40960),
        _shape("qwen3-8b", 36, 8, 128, 40960),
        _shape("gemma-3-270m", 18, 1, 256, 32768),
        _shape("gemma-3-1b", 26, 1, 256, 32768),
    )
}
"""By name; as in the `config.json` that the models were published with."""


def find_shape(name_or_folder: str) -> ModelShape:
    """Of a model named in `SHAPES`, in any case, or in a folder. Raises `ModelError` that names the alternatives."""
    known = SHAPES.get(name_or_folder.lower())
    if known is not None:
        return known
    folder = Path(name_or_folder)
    if folder.is_dir():
        return read_shape(folder)
    raise ModelError(
        f"model {name_or_folder!r} is neither a folder nor a shape known by name ({', '.join(SHAPES)}); get another "
        "model with `kvrelay pull` and name its folder, or give its layers, KV heads and head dimension"
    )


def read_shape(folder: Path) -> ModelShape:
    """From the folder's `config.json`, whether or not the decoder here can run the model.

    Raises `ModelError` that names file and field; also for a model whose KV is not K and V of each head and layer.
    """
    path = folder / "config.json"
    config = read_json_object(path)
    if isinstance(config.get("text_config"), dict):  # a model of text and images
        config = config["text_config"]
    if config.get("kv_lora_rank") is not None:
        raise ModelError(f"{path}: kv_lora_rank: keeps a compressed latent of K and V, which is not planned here")
    num_heads = _positive(path, config, "num_attention_heads")
    head_dim = config.get("head_dim")
    return ModelShape(
        name=folder.resolve().name,
        num_layers=_positive(path, config, "num_hidden_layers"),
        num_kv_heads=_positive(path, config, "num_key_value_heads", num_heads),
        head_dim=_positive(path, config, "hidden_size") // num_heads
        if head_dim is None
        else _positive(path, config, "head_dim"),
        max_model_len=_positive_or_none(path, config, "max_position_embeddings"),
        sliding_window=_window(path, config),
    )


def _window(path: Path, config: dict[str, Any]) -> int | None:
    """The window that all layers share: a block holds all layers, and goes when none of them looks at it."""
    fields = Fields(path, config)
    if (family := find_family(fields)) is not None:
        return shared_window(family.local(fields), _positive(path, config, "num_hidden_layers"))
    kinds = config.get("layer_types")
    every_layer = not isinstance(kinds, list) or all(kind == "sliding_attention" for kind in kinds)
    if not every_layer or config.get("use_sliding_window") is False:
        return None
    return _positive_or_none(path, config, "sliding_window")


def _positive_or_none(path: Path, config: dict[str, Any], name: str) -> int | None:
    return None if config.get(name) is None else _positive(path, config, name)


def _positive(path: Path, config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise ModelError(f"{path}: {name}: must be an integer of at least 1, got {value!r}")
    return value
