"""The decoder: parameters under their Hugging Face names, and one forward pass over paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kernels import reference
from engine.kernels.scoring import Scoring
from engine.kv_cache import KvCache
from engine.model.layers import inverse_frequencies, linear, rms_norm, rotate, rotation, silu_and_mul


class Model(Protocol):
    config: ModelConfig

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """Write the KV of the batch's tokens, and return the logits of `batch.sample_rows`: [rows, vocab] float32."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    attention_out: torch.Tensor  # [hidden, heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]: gate, up
    down: torch.Tensor  # [hidden, intermediate]


class DecoderWeights:
    """Owns the parameters. Fused ones are one tensor of which the checkpoint's tensors are slices."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Allocates without values: the loader fills `parts`."""
        self._config = config
        self._dtype = dtype
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._empty_layer() for _ in range(config.num_layers)]
        self.final_norm = self._empty(config.hidden_size)
        self.lm_head = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = self._empty(config.vocab_size, config.hidden_size)

    def parts(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a Hugging Face checkpoint belongs; all together they are every parameter, once."""
        parts = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not self._config.tie_word_embeddings:
            parts["lm_head.weight"] = self.lm_head
        kv_rows = self._config.num_kv_heads * self._config.head_dim
        q_rows = self._config.num_heads * self._config.head_dim
        for i, layer in enumerate(self.layers):
            q, k, v = torch.split(layer.qkv, [q_rows, kv_rows, kv_rows])
            gate, up = layer.gate_up.chunk(2)
            named = {
                "input_layernorm": layer.input_norm,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": layer.attention_out,
                "post_attention_layernorm": layer.mlp_norm,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.down,
            }
            parts |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in named.items()}
        return parts

    @property
    def ignored(self) -> frozenset[str]:
        """Endings of names that checkpoints hold beside the parameters: what we compute, or a tied head again."""
        tied = {"lm_head.weight"} if self._config.tie_word_embeddings else set()
        return frozenset({"rotary_emb.inv_freq"} | tied)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self._dtype)

    def _empty_layer(self) -> LayerWeights:
        config = self._config
        q_rows = config.num_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        return LayerWeights(
            input_norm=self._empty(config.hidden_size),
            qkv=self._empty(q_rows + 2 * kv_rows, config.hidden_size),
            attention_out=self._empty(config.hidden_size, q_rows),
            mlp_norm=self._empty(config.hidden_size),
            gate_up=self._empty(2 * config.intermediate_size, config.hidden_size),
            down=self._empty(config.hidden_size, config.intermediate_size),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one forward pass needs, worked out once."""

    block_tables: list[torch.Tensor]  # S of [ceil(context_len / block_size)] int64
    query_starts: list[int]
    context_lens: list[int]
    slot_blocks: torch.Tensor  # [T] int64
    slot_offsets: torch.Tensor  # [T] int64
    cos: torch.Tensor  # [T, 1, head_dim] float32
    sin: torch.Tensor  # the same


class DecoderModel:
    """Llama 2 and 3, SmolLM and others that differ from them by config alone."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._frequencies = inverse_frequencies(config)
        self._scoring = Scoring(config.head_dim**-0.5)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """See `Model`. The residual stream is float32; products are in the type of the weights."""
        step = self._prepare(batch, kv.layout.block_size)
        hidden = F.embedding(batch.token_ids, self._weights.embedding).float()  # [T, hidden]
        for i, layer in enumerate(self._weights.layers):
            hidden += self._attention(i, layer, hidden, step, kv)
            hidden += self._mlp(layer, hidden)
        rows = hidden[torch.tensor(batch.sample_rows, dtype=torch.int64)]
        return linear(rms_norm(rows, self._weights.final_norm, self.config.rms_norm_eps), self._weights.lm_head).float()

    def _prepare(self, batch: ForwardBatch, block_size: int) -> _Step:
        tables = [
            torch.tensor(table[: -(-context_len // block_size)], dtype=torch.int64)
            for table, context_len in zip(batch.block_tables, batch.context_lens, strict=True)
        ]
        ordinals = batch.positions // block_size
        starts = batch.query_starts
        slot_blocks = [table[ordinals[starts[s] : starts[s + 1]]] for s, table in enumerate(tables)]
        cos, sin = rotation(batch.positions, self._frequencies)
        return _Step(
            block_tables=tables,
            query_starts=starts,
            context_lens=batch.context_lens,
            slot_blocks=torch.cat(slot_blocks),
            slot_offsets=batch.positions % block_size,
            cos=cos,
            sin=sin,
        )

    def _attention(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, step: _Step, kv: KvCache
    ) -> torch.Tensor:  # [T, hidden]
        config = self.config
        x = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        qkv = linear(x, layer.qkv).view(len(x), -1, config.head_dim)  # [T, heads + 2 * kv_heads, head_dim]
        rotated = config.num_heads + config.num_kv_heads
        qk, v = rotate(qkv[:, :rotated], step.cos, step.sin), qkv[:, rotated:]
        q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
        reference.store_kv(k, v, kv.pool, index, step.slot_blocks, step.slot_offsets, kv.scales)
        mixed = reference.paged_attention(
            q, kv.pool, index, step.block_tables, step.query_starts, step.context_lens, self._scoring, kv.scales
        )
        return linear(mixed.flatten(1).to(x.dtype), layer.attention_out)

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:  # [T, hidden]
        x = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        return linear(silu_and_mul(linear(x, layer.gate_up)), layer.down)
