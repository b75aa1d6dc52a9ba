"""Writes small Llama models as GGUF, the way llama.cpp's converter does, with weights that the test knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("he", "ll", "hell", "hello", "Ġhello", "12")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello", "1 2")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

Array = np.ndarray[Any, np.dtype[np.float32]]


def byte_alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]


def vocabulary() -> list[str]:
    return [*CONTROL_TOKENS, *byte_alphabet(), *WORDS]


@dataclass(frozen=True)
class TinyModel:
    """What was written: the path, and the weights under their Hugging Face names, before llama.cpp's reordering."""

    path: Path
    weights: Mapping[str, Array]


@dataclass(kw_only=True)
class TinyGguf:
    """Settings of one file. Every field is a way in which files differ, or are wrong."""

    pre: str = "smollm"
    tied: bool = True
    architecture: str = "llama"
    add_bos: bool | None = None
    rope_divisors: Array | None = None
    rope_theta: float = 10000.0
    quantized: bool = False
    """Projections as Q8_0 instead of F32."""
    left_out: Sequence[str] = ()
    """GGUF names of tensors that are not written."""
    replaced: Mapping[str, Array] = field(default_factory=dict)
    """GGUF name -> other values; also for tensors that no Llama has."""
    merges: Sequence[str] = MERGES
    tokens: Sequence[str] = field(default_factory=vocabulary)
    scores: Sequence[float] | None = None
    """With them, the vocabulary is one of SentencePiece."""
    eos_token_id: int = 2

    def write(self, path: Path) -> TinyModel:
        weights = self._weights()
        tensors = {_gguf_name(name): _as_llama_cpp(name, values) for name, values in weights.items()}
        if self.rope_divisors is not None:
            tensors["rope_freqs.weight"] = self.rope_divisors
        tensors.update(self.replaced)
        writer = GGUFWriter(path, self.architecture)
        self._add_metadata(writer)
        for name, values in tensors.items():
            if name in self.left_out:
                continue
            if self.quantized and values.ndim == 2:
                kind = GGMLQuantizationType.Q8_0
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return TinyModel(path, weights)

    def _add_metadata(self, writer: GGUFWriter) -> None:
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(self.rope_theta)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2" if self.scores is None else "llama")
        if self.scores is None:
            writer.add_tokenizer_pre(self.pre)
        else:
            writer.add_token_scores(list(self.scores))
        writer.add_token_list(list(self.tokens))
        writer.add_token_types([3 if token in CONTROL_TOKENS else 1 for token in self.tokens])
        writer.add_token_merges(list(self.merges))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(self.eos_token_id)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        writer.add_chat_template(TEMPLATE)

    def _weights(self) -> dict[str, Array]:
        rng = np.random.default_rng(7)

        def matrix(rows: int, columns: int) -> Array:
            return (rng.integers(-128, 128, (rows, columns)) / 64).astype(np.float32)  # exact in bfloat16

        def norm() -> Array:
            return (rng.integers(1, 128, HIDDEN) / 64).astype(np.float32)

        vocab_size = len(self.tokens)
        weights = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN), "model.norm.weight": norm()}
        if not self.tied:
            weights["lm_head.weight"] = matrix(vocab_size, HIDDEN)
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}"
            weights[f"{prefix}.input_layernorm.weight"] = norm()
            weights[f"{prefix}.post_attention_layernorm.weight"] = norm()
            weights[f"{prefix}.self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
            weights[f"{prefix}.self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
            weights[f"{prefix}.self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
            weights[f"{prefix}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
            weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
            weights[f"{prefix}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
            weights[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        return weights


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{parts[part]}.weight"


def _as_llama_cpp(name: str, values: Array) -> Array:
    """The two halves of each q and k head interleaved; a loop, so that it is no copy of what it tests."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    half = HEAD_DIM // 2
    out = np.empty_like(values)
    for head in range(len(values) // HEAD_DIM):
        for i in range(half):
            first = head * HEAD_DIM
            out[first + 2 * i] = values[first + i]
            out[first + 2 * i + 1] = values[first + half + i]
    return out
