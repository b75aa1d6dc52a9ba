"""The decoder: parameters under their Hugging Face names, and one forward pass over paged KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kernels import reference
from engine.kernels.scoring import Scoring
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model.int8 import Int8Linear
from engine.model.layers import (
    Linear,
    gelu_tanh_and_mul,
    inverse_frequencies,
    local_frequencies,
    rms_norm,
    rotate,
    rotation,
    silu_and_mul,
)


class Product(Protocol):
    """A product with a weight, whose rows it also gives."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """[rows, in] -> [rows, out], type of x."""

    def rows(self, indices: torch.Tensor, /) -> torch.Tensor:
        """[n] int64 -> [n, in] float32."""


class Model(Protocol):
    config: ModelConfig

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """Write the KV of the batch's tokens, and return the logits of `batch.sample_rows`: [rows, vocab] float32.

        May raise `PassStopped` between two layers, once `batch.control` says so."""


class PagedKv(Protocol):
    """What the decoder needs of a `KvCache`; a rank of a tensor-parallel worker has its heads of one."""

    @property
    def layout(self) -> KvLayout: ...
    @property
    def pool(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor | None: ...


Reduce = Callable[[torch.Tensor], torch.Tensor]
"""From a rank's part of a sum, [T, hidden], to the sum over all ranks."""


def alone(whole: torch.Tensor) -> torch.Tensor:
    return whole


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Those that a family has not are None."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: torch.Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    attention_out: torch.Tensor  # [hidden, heads * head_dim]
    post_attention_norm: torch.Tensor | None  # [hidden]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]: gate, up
    down: torch.Tensor  # [hidden, intermediate]
    post_mlp_norm: torch.Tensor | None  # [hidden]


class DecoderWeights:
    """Owns the parameters. Fused ones are one tensor of which the checkpoint's tensors are slices."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> None:
        """Allocates without values: the loader fills `parts`. On the device `meta` there are shapes only."""
        self.config = config
        self._dtype = dtype
        self._device = device
        self._q_rows = config.num_heads * config.head_dim
        self._kv_rows = config.num_kv_heads * config.head_dim
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._empty_layer() for _ in range(config.num_layers)]
        self.final_norm = self._empty(config.hidden_size)
        self.lm_head = self.embedding
        if not config.tie_word_embeddings:
            self.lm_head = self._empty(config.vocab_size, config.hidden_size)

    def parts(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a Hugging Face checkpoint belongs; all together they are every parameter, once."""
        parts = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not self.config.tie_word_embeddings:
            parts["lm_head.weight"] = self.lm_head
        for i, layer in enumerate(self.layers):
            named = self._parts_of_layer(layer)
            parts |= {f"model.layers.{i}.{name}": tensor for name, tensor in named.items() if tensor is not None}
        return parts

    @property
    def ignored(self) -> frozenset[str]:
        """Endings of names that checkpoints hold beside the parameters: what we compute, or a tied head again."""
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        return frozenset({"rotary_emb.inv_freq"} | tied)

    def _parts_of_layer(self, layer: LayerWeights) -> dict[str, torch.Tensor | None]:
        sizes = [self._q_rows, self._kv_rows, self._kv_rows]
        q, k, v = torch.split(layer.qkv, sizes)
        biases = [None] * 3 if layer.qkv_bias is None else torch.split(layer.qkv_bias, sizes)
        gate, up = layer.gate_up.chunk(2)
        # With norms behind attention and MLP, that behind attention has the name that the MLP's has without.
        before_mlp = "pre_feedforward_layernorm" if self.config.post_norms else "post_attention_layernorm"
        return {
            "input_layernorm.weight": layer.input_norm,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.q_proj.bias": biases[0],
            "self_attn.k_proj.bias": biases[1],
            "self_attn.v_proj.bias": biases[2],
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.o_proj.weight": layer.attention_out,
            "post_attention_layernorm.weight": layer.post_attention_norm,
            f"{before_mlp}.weight": layer.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
            "post_feedforward_layernorm.weight": layer.post_mlp_norm,
        }

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)

    def _empty_layer(self) -> LayerWeights:
        config = self.config
        hidden, inner, qkv_rows = config.hidden_size, config.intermediate_size, self._q_rows + 2 * self._kv_rows
        return LayerWeights(
            input_norm=self._empty(hidden),
            qkv=self._empty(qkv_rows, hidden),
            qkv_bias=self._empty(qkv_rows) if config.qkv_bias else None,
            q_norm=self._empty(config.head_dim) if config.qk_norm else None,
            k_norm=self._empty(config.head_dim) if config.qk_norm else None,
            attention_out=self._empty(hidden, self._q_rows),
            post_attention_norm=self._empty(hidden) if config.post_norms else None,
            mlp_norm=self._empty(hidden),
            gate_up=self._empty(2 * inner, hidden),
            down=self._empty(hidden, inner),
            post_mlp_norm=self._empty(hidden) if config.post_norms else None,
        )


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Factor of every embedding: rounded to the weights' type, as transformers has it."""
    return float(torch.tensor(config.hidden_size**0.5).to(dtype)) if config.scale_embedding else 1.0


