"""What llama.cpp calls the tensors and settings of each family that we run. Knows names and shapes, no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.gguf_file import GgufFile

Parts = dict[str, tuple[str, tuple[int, ...]]]
"""GGUF name in a layer -> (Hugging Face name in it, shape)."""

_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class GgufFamily:
    architecture: str
    """As `architectures` of config.json has it."""
    model_type: str
    settings: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]]
    """What config.json says beside what all families say."""
    rope_theta: float = 10000.0
    """Where the file says nothing."""
    reorders_heads: bool = False
    """Queries and keys lie as llama.cpp rotates them: neighbours, not halves."""
    norm_offset: float = 0.0
    """Norms have this much added."""
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False

    def layer_parts(self, config: Mapping[str, Any]) -> Parts:
        """Every tensor of a layer."""
        hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        before_mlp = "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"
        parts: Parts = {"attn_norm.weight": ("input_layernorm.weight", (hidden,))}
        parts |= {f"attn_{x}.weight": (f"self_attn.{x}_proj.weight", (rows[x], hidden)) for x in rows}
        if self.qkv_bias:
            parts |= {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", (rows[x],)) for x in rows}
        if self.qk_norm:
            parts |= {f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", (head_dim,)) for x in "qk"}
        if self.post_norms:
            parts["post_attention_norm.weight"] = ("post_attention_layernorm.weight", (hidden,))
            parts["post_ffw_norm.weight"] = ("post_feedforward_layernorm.weight", (hidden,))
        return parts | {
            "attn_output.weight": ("self_attn.o_proj.weight", (hidden, q_rows)),
            "ffn_norm.weight": (f"{before_mlp}.weight", (hidden,)),
            "ffn_gate.weight": ("mlp.gate_proj.weight", (inner, hidden)),
            "ffn_up.weight": ("mlp.up_proj.weight", (inner, hidden)),
            "ffn_down.weight": ("mlp.down_proj.weight", (hidden, inner)),
        }


def find_family(gguf: GgufFile) -> GgufFamily:
    """Raises `ModelError` for an architecture that we do not run; it lists those that we do."""
    name = gguf.get("general.architecture", str)
    if name not in _FAMILIES:
        raise ModelError(f"{gguf.path}: architecture {name!r} is not supported, only {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def _plain(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_PLAIN)


def _gemma3(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say how queries are scaled: by the head's width, but for the largest model."""
    largest = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    pattern = gguf.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    kinds = {False: "full_attention", True: "sliding_attention"}
    return {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.get("gemma3.attention.sliding_window", int),
        "rope_local_base_freq": gguf.get("gemma3.rope.freq_base_swa", float, 10000.0),
        "final_logit_softcapping": gguf.metadata.get("gemma3.final_logit_softcapping"),
        **(
            {"layer_types": [kinds[bool(local)] for local in pattern]}
            if isinstance(pattern, list)
            else {"sliding_window_pattern": pattern}
        ),
    }


_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", _plain, reorders_heads=True),  # and Mistral, without its window
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _plain, qkv_bias=True),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _plain, qk_norm=True),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _gemma3,
        rope_theta=1e6,
        norm_offset=1.0,
        qk_norm=True,
        post_norms=True,
    ),
}
"""By `general.architecture`."""
