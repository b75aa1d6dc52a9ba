"""A Llama decoder in float64 numpy without cache, batch or fused weights: the oracle for the real one.

Written from the published architecture, sharing no code with `engine`: complex numbers for the rotation, one head and
one query at a time for attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig, RopeScaling

Array = npt.NDArray[np.float64]


def dense_logits(
    config: ModelConfig, tensors: Mapping[str, npt.NDArray[np.generic]], token_ids: Sequence[int]
) -> Array:
    """Logits after each token: [T, vocab]. `tensors` is a checkpoint with Hugging Face names."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][list(token_ids)]
    for i in range(config.num_layers):
        layer = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        hidden = hidden + _attention(config, layer, _norm(config, hidden, layer["input_layernorm.weight"]))
        hidden = hidden + _mlp(layer, _norm(config, hidden, layer["post_attention_layernorm.weight"]))
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return _norm(config, hidden, weights["model.norm.weight"]) @ head.T


def dense_greedy(
    config: ModelConfig, tensors: Mapping[str, npt.NDArray[np.generic]], prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """The most likely continuation, computed from scratch for every token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(dense_logits(config, tensors, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def dense_attention(
    q: Array, k: Array, v: Array, scale: float, window: int | None = None, soft_cap: float | None = None
) -> Array:
    """q [n, heads, dim] are the last n positions of k, v [T, kv_heads, dim]."""
    out = np.empty_like(q)
    first = len(k) - len(q)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        for head in range(q.shape[1]):
            end = first + i + 1
            seen = slice(0 if window is None else max(0, end - window), end)
            scores = k[seen, head // group] @ q[i, head] * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[seen, head // group]
    return out


def _norm(config: ModelConfig, x: Array, weight: Array) -> Array:
    scaled: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
    return scaled * weight


def _attention(config: ModelConfig, layer: Mapping[str, Array], x: Array) -> Array:
    def project(name: str, heads: int) -> Array:
        return (x @ layer[f"self_attn.{name}.weight"].T).reshape(len(x), heads, config.head_dim)

    q = _rotate(config, project("q_proj", config.num_heads))
    k = _rotate(config, project("k_proj", config.num_kv_heads))
    mixed = dense_attention(q, k, project("v_proj", config.num_kv_heads), 1 / np.sqrt(config.head_dim))
    out: Array = mixed.reshape(len(x), -1) @ layer["self_attn.o_proj.weight"].T
    return out


def _mlp(layer: Mapping[str, Array], x: Array) -> Array:
    gate = x @ layer["mlp.gate_proj.weight"].T
    up = x @ layer["mlp.up_proj.weight"].T
    out: Array = (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return out


def _rotate(config: ModelConfig, x: Array) -> Array:
    half = config.head_dim // 2
    speeds = np.array([_speed(config, pair) for pair in range(half)])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(len(x))[:, None, None] * speeds)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _speed(config: ModelConfig, pair: int) -> float:
    speed = config.rope_theta ** (-2 * pair / config.head_dim)
    scaling = config.rope_scaling
    return _scaled_speed(speed, scaling) if isinstance(scaling, RopeScaling) else speed


def _scaled_speed(speed: float, scaling: RopeScaling) -> float:
    wavelength = 2 * np.pi / speed
    context = scaling.original_max_position_embeddings
    if wavelength < context / scaling.high_freq_factor:
        return speed
    if wavelength > context / scaling.low_freq_factor:
        return speed / scaling.factor
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return float((1 - smooth) * speed / scaling.factor + smooth * speed)