def soft_cap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """May overwrite `logits`."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


@dataclass(frozen=True, slots=True)
class _Rotation:
    cos: torch.Tensor  # [T, 1, head_dim] float32
    sin: torch.Tensor  # the same


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one forward pass needs, worked out once."""

    block_tables: list[torch.Tensor]  # S of [ceil(context_len / block_size)] int64
    query_starts: list[int]
    context_lens: list[int]
    slot_blocks: torch.Tensor  # [T] int64
    slot_offsets: torch.Tensor  # [T] int64
    rotation: _Rotation
    local_rotation: _Rotation
    """Of layers with a window."""


@dataclass(frozen=True, slots=True)
class _Products:
    """Of one layer, with its weights."""

    qkv: Product
    attention_out: Product
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, layer: LayerWeights, product: Callable[[torch.Tensor], Product]) -> Self:
        return cls(product(layer.qkv), product(layer.attention_out), product(layer.gate_up), product(layer.down))


class DecoderModel:
    """Every family that we run; they differ by config alone."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, reduce: Reduce = alone, *, int8: bool = False
    ) -> None:
        """`reduce`, where `weights` are a rank's share: behind the products that end attention and MLP. `int8`:
        products and embedding are with weights that are rounded to whole numbers here."""
        self.config = config
        self._weights = weights
        self._reduce = reduce
        product = Int8Linear if int8 else Linear
        self._products = [_Products.of(layer, product) for layer in weights.layers]
        self._head = product(weights.lm_head)
        self._embedding = self._head if config.tie_word_embeddings else product(weights.embedding)
        self._frequencies = inverse_frequencies(config)
        self._local_frequencies = local_frequencies(config)
        self._local_layers = frozenset(config.local.layers) if config.local else frozenset[int]()
        self._full = Scoring(config.score_scale)
        self._local = Scoring(config.score_scale, config.local.window if config.local else None)
        self._embedding_scale = embedding_scale(config, weights.embedding.dtype)
        self._gate = silu_and_mul if config.activation == "silu" else gelu_tanh_and_mul

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKv) -> torch.Tensor:
        """See `Model`. The residual stream is float32; products are in the type of the weights."""
        step = self._prepare(batch, kv.layout.block_size)
        hidden = self._embedding.rows(batch.token_ids)  # [T, hidden]
        if self.config.scale_embedding:
            hidden *= self._embedding_scale
        for i, layer in enumerate(self._weights.layers):
            if batch.control is not None:
                batch.control.enter(i)
            hidden += self._normed(self._reduce(self._attention(i, layer, hidden, step, kv)), layer.post_attention_norm)
            hidden += self._normed(self._reduce(self._mlp(i, layer, hidden)), layer.post_mlp_norm)
        if not batch.sample_rows:
            return hidden.new_empty(0, self.config.vocab_size)
        rows = hidden[torch.tensor(batch.sample_rows, dtype=torch.int64)]
        logits = self._head(self._norm(rows, self._weights.final_norm)).float()
        return soft_cap(logits, self.config.final_soft_cap)

    def _prepare(self, batch: ForwardBatch, block_size: int) -> _Step:
        tables = [
            torch.tensor(table[: -(-context_len // block_size)], dtype=torch.int64)
            for table, context_len in zip(batch.block_tables, batch.context_lens, strict=True)
        ]
        ordinals = batch.positions // block_size
        starts = batch.query_starts
        slot_blocks = [table[ordinals[starts[s] : starts[s + 1]]] for s, table in enumerate(tables)]
        turned = _Rotation(*rotation(batch.positions, self._frequencies))
        turns_apart = self.config.local is not None and self.config.local.rope_theta is not None
        return _Step(
            block_tables=tables,
            query_starts=starts,
            context_lens=batch.context_lens,
            slot_blocks=torch.cat(slot_blocks),
            slot_offsets=batch.positions % block_size,
            rotation=turned,
            local_rotation=_Rotation(*rotation(batch.positions, self._local_frequencies)) if turns_apart else turned,
        )

    def _attention(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, step: _Step, kv: PagedKv
    ) -> torch.Tensor:  # [T, hidden]
        config = self.config
        local = index in self._local_layers
        turned, scoring = (step.local_rotation, self._local) if local else (step.rotation, self._full)
        x = self._norm(hidden, layer.input_norm)
        qkv = self._products[index].qkv(x)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        qkv = qkv.view(len(x), -1, config.head_dim)  # [T, heads + 2 * kv_heads, head_dim]
        rotated = config.num_heads + config.num_kv_heads
        qk, v = rotate(self._normed_heads(qkv[:, :rotated], layer), turned.cos, turned.sin), qkv[:, rotated:]
        q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
        reference.store_kv(k, v, kv.pool, index, step.slot_blocks, step.slot_offsets, kv.scales)
        mixed = reference.paged_attention(
            q, kv.pool, index, step.block_tables, step.query_starts, step.context_lens, scoring, kv.scales
        )
        return self._products[index].attention_out(mixed.flatten(1).to(x.dtype))

    def _mlp(self, index: int, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:  # [T, hidden]
        products = self._products[index]
        return products.down(self._gate(products.gate_up(self._norm(hidden, layer.mlp_norm))))

    def _normed_heads(self, qk: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        if layer.q_norm is None or layer.k_norm is None:
            return qk
        num_heads = self.config.num_heads
        return torch.cat(
            (self._norm(qk[:, :num_heads], layer.q_norm), self._norm(qk[:, num_heads:], layer.k_norm)), dim=1
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), weight, self.config.rms_norm_eps, self.config.norm_offset)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._norm(x, weight)
