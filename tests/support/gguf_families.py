"""Writes the models of `families` as GGUF: under the names of llama.cpp's own table, changed as by its converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import Family
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType, get_tensor_name_map

_NAMES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma3_text": MODEL_ARCH.GEMMA3,
}


def write_gguf(family: Family, path: Path) -> None:
    """Any vocabulary of the right size: what is tested are weights and settings."""
    config = family.config
    kind = config["model_type"]
    arch = "gemma3" if kind == "gemma3_text" else kind
    writer = GGUFWriter(path, arch)
    _add_settings(writer, config)
    names = get_tensor_name_map(_NAMES[kind], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in family.tensors.items():
        values = tensor.float()
        part = name.split(".")[-2]
        if kind == "llama" and part in heads:
            values = _neighbours(values, heads[part])
        if arch == "gemma3" and "norm" in name:
            values = values + 1
        in_gguf = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert in_gguf is not None
        writer.add_tensor(in_gguf, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    tokens = [f"t{i}" for i in range(config["vocab_size"] - 3)] + ["a", "b", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _neighbours(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From halves to neighbours, by the rows' numbers one by one."""
    rows = len(values) // num_heads
    order = [head * rows + i // 2 + i % 2 * (rows // 2) for head in range(num_heads) for i in range(rows)]
    return values[torch.tensor(order)]
