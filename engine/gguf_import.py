"""Turns a GGUF file into a model folder in Hugging Face's layout, with the weights dequantized to bfloat16.

Undoes what llama.cpp does to a model when it writes GGUF; how that differs by family, `engine.gguf_families` knows.
Where the folder goes, and that it appears whole or not at all, is `engine.model_store`'s concern.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.gguf_families import GgufFamily, find_family
from engine.gguf_file import Floats, GgufFile, GgufTensor
from engine.gguf_tokenizer import write_tokenizer

Progress = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, in [0, 1]."""

_ROPE_FACTORS = "rope_freqs.weight"


def import_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `source` into the existing, empty `folder`.

    Raises `ModelError` if the file is damaged or its model is not one that we run. Then the folder holds some of
    the files: throw it away.
    """
    gguf = GgufFile(source)
    family = find_family(gguf)
    config = _config(gguf, family)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    write_tokenizer(gguf, folder)
    _write_weights(gguf, _sources(gguf, config, family), folder / "model.safetensors", progress)


def _config(gguf: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """Fields of the configuration in transformers."""
    arch = gguf.get("general.architecture", str)
    if gguf.metadata.get(f"{arch}.expert_count") not in (None, 0):
        raise ModelError(
            f"{gguf.path}: {arch}.expert_count = {gguf.metadata[f'{arch}.expert_count']!r} is not supported"
        )
    hidden_size = gguf.get(f"{arch}.embedding_length", int)
    num_heads = gguf.get(f"{arch}.attention.head_count", int)
    if num_heads < 1 or hidden_size < 1:
        raise ModelError(f"{gguf.path}: {num_heads} heads over a width of {hidden_size} make no model")
    head_dim = gguf.get(f"{arch}.attention.key_length", int, hidden_size // num_heads)
    if gguf.get(f"{arch}.rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"{gguf.path}: rotary embedding over a part of each head is not supported")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path} has no tensor token_embd.weight")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": gguf.get(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": gguf.get(f"{arch}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.get(f"{arch}.attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": gguf.get(f"{arch}.context_length", int),
        "rms_norm_eps": _decimal(gguf.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(gguf.get(f"{arch}.rope.freq_base", float, family.rope_theta)),
        "rope_scaling": _rope_scaling(gguf, arch, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _stop_ids(gguf),
        "torch_dtype": "bfloat16",
    }
    return config | family.settings(gguf, config)


def _decimal(value: float) -> float:
    """The number that was meant by a float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(gguf: GgufFile, arch: str, head_dim: int) -> dict[str, Any] | None:
    """Linear, or Llama 3's. Of that GGUF holds only what comes out of it: a divisor for each rotary frequency.

    The largest divisor is the factor; the other settings are those of every Llama 3.1 to 3.3, and are checked by
    working the divisors out again.
    """
    kind = gguf.metadata.get(f"{arch}.rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise ModelError(f"{gguf.path}: {arch}.rope.scaling.type = {kind!r} is not supported")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _decimal(gguf.get(f"{arch}.rope.scaling.factor", float))}
    if _ROPE_FACTORS not in gguf.tensors:
        return None
    divisors = gguf.tensors[_ROPE_FACTORS].dequantized()
    factor = _decimal(float(divisors.max()))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = gguf.get(f"{arch}.rope.freq_base", float, 10000.0)
    rotations = 8192 / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))  # over the original context
    blend = np.clip((rotations - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(f"{gguf.path}: {_ROPE_FACTORS} is not Llama 3's scaling; no other is supported")
    return scaling


def _stop_ids(gguf: GgufFile) -> list[int]:
    """End of sequence, and end of turn where that is another token."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return list(dict.fromkeys(gguf.metadata[key] for key in keys if key in gguf.metadata))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one Hugging Face tensor comes from."""

    tensor: GgufTensor
    rotary_heads: int = 0
    """Heads whose rows llama.cpp reordered for its rotary embedding; 0 for a tensor that it left alone."""
    offset: float = 0.0
    """What llama.cpp added to all values."""

    def values(self) -> Floats:
        values = self.tensor.dequantized()
        if self.offset:
            values = values - np.float32(self.offset)
        if not self.rotary_heads:
            return values
        # llama.cpp rotates neighbours (0,1), (2,3), ...; Hugging Face rotates halves (0,d/2), (1,d/2+1), ...
        rows, width = values.shape
        pairs = values.reshape(self.rotary_heads, rows // self.rotary_heads // 2, 2, width)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)


def _sources(gguf: GgufFile, config: Mapping[str, Any], family: GgufFamily) -> dict[str, _Source]:
    """Hugging Face name -> source, for exactly the tensors of a decoder of this family and shape."""
    rotary_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    sources = {}
    unused = dict(gguf.tensors)
    unused.pop(_ROPE_FACTORS, None)
    for name, (target, shape) in _tensor_names(gguf, config, family).items():
        tensor = unused.pop(name, None)
        if tensor is None or tensor.shape != shape:
            found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ModelError(f"{gguf.path}: tensor {name} is {found}, expected shape {list(shape)}")
        heads = rotary_heads.get(name.split(".")[-2], 0) if family.reorders_heads else 0
        sources[target] = _Source(tensor, heads, family.norm_offset if "norm" in name else 0.0)
    if unused:
        names = ", ".join(sorted(unused)[:5])
        raise ModelError(f"{gguf.path}: tensors that are not of a {family.model_type} decoder: {names}")
    return sources


def _write_weights(gguf: GgufFile, sources: Mapping[str, _Source], path: Path, progress: Progress) -> None:
    """One safetensors file in bfloat16, a tensor at a time, so that memory does not grow with the model."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in sources.items():
        begin, end = end, end + 2 * math.prod(source.tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(source.tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format asks that tensors begin aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, source in sources.items():
            values = source.values()
            if not np.isfinite(values).all():
                raise gguf.damaged(f"tensor {source.tensor.name} holds values that are not finite")
            file.write(_bfloat16(values).tobytes())
            progress("converting weights", header[name]["data_offsets"][1] / end)


def _bfloat16(values: Floats) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Bits of the nearest bfloat16, ties to even, which numpy has no type for. For finite values."""
    bits = values.view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype("<u2")


def _tensor_names(
    gguf: GgufFile, config: Mapping[str, Any], family: GgufFamily
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape), for every tensor that the model must have."""
    num_layers = config["num_hidden_layers"]
    if num_layers > len(gguf.tensors):
        raise gguf.damaged(f"{len(gguf.tensors)} tensors for {num_layers} layers")
    hidden = config["hidden_size"]
    names = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", (config["vocab_size"], hidden))
    parts = family.layer_parts(config)
    for layer in range(num_layers):
        for part, (name, shape) in parts.items():
            names[f"blk.{layer}.{part}"] = (f"model.layers.{layer}.{name}", shape)
    return names
