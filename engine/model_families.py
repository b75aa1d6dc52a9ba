"""From the `config.json` of each architecture that we run to a `ModelConfig`. Knows fields, no files and no weights.

What an architecture's code in transformers decides and its config.json does not say is a `_Family`. A field that
changes results is read or refused by name; none is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.config import LinearRopeScaling, LocalLayers, ModelConfig, RopeScaling
from engine.config_fields import Fields
from engine.errors import ConfigError, ModelError

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NOT_DONE = {
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


def model_config(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Raises `ModelError` that names file and field."""
    family = find_family(fields)
    if family is None:
        found = ", ".join(map(str, fields.get("architectures", list, []))) or "none"
        raise fields.error("architectures", f"supported: {', '.join(FAMILIES)}; found: {found}")
    for name, supported in _NOT_DONE.items():
        fields.refuse_unless(name, supported)
    if not family.is_gemma:
        fields.refuse_unless("final_logit_softcapping", None)
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    rope = _rope(fields)
    try:
        return ModelConfig(
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=fields.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=fields.positive("head_dim", family.head_dim or hidden_size // num_heads),
            max_model_len=fields.positive("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=rope.number("rope_theta", family.rope_theta),
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=fields.get("tie_word_embeddings", bool, family.is_gemma),
            eos_token_ids=eos_token_ids,
            bos_token_id=None if fields.values.get("bos_token_id") is None else fields.get("bos_token_id", int),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            post_norms=family.is_gemma,
            norm_offset=1.0 if family.is_gemma else 0.0,
            activation=_activation(fields, family),
            attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5 if family.is_gemma else None,
            scale_embedding=family.is_gemma,
            final_soft_cap=fields.number_or_none("final_logit_softcapping"),
            local=family.local(fields),
        )
    except ConfigError as error:
        raise ModelError(f"{fields.path}: {error}") from error


def _no_local_layers(fields: Fields) -> LocalLayers | None:
    """Llama: its code looks at neither field."""
    fields.refuse_unless("sliding_window", None)
    fields.refuse_unless("layer_types", [_FULL] * fields.positive("num_hidden_layers"))
    return None


def _all_local(fields: Fields) -> LocalLayers | None:
    """Mistral: null switches the window off, an absent field does not."""
    num_layers = fields.positive("num_hidden_layers")
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        fields.refuse_unless("layer_types", [_FULL] * num_layers)
        return None
    fields.refuse_unless("layer_types", [_SLIDING] * num_layers)
    return LocalLayers(window=fields.positive("sliding_window", 4096), layers=tuple(range(num_layers)))


def _upper_local(fields: Fields) -> LocalLayers | None:
    """Qwen: the layers from `max_window_layers` on, if it is switched on."""
    num_layers, first = fields.positive("num_hidden_layers"), fields.get("max_window_layers", int, 28)
    if not fields.get("use_sliding_window", bool, False):
        fields.refuse_unless("layer_types", [_FULL] * num_layers)
        return None
    return _of_kinds(fields, [_SLIDING if i >= first else _FULL for i in range(num_layers)])


def _pattern_local(fields: Fields) -> LocalLayers | None:
    """Gemma 3: all but each sixth layer, with a rotary embedding of their own."""
    num_layers, every = fields.positive("num_hidden_layers"), fields.positive("sliding_window_pattern", 6)
    theta = fields.number("rope_local_base_freq", 10000.0)
    if rope := _rope_of_kind(fields, _SLIDING):
        theta = rope.number("rope_theta", theta)
        if _rope_scaling(rope) is not None:
            raise rope.error("rope_type", "only default is supported for layers with a window")
    kinds = [_SLIDING if (i + 1) % every else _FULL for i in range(num_layers)]
    return _of_kinds(fields, kinds, theta)


def _of_kinds(fields: Fields, default: list[str], rope_theta: float | None = None) -> LocalLayers | None:
    kinds = fields.get("layer_types", list, default)
    if len(kinds) != len(default) or not all(kind in (_FULL, _SLIDING) for kind in kinds):
        raise fields.error("layer_types", f"must say {_FULL} or {_SLIDING} for each of {len(default)} layers")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == _SLIDING)
    if not layers:
        return None
    return LocalLayers(window=fields.positive("sliding_window", 4096), layers=layers, rope_theta=rope_theta)


@dataclass(frozen=True, slots=True)
class _Family:
    local: Callable[[Fields], LocalLayers | None]
    qkv_bias: bool = False
    qk_norm: bool = False
    is_gemma: bool = False
    head_dim: int | None = None
    """Where config.json has none; None: an equal share of the width."""
    rope_theta: float = 10000.0
    """Where config.json has none."""


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(_no_local_layers),
    "MistralForCausalLM": _Family(_all_local),
    "Qwen2ForCausalLM": _Family(_upper_local, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(_upper_local, qk_norm=True, head_dim=128),
    "Gemma3ForCausalLM": _Family(_pattern_local, qk_norm=True, is_gemma=True, head_dim=256, rope_theta=1e6),
}
"""By the names that `architectures` of config.json may hold."""


def find_family(fields: Fields) -> _Family | None:
    """The one that `architectures` names; None if we run none of them."""
    names = fields.get("architectures", list, [])
    return next((family for name, family in FAMILIES.items() if name in names), None)


def _activation(fields: Fields, family: _Family) -> str:
    name, default = ("hidden_activation", "gelu_pytorch_tanh") if family.is_gemma else ("hidden_act", "silu")
    fields.refuse_unless(name, default)
    return _ACTIVATIONS[default]


def _rope(fields: Fields) -> Fields:
    """The rotary settings of layers without a window: `rope_parameters` since transformers 5, in it one object for each
    kind of layer if they differ; before that they were spread over the file."""
    rope = _rope_of_kind(fields, _FULL) or fields.object("rope_parameters") or fields
    rope.refuse_unless("partial_rotary_factor", 1.0)
    return rope


def _rope_of_kind(fields: Fields, kind: str) -> Fields | None:
    rope = fields.object("rope_parameters")
    return None if rope is None else rope.object(kind)


def _rope_scaling(rope: Fields) -> RopeScaling | LinearRopeScaling | None:
    scaling = rope.object("rope_scaling") or rope
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(factor=scaling.number("factor"))
    if kind != "llama3":
        raise scaling.error("rope_type", f"supported: default, linear, llama3; found: {kind!r}")
    return RopeScaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=scaling.positive("original_max_position_embeddings"),
    )
